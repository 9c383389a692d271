"""Calls of actors: one method on several of them at once, answers and failures by name, no wait without a deadline.

The controller's process calls queue, workers and ranks this way; a trainer rank calls the engines. Whether an actor
died, and of what, is decided here (`has_died`, `death`).
"""

import contextlib
import re
import time
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import ray

from areal_lite.errors import ArealLiteError
from areal_lite.node import out_of_memory

_STOP_TIMEOUT_S = 20.0


class Calls:
    """Calls in flight, one per actor."""

    def __init__(self, references: Mapping[str, Any]) -> None:
        self.pending = dict(references)
        """What Ray returned for each call that is not answered yet, by the actor's lane name."""
        self.values: dict[str, Any] = {}
        """What the others returned; nothing of those that failed."""

    def answers(self, timeout_s: float, *, silent: Collection[str] = ()) -> Iterator[tuple[str, Exception | None]]:
        """Wait until all have answered or the time is over; calls without an answer stay in `pending`.

        Args:
            timeout_s: Longest wait, in seconds.
            silent: Actors whose answers are taken where they are there, but not waited for.

        Yields:
            The actor's name, and None (its answer is in `values`) or why the call failed: an `ArealLiteError` as the
            actor raised it, or Ray's error where the actor is dead or raised another.
        """
        deadline = time.monotonic() + timeout_s
        while self.pending:
            wait_s = deadline - time.monotonic() if self.pending.keys() - silent else 0.0
            ready, _ = ray.wait(list(self.pending.values()), timeout=max(0.0, wait_s))
            if not ready:
                return
            for name in [name for name, reference in self.pending.items() if reference in ready]:
                if name in self.pending:  # the caller may have dropped this call when it got another's answer
                    failure = None
                    try:
                        self.values[name] = result(self.pending.pop(name))
                    except (ArealLiteError, ray.exceptions.RayError) as error:
                        failure = error
                    yield name, failure

    def failures(self, timeout_s: float, *, silent: Collection[str] = ()) -> dict[str, Exception]:
        """Wait as `answers` does, and return the errors of the calls that failed."""
        return {name: error for name, error in self.answers(timeout_s, silent=silent) if error is not None}


def call_all(handles: Mapping[str, Any], method: str, *args: Any, **kwargs: Any) -> Calls:
    """Call a method of several actors, given by name, and do not wait."""
    return Calls({name: getattr(handle, method).remote(*args, **kwargs) for name, handle in handles.items()})


class Poller:
    """Calls one method of several actors again and again, without waiting for those that owe an answer already."""

    def __init__(self, method: str) -> None:
        self._method = method
        self._calls = Calls({})
        self._asked_at: dict[str, float] = {}
        self.latest: dict[str, Any] = {}
        """The last answer of each actor that was polled last."""

    def poll(self, handles: Mapping[str, Any], *, wait_s: float) -> tuple[dict[str, Any], dict[str, Exception]]:
        """Call every actor that owes no answer.

        Args:
            handles: Actors by name.
            wait_s: Longest wait for those called now.

        Returns:
            The answers that are there in time, and the failures, by name.
        """
        owed = {name: reference for name, reference in self._calls.pending.items() if name in handles}
        called = {name: getattr(handle, self._method).remote() for name, handle in handles.items() if name not in owed}
        now = time.monotonic()
        self._asked_at = {name: self._asked_at[name] if name in owed else now for name in handles}
        self._calls = Calls(owed | called)
        failed = self._calls.failures(wait_s, silent=owed)
        known = self.latest | self._calls.values
        self.latest = {name: known[name] for name in handles if name in known}
        return self._calls.values, failed

    def silent(self) -> dict[str, float]:
        """Return the actors that owe an answer, and for how many seconds."""
        now = time.monotonic()
        return {name: now - self._asked_at[name] for name in self._calls.pending}


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


def has_died(error: BaseException | None) -> bool:
    """Whether a call failed because the actor's process is gone: it ended, or its node, or Ray killed it."""
    errors = ray.exceptions
    return isinstance(error, (errors.RayActorError, errors.OutOfMemoryError, errors.NodeDiedError))


def death(error: BaseException) -> str:
    """Describe how an actor's process ended, with what to do where memory was short."""
    if not isinstance(error, ray.exceptions.OutOfMemoryError):
        return f"its process ended{out_of_memory()}"
    used = re.search(r"was (\S+ used / \S+ limit)", str(error))
    largest = re.search(r"COMMAND\n\d+\t(\S+)\t(.+)", str(error))  # the first row of a table
    facts = f" ({used[1]})" if used else ""
    if largest:
        facts += f"; the largest process there: {largest[1]} GB, {largest[2]}"
    return (
        f"Ray's memory monitor killed it, as its node was short of memory{facts}. Fix: lower rollout.kv_cache_mb, "
        "trainer.micro_batch_tokens or what verifiers keep, or raise RAY_memory_usage_threshold (default 0.95)"
    )


def describe(error: BaseException) -> str:
    """Return an error's type and first line, without Ray's wrapping."""
    cause = error.cause if isinstance(error, ray.exceptions.RayTaskError) else error
    if isinstance(cause, ray.exceptions.OutOfMemoryError):
        return death(cause)
    lines = str(cause).strip().splitlines()
    ended = out_of_memory() if has_died(cause) else ""
    return f"{type(cause).__name__}: {lines[0]}{ended}" if lines else type(cause).__name__


def stop_all(handles: Mapping[str, Any]) -> None:
    """Stop actors in order; one that is late or fails is not waited for."""
    call_all(handles, "stop").failures(_STOP_TIMEOUT_S)


def kill(*handles: Any) -> None:
    """Kill actors; None and dead ones are skipped."""
    for handle in handles:
        with contextlib.suppress(Exception):
            ray.kill(handle)
