"""Defects found in other projects' trainers, one test each, on the real path from a taken shard to the trained weights.

Each was seen failing on a copy with that defect built in, named in its docstring.
"""

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from preset_builders import make_trainer
from train_builders import make_config, make_rows, make_shard

from areal_lite.config.recipe import Config
from areal_lite.types import Sample, Shard

NAN = float("nan")
VERSION = 5


def recipe(**sections: Any) -> Config:
    """Build a recipe with one update per step at temperature 1."""
    sections["trainer"] = {"minibatches": 1} | sections.get("trainer", {})
    sections["rollout"] = {"temperature": 1.0} | sections.get("rollout", {})
    return make_config(**sections)


def step(model_folder: str, shard: Shard, config: Config) -> tuple[dict[str, Any], torch.Tensor]:
    """Train one step; return its statistics and all weights."""
    trainer = make_trainer(model_folder, config)
    stats = trainer.train_step(shard)
    return stats, torch.cat([parameter.detach().flatten() for parameter in trainer.model.parameters()])


def is_stale(sample: Sample) -> np.ndarray:
    """Tell which tokens are over the bound of 2, counted from the spans one by one."""
    return np.array([VERSION - s.version > 2 for s in sample.spans for _ in range(s.start, s.end)])


# NaN in a masked slot poisoned a mean.


@pytest.mark.parametrize(
    "objective",
    [
        {},
        {"preset": "grpo"},
        {"preset": "gspo"},
        {"preset": "cispo"},
        {"preset": "rloo", "behaviour_weight": "sequence"},
        {"preset": "ppo"},
        {"preset": "raft"},
        {"proximal": "behaviour", "entropy_coef": 0.01},
        {"proximal": "behaviour", "kl": "reward", "kl_coef": 0.1},
        {"behaviour_filter": "m2po"},
        {"behaviour_filter": "geometric"},
        {"behaviour_filter": "binary_kl", "binary_kl_limit": 1e3},
    ],
    ids=lambda objective: "-".join(map(str, objective.values())) or "areal",
)
def test_nan_in_a_masked_slot_is_harmless(model_folder: str, objective: dict[str, Any]) -> None:
    """Stale tokens and a failed sample with NaN for logprobs train the very weights that any other number would.

    Seen failing with the mask multiplied instead of chosen in `inside`, and with m2po's mean over all slots.
    """
    rewards = np.array([[1, 0, NAN, 1], [0, 0, 0, 1], [1, 1, 0, 1]])
    rows = make_rows(minibatches=1, old_tokens=2)
    trainer = make_trainer(model_folder, recipe())
    own = trainer.score([(row.prompt_token_ids, row.sample.token_ids.tolist()) for row in rows])

    def filled(number: float) -> Shard:
        """Put a number where nothing is trained, and what the model itself says where something is."""
        changed = []
        for row, scores in zip(rows, own, strict=True):
            failed = np.isnan(rewards[row.group_index, row.sample_index])
            logprobs = np.where(is_stale(row.sample) | failed, number, scores).astype(np.float32)
            changed.append(dataclasses.replace(row, sample=dataclasses.replace(row.sample, logprobs=logprobs)))
        return make_shard(changed, rewards=rewards)

    expected, expected_weights = step(model_folder, filled(-1.0), recipe(objective=objective))
    got, weights = step(model_folder, filled(NAN), recipe(objective=objective))
    assert got["step_skipped"] == expected["step_skipped"] == 0
    if objective.get("kl") == "reward" and objective.get("proximal") == "behaviour":
        # Here a stale token's logprob is a cost of its sample: a number counts, a NaN is left out.
        assert np.isfinite(got["loss"])
        assert bool(weights.isfinite().all())
        return
    assert torch.equal(weights, expected_weights)
    assert got["loss"] == expected["loss"]
    assert got["behav_weight_mean"] == expected["behav_weight_mean"]


# Overlong penalty without a bound, written into the reward that is logged.


def test_the_overlong_penalty_is_bounded_and_not_logged_as_reward(model_folder: str) -> None:
    """Limit 8, buffer 4: 4 tokens cost nothing, 6 cost 1/2, 8 and all beyond cost 1; the log shows the verifier's word.

    Seen failing with the penalty added to the batch's rewards in place, and without its lower bound.
    """
    rows = make_rows(minibatches=1)
    shard = make_shard(rows)
    before = shard.rewards.copy()
    config = recipe(objective={"overlong_buffer": 0.5}, rollout={"max_new_tokens": 8})
    stats, _ = step(model_folder, shard, config)
    lengths = np.array([row.sample.num_tokens for row in rows])
    penalties = np.array([0.0 if n <= 4 else -1.0 if n >= 8 else (4 - n) / 4 for n in lengths])
    assert lengths.max() == 12, "a sample beyond the limit, where the penalty must not grow"
    np.testing.assert_array_equal(shard.rewards, before)
    assert stats["reward_mean"] == pytest.approx(before.mean())
    assert stats["reward_shaped_mean"] == pytest.approx(before.mean() + penalties.mean())
