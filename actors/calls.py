"""Calls of actors: one method on several of them at once, answers and failures by name, no wait without a deadline.

The controller's process asks queue, workers and ranks this way, a trainer rank the engines.
"""

import contextlib
import time
from collections.abc import Iterator, Mapping
from typing import Any

import ray

from areal_lite.errors import ArealLiteError
from areal_lite.node import out_of_memory

_STOP_TIMEOUT_S = 20.0


class Calls:
    """Calls under way, one per actor."""

    def __init__(self, references: Mapping[str, Any]) -> None:
        self.pending = dict(references)
        """What Ray returned for each call that is not answered yet, by the actor's lane name."""
        self.values: dict[str, Any] = {}
        """What the others returned; nothing of those that failed."""

    def answers(self, timeout_s: float) -> Iterator[tuple[str, Exception | None]]:
        """Wait until all have answered or the time is over; who is late stays in `pending`.

        Yields:
            Who answered, and None (its answer is in `values`) or why it failed: an `ArealLiteError` as the actor raised
            it, or Ray's, where it is dead or raised another.
        """
        deadline = time.monotonic() + timeout_s
        while self.pending:
            ready, _ = ray.wait(list(self.pending.values()), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                return
            for name in [name for name, reference in self.pending.items() if reference in ready]:
                if name in self.pending:  # whoever got the answer before may have let go of this one
                    failure = None
                    try:
                        self.values[name] = result(self.pending.pop(name))
                    except (ArealLiteError, ray.exceptions.RayError) as error:
                        failure = error
                    yield name, failure

    def failures(self, timeout_s: float) -> dict[str, Exception]:
        """Wait as `answers` does, and return who failed, and why."""
        return {name: error for name, error in self.answers(timeout_s) if error is not None}


def call_all(handles: Mapping[str, Any], method: str, *args: Any, **kwargs: Any) -> Calls:
    """Call a method of several actors, given by name, and do not wait."""
    return Calls({name: getattr(handle, method).remote(*args, **kwargs) for name, handle in handles.items()})


class Question:
    """One method without arguments, asked of several actors again and again; nobody waits for a late answer."""

    def __init__(self, method: str) -> None:
        self._method = method
        self._calls = Calls({})

    def ask(self, handles: Mapping[str, Any], *, wait_s: float) -> tuple[dict[str, Any], dict[str, Exception]]:
        """Ask every actor that owes no answer.

        Returns:
            The answers that are there in time, and the failures, by name.
        """
        owed = self._calls.pending
        self._calls = Calls(
            {name: owed.get(name) or getattr(handle, self._method).remote() for name, handle in handles.items()}
        )
        failed = self._calls.failures(wait_s)
        return self._calls.values, failed


def result(reference: Any) -> Any:
    """Return the result of one call.

    Raises:
        ArealLiteError: The error the actor raised, without Ray's wrapping.
        RayError: The actor is dead, or failed otherwise.
    """
    try:
        return ray.get(reference)
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, ArealLiteError):
            raise error.cause from None
        raise


def describe(error: BaseException) -> str:
    """Say in one line what went wrong, without Ray's wrapping."""
    cause = error.cause if isinstance(error, ray.exceptions.RayTaskError) else error
    lines = str(cause).strip().splitlines()
    ended = out_of_memory() if isinstance(cause, ray.exceptions.RayActorError) else ""
    return f"{type(cause).__name__}: {lines[0]}{ended}" if lines else type(cause).__name__


def stop_all(handles: Mapping[str, Any]) -> None:
    """Have actors stop in good order; one that is late or fails is not waited for."""
    call_all(handles, "stop").failures(_STOP_TIMEOUT_S)


def kill(*handles: Any) -> None:
    """End actors at once; None, in the place of one, and those that are dead are passed over."""
    for handle in handles:
        with contextlib.suppress(Exception):
            ray.kill(handle)
