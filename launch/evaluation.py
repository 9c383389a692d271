"""One evaluation: greedy completions of held-out prompts, beside generation, scored by the run's verifier."""

from typing import Any

import ray

from areal_lite.errors import EngineError
from areal_lite.launch.cluster import Cluster
from areal_lite.launch.remote import result
from areal_lite.types import Prompt, Sample

__all__ = ["Evaluation"]


class Evaluation:
    """Split over the live engines when it begins; `poll` carries it on until there is a result."""

    def __init__(self, cluster: Cluster, prompts: list[Prompt], *, step: int) -> None:
        self.step = step
        self._cluster, self._prompts = cluster, prompts
        engines = list(cluster.engines.handles.values())
        if not engines:
            raise EngineError("an evaluation needs a live rollout worker, got none")
        self._parts = [prompts[i :: len(engines)] for i in range(len(engines))]
        self._pending = [engine.evaluate.remote(part) for engine, part in zip(engines, self._parts, strict=True)]
        self._workers = list(cluster.engines.handles)
        self._samples: list[Sample] | None = None

    def late(self) -> list[str]:
        """Names of the workers that it waits for."""
        return self._workers

    def poll(self, wait_s: float) -> dict[str, Any] | None:
        """Look for results, at most `wait_s` seconds.

        Returns:
            None while it goes on; then `step`, `accuracy` (mean reward of the scored), `problems`, `failures`
            and `versions` that produced the completions.
        """
        ready, _ = ray.wait(self._pending, num_returns=len(self._pending), timeout=wait_s)
        if len(ready) < len(self._pending):
            return None
        if self._samples is None:
            self._samples = [sample for part in map(result, self._pending) for sample in part]
            prompts = [prompt for part in self._parts for prompt in part]
            name, verifier = next(iter(self._cluster.verifiers.items()))
            self._workers = [name]
            self._pending = [verifier.score.remote(prompts, [sample.text for sample in self._samples])]
            return None
        scores = result(self._pending[0])
        rewards = [score.reward for score in scores if score.reward is not None]
        return {
            "step": self.step,
            "accuracy": sum(rewards) / len(rewards) if rewards else 0.0,
            "problems": len(rewards),
            "failures": len(scores) - len(rewards),
            "versions": sorted({span.version for sample in self._samples for span in sample.spans}),
        }
