"""Results of remote calls, with errors as the actor raised them."""

from collections.abc import Mapping
from typing import Any

import ray

from areal_lite.errors import ArealLiteError

__all__ = ["Question", "describe", "result"]


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


class Question:
    """One method without arguments, asked of several actors again and again; nobody waits for a late answer."""

    def __init__(self, method: str) -> None:
        self._method = method
        self._open: dict[str, Any] = {}

    def ask(self, actors: Mapping[str, Any], *, wait_s: float) -> dict[str, Any]:
        """Ask every actor that owes no answer, and return the answers (as references) that are there in time."""
        self._open = {
            name: self._open.get(name) or getattr(actor, self._method).remote() for name, actor in actors.items()
        }
        if not self._open:
            return {}
        ready, _ = ray.wait(list(self._open.values()), num_returns=len(self._open), timeout=wait_s)
        return {name: self._open.pop(name) for name, reference in list(self._open.items()) if reference in ready}
