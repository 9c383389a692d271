"""vLLM's weight-sync client over the rollout actors: what a trainer rank drives the engines with."""

import time
from collections.abc import Callable, Mapping
from typing import Any

from areal_lite.actors.calls import Calls, call_all, describe, has_died
from areal_lite.errors import EngineError, HandoverError

_LET_GO_S = 15.0
"""How long engines may take to answer once they have been let go."""


class EngineClient:
    """Speaks to one or several rollout actors at once, with a deadline, failing by name.

    Implements vLLM's `VLLMWeightSyncClient` protocol. A `HandoverError` has the engines to blame. Several may wait for
    each other in a collective: when one fails, the others are let go and heard, so that only those are blamed that
    died, or stay silent.
    """

    def __init__(
        self, handles: Mapping[str, Any], *, timeout_s: float, join_timeout_s: float, ranks_per_engine: int
    ) -> None:
        self._handles, self._ranks_per_engine = handles, ranks_per_engine
        self._timeouts = {"timeout_s": timeout_s, "join_timeout_s": join_timeout_s}
        self.let_go: Callable[[], None] = lambda: None
        """Wakes all who wait for an engine that failed, the trainer among them; set by the sender of a group."""

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Have every engine join; in one common group each gets ranks of its own."""
        references = {}
        for index, (name, handle) in enumerate(self._handles.items()):
            info = dict(init_info)
            if "rank_offset" in info:
                info["rank_offset"] += index * self._ranks_per_engine
            references[name] = handle.init_weight_transfer_engine.remote(info)
        self._finish(Calls(references), "init_weight_transfer_engine", setting="join_timeout_s")

    def start_weight_update(self) -> None:
        """Open the update."""
        self._call("start_weight_update")

    def update_weights(self, update_info: Any) -> None:
        """Receive every parameter."""
        self._call("update_weights", update_info)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Load them; the version is stamped by the hand-over, after all engines have loaded."""
        self._call("finish_weight_update")

    def _call(self, method: str, *args: Any) -> None:
        self._finish(call_all(self._handles, method, *args), method, setting="timeout_s")

    def _finish(self, calls: Calls, method: str, *, setting: str) -> None:
        timeout_s = self._timeouts[setting]
        deadline = time.monotonic() + timeout_s
        errors = next(({name: error} for name, error in calls.answers(timeout_s) if error is not None), {})
        late = set(calls.pending) if not errors else set()
        if not errors and not late:
            return
        self.let_go()
        others: dict[str, Exception] = {}
        if len(self._handles) > 1:
            # Those that join cannot be told: they give up when their own time is over.
            left_s = max(0.0, deadline - time.monotonic()) if method.startswith("init") else 0.0
            others = calls.failures(left_s + _LET_GO_S)
            if method == "update_weights":  # An update that came through must be closed before there is another.
                received = {name: self._handles[name] for name in calls.values}
                call_all(received, "finish_weight_update").failures(self._timeouts["timeout_s"])
        errors |= {name: error for name, error in others.items() if _is_lost(error)}
        lost = {name for name, error in errors.items() if _is_lost(error)} | calls.pending.keys()
        engines = {
            name: f"{method}: {describe(errors[name])}"
            if name in errors
            else f"it must finish {method} within weights.{setting}={timeout_s:g} s, it did not"
            for name in sorted(lost or errors or late)
        }
        raise HandoverError("; ".join(f"{name}: {reason}" for name, reason in engines.items()), engines=engines)


def _is_lost(error: Exception) -> bool:
    return isinstance(error, EngineError) or has_died(error)
