"""The live rollout actors as the hand-over sees them."""

from collections.abc import Callable
from typing import Any

import ray

from areal_lite.actors.calls import Calls, call_all, describe
from areal_lite.errors import HandoverError, StallError
from areal_lite.watchdog import Watchdog

_SLICE_S = 0.5
"""How often a wait looks for progress."""


class RayEngines:
    """Rollout actors by name; one that fails a call, or stands still in it, is given up.

    Implements `areal_lite.weights.handover.EngineGroup`.
    """

    def __init__(self, handles: dict[str, Any], *, timeout_s: float, on_drop: Callable[[str, str], None]) -> None:
        self.handles = handles
        self._timeout_s, self._on_drop = timeout_s, on_drop
        self.expects_more: Callable[[], bool] = lambda: False
        """Whether more are on their way, so that to have none is not the end."""
        self._last_lost = ""
        self._method, self._calls = "", Calls({})

    def begin(self, method: str, *args: Any) -> None:
        """Call all actors at once; the next `each` waits for them first."""
        self._method, self._calls = method, call_all(self.handles, method, *args)

    def each(self, method: str, *args: Any) -> None:
        """Call all actors at once and wait; those that fail, or are late while no engine makes progress, are dropped.

        Raises:
            HandoverError: None is left.
        """
        self.finish()
        self.begin(method, *args)
        self.finish()

    def finish(self) -> None:
        """Wait for what was begun last, as `each` does: draining may take long, so tokens count as progress."""
        watchdog, calls = Watchdog(self._timeout_s), self._calls
        while calls.pending:
            for name, error in calls.failures(_SLICE_S).items():
                self.drop(name, f"{self._method}: {describe(error)}")
            if calls.pending:
                self._drop_if_stalled(calls, watchdog)
        self.raise_if_none()

    def drop(self, name: str, reason: str) -> None:
        """Kill an actor and report it lost."""
        if (handle := self.forget(name)) is not None:
            ray.kill(handle)
            self._last_lost = f"{name}, was lost in {reason}"
            self._on_drop(name, reason)

    def forget(self, name: str) -> Any:
        """Return the handle of an actor that leaves, if it is there."""
        self._calls.pending.pop(name, None)  # Its successor of this name must not be blamed for its answer.
        return self.handles.pop(name, None)

    def raise_if_none(self) -> None:
        """Raise when there is nobody left to generate.

        Raises:
            HandoverError: No actor is left; says how the last one was lost.
        """
        if not self.handles and not self.expects_more():
            raise HandoverError(f"no rollout worker is left; the last one, {self._last_lost}")

    def _drop_if_stalled(self, calls: Calls, watchdog: Watchdog) -> None:
        late = list(calls.pending)
        try:
            watchdog.check(self._tokens(), waiting_for=self._method, culprit=lambda: ", ".join(late))
        except StallError as error:
            calls.pending.clear()
            for name in late:
                self.drop(name, f"{self._method}: {describe(error)}")

    def _tokens(self) -> tuple[int | None, ...]:
        """Tokens that each engine has generated; None for one that does not say."""
        calls = call_all(self.handles, "progress")
        calls.failures(_SLICE_S)
        return tuple(calls.values.get(name) for name in self.handles)
