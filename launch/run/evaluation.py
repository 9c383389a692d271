"""One evaluation: greedy completions of held-out prompts, beside generation, scored by the run's verifier."""

from collections.abc import Mapping
from typing import Any

import ray

from areal_lite.errors import EngineError
from areal_lite.launch.run.cluster import Cluster
from areal_lite.launch.run.remote import result
from areal_lite.types import GIVEN, Prompt, Sample

__all__ = ["Evaluation", "in_words"]


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
        self._num_failed = 0

    def late(self) -> list[str]:
        """Names of the workers that it waits for."""
        return self._workers

    def poll(self, wait_s: float) -> dict[str, Any] | None:
        """Look for results, at most `wait_s` seconds.

        Returns:
            None while it goes on; then `step`, `accuracy` (mean reward of the scored), the same `by_source`,
            `problems`, `failures` and `versions` that produced the completions.
        """
        ready, _ = ray.wait(self._pending, num_returns=len(self._pending), timeout=wait_s)
        if len(ready) < len(self._pending):
            return None
        if self._samples is None:
            samples = [sample for part in map(result, self._pending) for sample in part]
            prompts = [prompt for part in self._parts for prompt in part]
            done = [(prompt, sample) for prompt, sample in zip(prompts, samples, strict=True) if sample is not None]
            self._prompts, self._samples = [prompt for prompt, _ in done], [sample for _, sample in done]
            self._num_failed = len(samples) - len(done)  # their episodes; the workers' logs say why
            name, verifier = next(iter(self._cluster.verifiers.items()))
            self._workers = [name]
            texts, messages = [sample.text for sample in self._samples], [sample.messages for sample in self._samples]
            self._pending = [verifier.score.remote(self._prompts, texts, messages)]
            return None
        scores = result(self._pending[0])
        by_source: dict[str, list[float]] = {}
        for prompt, score in zip(self._prompts, scores, strict=True):
            if score.reward is not None:
                by_source.setdefault(prompt.prompt_id.partition("/")[0], []).append(score.reward)
        rewards = [reward for part in by_source.values() for reward in part]
        return {
            "step": self.step,
            "accuracy": sum(rewards) / len(rewards) if rewards else 0.0,
            "by_source": {source: sum(part) / len(part) for source, part in sorted(by_source.items())},
            "problems": len(rewards),
            "failures": self._num_failed + len(scores) - len(rewards),
            "versions": sorted({s.version for sample in self._samples for s in sample.spans if s.version != GIVEN}),
        }


def in_words(result: Mapping[str, Any]) -> str:
    """Say what an evaluation found, by source where there are several."""
    step, failures = result["step"], result["failures"]
    if not result["problems"]:
        return f"held-out accuracy at step {step}: none, as not one of {failures} completions could be scored"
    by_source = [f"{name} {value:.3f}" for name, value in result["by_source"].items()]
    return (
        f"held-out accuracy at step {step}: {result['accuracy']:.3f} "
        + (f"[{', '.join(by_source)}] " if len(by_source) > 1 else "")
        + f"({result['problems']} problems, versions {result['versions']}"
        + (f", {failures} could not be scored)" if failures else ")")
    )
