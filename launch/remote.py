"""Results of remote calls, with errors as the actor raised them."""

from typing import Any

import ray

from areal_lite.errors import ArealLiteError

__all__ = ["describe", "result"]


def result(reference: Any, *, timeout_s: float | None = None) -> Any:
    """Return the result of a remote call.

    Raises:
        ArealLiteError: The error the actor raised, without Ray's wrapping.
        RayError: The actor is dead, late, or failed otherwise.
    """
    try:
        return ray.get(reference, timeout=timeout_s)
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, ArealLiteError):
            raise error.cause from None
        raise


def describe(error: BaseException) -> str:
    """Say in one line what went wrong, without Ray's wrapping."""
    cause = error.cause if isinstance(error, ray.exceptions.RayTaskError) else error
    lines = str(cause).strip().splitlines()
    return f"{type(cause).__name__}: {lines[0]}" if lines else type(cause).__name__
