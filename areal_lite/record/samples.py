"""Sampled groups in readable form: the rows of `samples.jsonl`."""

from typing import Any

from areal_lite.types import Group, Sample

__all__ = ["readable_group"]


def readable_group(step: int, group: Group) -> dict[str, Any]:
    """Return a group as a row of `samples.jsonl`, of the step that trained it."""
    samples = [
        {
            "text": sample.text,
            "reward": None if sample.score is None else sample.score.reward,
            "failure": None if sample.score is None else sample.score.failure,
            **_further(sample),
            "stop_reason": sample.stop_reason.value,
            "tokens": sample.num_tokens,
            "spans": [[span.version, span.start, span.end] for span in sample.spans],
        }
        for sample in group.samples
    ]
    prompt = group.prompt
    return {"step": step, "group": group.group_id, "prompt": prompt.text, "answer": prompt.answer, "samples": samples}


def _further(sample: Sample) -> dict[str, Any]:
    """Return what only some samples have: turns, and a verifier's further words."""
    fields: dict[str, Any] = {"messages": list(sample.messages)}
    if (score := sample.score) is not None:
        fields["step_rewards"] = [[step.token, step.value] for step in score.step_rewards]
        fields |= {"parts": dict(score.parts), "metrics": dict(score.metrics), "feedback": score.feedback}
    return {name: value for name, value in fields.items() if value}
