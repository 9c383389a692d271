"""Defects found in other projects' trainers, one test each, on the real path from a taken shard to the trained weights.

Each was seen failing on a copy with that defect built in, named in its docstring.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from preset_builders import make_trainer
from train_builders import make_config, make_rows, make_shard

from areal_lite.config.recipe import Config
from areal_lite.train.advantages import batch_advantages
from areal_lite.train.batch import PolicyBatch
from areal_lite.train.objective import weigh_tokens
from areal_lite.types import Row, Sample, Shard

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


def with_logprobs(rows: Sequence[Row], change: Callable[[int, Sample], np.ndarray]) -> list[Row]:
    """Replace each row's behaviour logprobs."""
    return [
        dataclasses.replace(
            row, sample=dataclasses.replace(row.sample, logprobs=change(index, row.sample).astype(np.float32))
        )
        for index, row in enumerate(rows)
    ]


def own_logprobs(model_folder: str, rows: Sequence[Row]) -> list[np.ndarray]:
    """Return what the model itself says of each row's tokens."""
    trainer = make_trainer(model_folder, recipe())
    return trainer.score([(row.prompt_token_ids, row.sample.token_ids.tolist()) for row in rows])


def is_stale(sample: Sample) -> np.ndarray:
    """Tell which tokens are over the bound of 2, counted from the spans one by one."""
    return np.array([VERSION - s.version > 2 for s in sample.spans for _ in range(s.start, s.end)])


# Versions not shifted together with the logprobs: off by one token.


def test_the_trainer_scores_the_tokens_that_the_engine_scored(model_folder: str) -> None:
    """Fresh tokens carry the model's own logprobs, stale ones are 3 nats off: no difference may reach the statistics.

    Seen failing with ages rolled by one token either way, with behaviour logprobs rolled, and with logits one place
    late.
    """
    rows = make_rows(minibatches=1, old_tokens=2)
    own = own_logprobs(model_folder, rows)
    rows = with_logprobs(rows, lambda index, s: own[index] - np.where(is_stale(s), 3.0, 0.0))
    stats, _ = step(model_folder, make_shard(rows), recipe())
    assert stats["tokens_masked_stale"] == 12
    assert stats["behav_prox_max_abs_diff_age0"] < 1e-5
    assert stats["kl_behav_prox"] == pytest.approx(0.0, abs=1e-5)
    assert stats["behav_weight_mean"] == pytest.approx(1.0, abs=1e-5)


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
    ],
    ids=lambda objective: "-".join(map(str, objective.values())) or "areal",
)
def test_nan_in_a_masked_slot_is_harmless(model_folder: str, objective: dict[str, Any]) -> None:
    """Stale tokens and a failed sample with NaN for logprobs train the very weights that any other number would.

    Seen failing with the mask multiplied instead of chosen in `inside`, and with m2po's mean over all slots.
    """
    rewards = np.array([[1, 0, NAN, 1], [0, 0, 0, 1], [1, 1, 0, 1]])
    rows = make_rows(minibatches=1, old_tokens=2)
    own = own_logprobs(model_folder, rows)

    def filled(number: float) -> Shard:
        def logprobs(index: int, sample: Sample) -> np.ndarray:
            failed = np.isnan(rewards[rows[index].group_index, rows[index].sample_index])
            return np.where(is_stale(sample) | failed, number, own[index])

        return make_shard(with_logprobs(rows, logprobs), rewards=rewards)

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


# Partial groups corrupting the normalisation.


def test_a_partial_group_is_normalised_over_the_samples_it_has() -> None:
    """A failed sample leaves mean, std and denominator; a group with one scored sample teaches nothing.

    By hand: [1 0 NaN NaN] has mean 1/2 and std sqrt(1/2), so +-sqrt(1/2); [NaN 3 NaN NaN] gives 0; [0 0 0 4] has mean 1
    and std 2, so -1/2 three times and 3/2. Seen failing with NaN read as reward 0, and with the std over G places.
    """
    rewards = np.array([[1, 0, NAN, NAN], [NAN, 3, NAN, NAN], [0, 0, 0, 4]])
    rows = make_rows(minibatches=1)
    batch = PolicyBatch.from_shard(make_shard(rows, rewards=rewards), config=recipe(), device=torch.device("cpu"))
    batch_advantages(batch, config=recipe(), kl_coef=0.0)
    weigh_tokens(batch, recipe())
    high = 0.5**0.5
    expected = [high, -high, 0, 0, 0, 0, 0, 0, -0.5, -0.5, -0.5, 1.5]
    lengths = [row.sample.num_tokens for row in rows]
    np.testing.assert_allclose(batch.tokens.advantages_T, np.repeat(expected, lengths), atol=1e-5)
    scored = ~np.isnan(rewards.ravel())
    assert torch.equal(batch.tokens.loss_mask_T, torch.tensor(np.repeat(scored, lengths)))
    # Token mean: the failed samples' tokens are in no denominator.
    num_scored = int(np.array(lengths)[scored].sum())
    np.testing.assert_allclose(batch.tokens.weights_T[batch.tokens.loss_mask_T], 1 / num_scored, rtol=1e-6)
    assert not batch.tokens.weights_T[~batch.tokens.loss_mask_T].any()
