"""The live rollout actors as the hand-over sees them."""

from collections.abc import Callable
from typing import Any

import ray

from areal_lite.errors import HandoverError
from areal_lite.launch.run.remote import describe, result
from areal_lite.watchdog import Watchdog

__all__ = ["RayEngines"]

_SLICE_S = 0.5
"""How often a wait looks for progress."""


class RayEngines:
    """Rollout actors by name; one that fails a call, or stands still in it, is given up.

    Implements `areal_lite.weights.handover.EngineGroup`.
    """

    def __init__(self, handles: dict[str, Any], *, timeout_s: float, on_drop: Callable[[str, str], None]) -> None:
        self.handles = handles
        self._timeout_s, self._on_drop = timeout_s, on_drop
        self._last_lost = ""
        self._method, self._references = "", dict[str, Any]()

    def begin(self, method: str, *args: Any) -> None:
        """Call all actors at once; the next `each` waits for them first."""
        self._method = method
        self._references = {name: getattr(handle, method).remote(*args) for name, handle in self.handles.items()}

    def each(self, method: str, *args: Any) -> None:
        """Call all actors at once and wait; those that fail, or are late while no engine makes progress, are dropped.

        Raises:
            HandoverError: None is left.
        """
        self.finish()
        self.begin(method, *args)
        self.finish()

    def finish(self) -> None:
        """Wait for what was begun last, as `each` does."""
        watchdog = Watchdog(self._timeout_s)
        method, references, self._references = self._method, self._references, {}
        for name, reference in references.items():
            try:
                self._wait(name, reference, watchdog, waiting_for=method)
            except Exception as error:
                self.drop(name, f"{method}: {describe(error)}")
        self.raise_if_none()

    def drop(self, name: str, reason: str) -> None:
        """Kill an actor and report it lost."""
        if (handle := self.handles.pop(name, None)) is not None:
            ray.kill(handle)
            self._last_lost = f"{name}, was lost in {reason}"
            self._on_drop(name, reason)

    def raise_if_none(self) -> None:
        """Raise when there is nobody left to generate.

        Raises:
            HandoverError: No actor is left; says how the last one was lost.
        """
        if not self.handles:
            raise HandoverError(f"no rollout worker is left; the last one, {self._last_lost}")

    def _wait(self, name: str, reference: Any, watchdog: Watchdog, *, waiting_for: str) -> None:
        """Wait for one actor; draining may take as long as the longest answer, so tokens count as progress."""
        while True:
            try:
                result(reference, timeout_s=_SLICE_S)
                return
            except ray.exceptions.GetTimeoutError:
                watchdog.check(self._tokens(), waiting_for=waiting_for, culprit=lambda: name)

    def _tokens(self) -> tuple[int | None, ...]:
        return tuple(_tokens(handle) for handle in self.handles.values())


def _tokens(handle: Any) -> int | None:
    """Tokens an engine has generated; None when it does not say."""
    try:
        return int(result(handle.progress.remote(), timeout_s=_SLICE_S))
    except Exception:
        return None
