"""Presets with a reference as training runs them, from a shard to the gradient, on an enumerable language.

The trainer's plan and loss must put the functions of `algo/` together as the preset's row says: recipe, batch, filters,
advantages, denominators, micro-batches. Only the model is replaced, by the table of logits. Single knobs and old
samples are in `test_enumerable_knobs.py`, the published formula of every preset is in `test_presets.py`.
"""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from enumerable_language import Batch, Language, draw, expected_step, gradient_of
from torch import Tensor
from train_builders import make_config
from update_builders import table_shard, update_loss

from areal_lite.config.recipe import Config
from areal_lite.train.chunked_logits import Reading
from areal_lite.train.micro_batch import MicroBatch

LANGUAGE = Language(num_symbols=3, max_length=2)
LOGITS_XV = LANGUAGE.random_table(1)
REFERENCE_XV = (LOGITS_XV + LANGUAGE.random_table(7, scale=0.7)).log_softmax(dim=1)
REWARDS_S = LANGUAGE.random_rewards(0)


def recipe(*, groups: int = 1, samples: int = 2, **objective: Any) -> Config:
    return make_config(
        groups=groups,
        samples=samples,
        objective=objective,
        rollout={"temperature": 1.0, "max_new_tokens": 2},
        trainer={"minibatches": 1, "micro_batch_tokens": 4},
    )


def trainer_step(
    config: Config,
    monkeypatch: pytest.MonkeyPatch,
    *,
    language: Language = LANGUAGE,
    rewards_NS: Sequence[Tensor] | None = None,
    reference_XV: Tensor | None = None,
    values_X: Tensor | None = None,
    behaviour_logits_XV: Tensor | None = None,
) -> Tensor:
    """Return the expected step of `UpdateLoss` under a recipe, over all batches that it may have."""
    rewards_NS = [language.random_rewards(0)] if rewards_NS is None else rewards_NS
    logits_XV = language.random_table(1)
    proximal_XV = logits_XV.log_softmax(dim=1)
    behaviour_XV = proximal_XV if behaviour_logits_XV is None else behaviour_logits_XV.log_softmax(dim=1)
    if config.objective.proximal == "behaviour":
        proximal_XV = behaviour_XV
    num_rows = config.queue.groups_per_step * config.queue.samples_per_group

    def loss(batch: Batch, logprobs_XV: Tensor) -> Tensor:
        def outputs(micro_batch: MicroBatch, read: Reading, token_ids_T: Tensor) -> Tensor:
            return read(logprobs_XV[batch.prefixes_T[micro_batch.tokens_T]], token_ids_T)

        token_ids = list(batch.symbols_T.split(batch.lengths_B.tolist()))
        shard = table_shard(
            draw(rewards_NS, batch),
            token_ids,
            behaviour_T=batch.at_tokens(behaviour_XV),
            truncated_B=torch.stack([ids[-1] != 0 for ids in token_ids]),
        )
        return update_loss(
            shard,
            outputs,
            config=config,
            monkeypatch=monkeypatch,
            proximal_T=batch.at_tokens(proximal_XV),
            reference_T=None if reference_XV is None else batch.at_tokens(reference_XV),
            values_T=None if values_X is None else values_X[batch.prefixes_T],
        )

    return expected_step(
        language, loss, logits_XV=logits_XV, num_rows=num_rows, behaviour_logits_XV=behaviour_logits_XV
    )


def regularised_gradient(coef: float) -> Tensor:
    """Return the exact gradient of E[return] - coef KL(pi || reference)."""
    reference_S = LANGUAGE.sequence_logprobs(REFERENCE_XV)

    def objective(logprobs_XV: Tensor) -> Tensor:
        logprobs_S = LANGUAGE.sequence_logprobs(logprobs_XV)
        return (logprobs_S.exp() * (REWARDS_S - coef * (logprobs_S - reference_S))).sum()

    return gradient_of(objective, LOGITS_XV)


def assert_equal(step_XV: Tensor, exact_XV: Tensor) -> None:
    assert float(exact_XV.norm()) > 0.01, "the test would say nothing"
    # The trainer's logprobs, weights and gradients by logprobs are float32.
    torch.testing.assert_close(step_XV, exact_XV, rtol=1e-5, atol=1e-6)


def test_rloo_climbs_the_regularised_return_exactly(monkeypatch: pytest.MonkeyPatch) -> None:
    """The preset as it is, KL of 0.05 in the reward: unbiased. On old samples too, with the weight of the sequence.

    Seen failing with the KL added to the reward, with the return of the second token for the sample's, with the
    baseline of the group mean, and with a behaviour weight per token (off-policy).
    """
    exact_XV = regularised_gradient(0.05)
    assert_equal(trainer_step(recipe(preset="rloo"), monkeypatch, reference_XV=REFERENCE_XV), exact_XV)
    config = recipe(preset="rloo", behaviour_weight="sequence", behaviour_weight_cap=1e6)
    behaviour_logits_XV = LOGITS_XV + LANGUAGE.random_table(8, scale=0.7)
    step_XV = trainer_step(config, monkeypatch, reference_XV=REFERENCE_XV, behaviour_logits_XV=behaviour_logits_XV)
    assert_equal(step_XV, exact_XV)


def test_group_mean_with_kl_in_the_reward_halves_the_regularised_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """The baseline holds the whole return of the sample itself, KL included: factor 1 - 1/2 on every token."""
    config = recipe(preset="rloo", baseline="group_mean")
    assert_equal(trainer_step(config, monkeypatch, reference_XV=REFERENCE_XV), regularised_gradient(0.05) / 2)


def test_distilling_climbs_minus_the_divergence_from_the_teacher(monkeypatch: pytest.MonkeyPatch) -> None:
    """On-policy, tokens added up: -KL(pi || teacher) at each prefix, weighted with how often pi visits it.

    Seen failing with k3 in the preset, which climbs the other divergence.
    """
    config = recipe(preset="distill", reference_path="teacher", aggregation="sequence_sum")
    visits_X = LANGUAGE.visits(LOGITS_XV.log_softmax(dim=1))
    exact_XV = gradient_of(lambda pi: -(visits_X * (pi.exp() * (pi - REFERENCE_XV)).sum(dim=1)).sum(), LOGITS_XV)
    assert_equal(trainer_step(config, monkeypatch, reference_XV=REFERENCE_XV), exact_XV)
