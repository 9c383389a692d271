"""One evaluation: greedy completions of held-out prompts, beside generation, scored by the run's verifier."""

from collections.abc import Mapping
from typing import Any

from areal_lite.actors.calls import Calls
from areal_lite.launch.run.cluster import Cluster
from areal_lite.types import GIVEN, Prompt, Sample, Score

__all__ = ["Evaluation", "in_words"]


class Evaluation:
    """Split over the live engines when it begins; `poll` carries it on until there is a result."""

    def __init__(self, cluster: Cluster, prompts: list[Prompt], *, step: int) -> None:
        """Begin; there is a live engine."""
        self.step = step
        self._cluster = cluster
        engines = cluster.engines.handles
        self._parts = {name: prompts[index :: len(engines)] for index, name in enumerate(engines)}
        self._generating = Calls({name: handle.evaluate.remote(self._parts[name]) for name, handle in engines.items()})
        self._scoring: Calls | None = None
        self._done: list[tuple[Prompt, Sample]] = []

    def late(self) -> list[str]:
        """Names of the workers that it waits for."""
        return list((self._scoring or self._generating).pending)

    def poll(self, wait_s: float) -> dict[str, Any] | None:
        """Look for results, at most `wait_s` seconds.

        Returns:
            None while it goes on; then `step`, `accuracy` (mean reward of the scored), the same `by_source`,
            `problems`, `failures` and `versions` that produced the completions.

        Raises:
            ArealLiteError, RayError: A worker failed in it, or died.
        """
        calls = self._scoring or self._generating
        for _, error in calls.answers(wait_s):
            if error is not None:
                raise error
        if calls.pending:
            return None
        if self._scoring is None:
            self._scoring = self._score(calls.values)
            return None
        (scores,) = calls.values.values()
        return self._result(scores)

    def _score(self, samples_of: Mapping[str, list[Sample | None]]) -> Calls:
        """Have one verifier worker score the completions; a failed episode has none (the workers' logs say why)."""
        pairs = [pair for name, part in self._parts.items() for pair in zip(part, samples_of[name], strict=True)]
        self._done = [(prompt, sample) for prompt, sample in pairs if sample is not None]
        self._num_failed = len(pairs) - len(self._done)
        name, verifier = next(iter(self._cluster.verifiers.items()))
        prompts, samples = [prompt for prompt, _ in self._done], [sample for _, sample in self._done]
        texts, messages = [sample.text for sample in samples], [sample.messages for sample in samples]
        return Calls({name: verifier.score.remote(prompts, texts, messages)})

    def _result(self, scores: list[Score]) -> dict[str, Any]:
        by_source: dict[str, list[float]] = {}
        for (prompt, _), score in zip(self._done, scores, strict=True):
            if score.reward is not None:
                by_source.setdefault(prompt.prompt_id.partition("/")[0], []).append(score.reward)
        rewards = [reward for part in by_source.values() for reward in part]
        return {
            "step": self.step,
            "accuracy": sum(rewards) / len(rewards) if rewards else 0.0,
            "by_source": {source: sum(part) / len(part) for source, part in sorted(by_source.items())},
            "problems": len(rewards),
            "failures": self._num_failed + len(scores) - len(rewards),
            "versions": sorted({s.version for _, sample in self._done for s in sample.spans if s.version != GIVEN}),
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
