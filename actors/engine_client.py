"""vLLM's weight-sync client over the rollout actors: what a trainer rank drives the engines with."""

from collections.abc import Mapping
from typing import Any

import ray

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
        infos = [dict(init_info) for _ in self._handles]
        for index, info in enumerate(infos):
            if "rank_offset" in info:
                info["rank_offset"] += index * self._ranks_per_engine
        self._call("init_weight_transfer_engine", [(info,) for info in infos])

    def start_weight_update(self) -> None:
        """Open the update."""
        self._call("start_weight_update", [()] * len(self._handles))

    def update_weights(self, update_info: Any) -> None:
        """Receive every parameter."""
        self._call("update_weights", [(update_info,)] * len(self._handles))

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Load them; the version is stamped by the hand-over, after all engines have loaded."""
        self._call("finish_weight_update", [()] * len(self._handles))

    def _call(self, method: str, arguments: list[tuple[Any, ...]]) -> None:
        references = {
            name: getattr(handle, method).remote(*argument)
            for (name, handle), argument in zip(self._handles.items(), arguments, strict=True)
        }
        for name, reference in references.items():
            try:
                ray.get(reference, timeout=self._timeout_s)
            except ray.exceptions.GetTimeoutError:
                raise HandoverError(
                    f"{name} must finish {method} within weights.timeout_s={self._timeout_s:g} s, it did not"
                ) from None
            except Exception as error:
                raise HandoverError(f"{name} failed in {method}: {type(error).__name__}: {error}") from error
