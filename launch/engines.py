"""The live rollout actors as the hand-over sees them."""

import time
from collections.abc import Callable
from typing import Any

import ray

from areal_lite.errors import HandoverError
from areal_lite.launch.remote import describe, result

__all__ = ["RayEngines"]


class RayEngines:
    """Rollout actors by name; one that fails a call, or takes too long over it, is given up.

    Implements `areal_lite.weights.handover.EngineGroup`.
    """

    def __init__(self, handles: dict[str, Any], *, timeout_s: float, on_drop: Callable[[str, str], None]) -> None:
        self.handles = handles
        self._timeout_s, self._on_drop = timeout_s, on_drop

    def each(self, method: str, *args: Any) -> None:
        """Call all actors at once and wait; those that fail are dropped.

        Raises:
            HandoverError: None is left.
        """
        references = {name: getattr(handle, method).remote(*args) for name, handle in self.handles.items()}
        deadline = time.monotonic() + self._timeout_s
        for name, reference in references.items():
            try:
                result(reference, timeout_s=max(0.0, deadline - time.monotonic()))
            except Exception as error:
                self.drop(name, f"{method}: {describe(error)}")

    def drop(self, name: str, reason: str) -> None:
        """Kill an actor and report it lost.

        Raises:
            HandoverError: It was the last one.
        """
        if (handle := self.handles.pop(name, None)) is None:
            return
        ray.kill(handle)
        self._on_drop(name, reason)
        if not self.handles:
            raise HandoverError(f"no rollout worker is left; the last one, {name}, was lost in {reason}")
