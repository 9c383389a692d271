"""Whether a run has anything to learn from: groups whose rewards differ, and the word on a run that has none."""

import math
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

_STEPS = 10
"""Steps that a warning looks back on."""


def warning(rows: Sequence[Mapping[str, Any]]) -> str:
    """Say that no group of the last ten steps had rewards that differ, and what may help; empty where one had."""
    last, page = rows[-_STEPS:], "docs/first.md#when-nothing-is-learned"
    if len(last) < _STEPS or any(row.get("varied_groups_fraction", 1) for row in last):
        return ""
    rewards, lowest = [row["reward_mean"] for row in last], min(row["reward_mean"] for row in rows)
    seen = f"nothing to learn from in the last {_STEPS} steps, as in no group did the rewards differ: "
    if not math.isclose(min(rewards), max(rewards), rel_tol=1e-5, abs_tol=1e-9):
        return (
            f"{seen}the samples of a prompt all earned the same, {fmean(rewards):.3g} in the mean: raise "
            f"rollout.temperature, or go back to where they still differed, with a lower trainer.lr ({page})"
        )
    if rewards[-1] >= 1 or (rewards[-1] > lowest and not math.isclose(rewards[-1], lowest, rel_tol=1e-5)):
        return (
            f"{seen}every sample earned {rewards[-1]:.3g}; where that is the most that the verifier gives, the task is "
            f"solved, and harder prompts are needed (else {page})"
        )
    return (
        f"{seen}no sample earned more than {rewards[-1]:.3g}; show the model right answers first (areal-lite sft), or "
        f"give it easier prompts, more samples of each (queue.samples_per_group), or a reward for part of the way "
        f"({page})"
    )
