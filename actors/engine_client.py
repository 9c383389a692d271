"""vLLM's weight-sync client over the rollout actors: what a trainer rank drives the engines with."""

import time
from collections.abc import Callable, Mapping
from typing import Any

from areal_lite.actors.calls import Calls, call_all, describe, has_died
from areal_lite.errors import EngineError, HandoverError

_RELEASED_S = 15.0
"""How long released engines may take to answer."""


class EngineClient:
    """Calls one or several rollout actors at once, with a deadline; a `HandoverError` names the engines to blame.

    Implements vLLM's `VLLMWeightSyncClient` protocol. In one group the engines wait for each other in a collective:
    when one fails, the others are released and their answers awaited, so that only those are blamed that died, or stay
    silent.
    """

    def __init__(self, handles: Mapping[str, Any], *, timeout_s: float, ranks_per_engine: int) -> None:
        self._handles, self._timeout_s, self._ranks_per_engine = handles, timeout_s, ranks_per_engine
        self.let_go: Callable[[], None] = lambda: None
        """Releases all that wait for a failed engine, the trainer included; set by the sender of a group."""

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Have every engine join; in a common group each gets ranks of its own."""
        references = {}
        for index, (name, handle) in enumerate(self._handles.items()):
            info = dict(init_info)
            if "rank_offset" in info:
                info["rank_offset"] += index * self._ranks_per_engine
            references[name] = handle.init_weight_transfer_engine.remote(info)
        self._finish(Calls(references), "init_weight_transfer_engine")

    def start_weight_update(self) -> None:
        """Open the update."""
        self._call("start_weight_update")

    def update_weights(self, update_info: Any) -> None:
        """Receive every parameter."""
        self._call("update_weights", update_info)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Load them; the hand-over stamps the version after all engines have loaded."""
        self._call("finish_weight_update")

    def _call(self, method: str, *args: Any) -> None:
        self._finish(call_all(self._handles, method, *args), method)

    def _finish(self, calls: Calls, method: str) -> None:
        deadline = time.monotonic() + self._timeout_s
        errors: dict[str, Exception] = {}
        for name, error in calls.answers(self._timeout_s):
            if error is not None:
                errors[name] = error
                break
        late = set(calls.pending) if not errors else set()
        if not errors and not late:
            return
        self.let_go()
        if len(self._handles) > 1:
            # Engines that join cannot be released: they give up at their own deadline.
            left_s = max(0.0, deadline - time.monotonic()) if method.startswith("init") else 0.0
            for name, error in calls.failures(left_s + _RELEASED_S).items():
                if _is_lost(error):
                    errors[name] = error
            if method == "update_weights":  # an update that arrived must be closed before the next one
                received = {name: self._handles[name] for name in calls.values}
                call_all(received, "finish_weight_update").failures(self._timeout_s)
        lost = {name for name, error in errors.items() if _is_lost(error)} | calls.pending.keys()
        reasons = {}
        for name in sorted(lost or errors or late):
            if name in errors:
                reasons[name] = f"{method}: {describe(errors[name])}"
            else:
                reasons[name] = f"it must finish {method} within weights.timeout_s={self._timeout_s:g} s, it did not"
        raise HandoverError("; ".join(f"{name}: {reason}" for name, reason in reasons.items()), engines=reasons)


def _is_lost(error: Exception) -> bool:
    return isinstance(error, EngineError) or has_died(error)
