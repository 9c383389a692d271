"""vLLM's weight-sync client over the rollout actors: what a trainer rank drives the engines with."""

from collections.abc import Mapping
from typing import Any

from areal_lite.actors.calls import Calls, call_all
from areal_lite.errors import HandoverError

__all__ = ["EngineClient"]


class EngineClient:
    """Speaks to one or several rollout actors at once, with a deadline, failing by name.

    Implements vLLM's `VLLMWeightSyncClient` protocol.
    """

    def __init__(self, handles: Mapping[str, Any], *, timeout_s: float, ranks_per_engine: int) -> None:
        self._handles, self._timeout_s, self._ranks_per_engine = handles, timeout_s, ranks_per_engine

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Have every engine join; in one common group each gets ranks of its own."""
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
        """Load them; the version is stamped by the hand-over, after all engines have loaded."""
        self._call("finish_weight_update")

    def _call(self, method: str, *args: Any) -> None:
        self._finish(call_all(self._handles, method, *args), method)

    def _finish(self, calls: Calls, method: str) -> None:
        for name, error in calls.answers(self._timeout_s):
            if error is not None:
                raise HandoverError(f"{name} failed in {method}: {type(error).__name__}: {error}") from error
        if late := ", ".join(calls.pending):
            raise HandoverError(
                f"{late} must finish {method} within weights.timeout_s={self._timeout_s:g} s, it did not"
            )
