"""The live rollout actors as the hand-over calls them."""

from collections.abc import Callable
from typing import Any

import ray

from areal_lite.actors.calls import Calls, call_all, describe
from areal_lite.errors import HandoverError, StallError
from areal_lite.watchdog import Watchdog

_SLICE_S = 0.5
"""How often a wait looks for progress."""


class RayEngines:
    """Rollout actors by name; one that fails or hangs in a call is killed.

    Implements `areal_lite.weights.handover.EngineGroup`.
    """

    def __init__(self, handles: dict[str, Any], *, timeout_s: float, on_drop: Callable[[str, str], None]) -> None:
        self.handles = handles
        self._timeout_s, self._on_drop = timeout_s, on_drop
        self.expects_more: Callable[[], bool] = lambda: False
        """Whether others are starting, so that having none is no reason to end the run."""
        self.meanwhile: Callable[[], object] = lambda: None
        """Called beside each wait, so that a stop is answered while samples drain."""
        self._last_lost = ""
        self._method, self._calls = "", Calls({})

    def begin(self, method: str, *args: Any) -> None:
        """Call all actors at once; the next `each` waits for them first."""
        self._method, self._calls = method, call_all(self.handles, method, *args)

    def each(self, method: str, *args: Any) -> None:
        """Call all actors at once and wait; kill those that fail, or are late while no engine makes progress.

        Raises:
            HandoverError: None is left.
        """
        self.finish()
        self.begin(method, *args)
        self.finish()

    def finish(self) -> None:
        """Wait for the calls of `begin`, as `each` does: draining may take long, so tokens count as progress."""
        watchdog, calls = Watchdog(self._timeout_s), self._calls
        while calls.pending:
            self.meanwhile()
            for name, error in calls.failures(_SLICE_S).items():
                self.drop(name, f"{self._method}: {describe(error)}")
            if calls.pending:
                self._drop_if_stalled(calls, watchdog)
        self.raise_if_none()

    def drop(self, name: str, reason: str) -> None:
        """Kill an actor and report its loss."""
        if (handle := self.forget(name)) is not None:
            ray.kill(handle)
            self._last_lost = f"{name}, was lost in {reason}"
            self._on_drop(name, reason)

    def forget(self, name: str) -> Any:
        """Return the handle of an actor that leaves, if it is there."""
        self._calls.pending.pop(name, None)  # its successor has the same name, and must not get its answer
        return self.handles.pop(name, None)

    def raise_if_none(self) -> None:
        """Raise if no engine is left.

        Raises:
            HandoverError: None is left; names the cause of the last loss.
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
        """Tokens that each engine has generated; None for one that does not answer."""
        calls = call_all(self.handles, "progress")
        calls.failures(_SLICE_S)
        return tuple(calls.values.get(name) for name in self.handles)
