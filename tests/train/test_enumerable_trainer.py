"""What training estimates, from a shard to the gradient, against its closed form on an enumerable language.

The trainer's plan and loss must put the functions of `algo/` together as the recipe says: batch, filters, advantages,
denominators, micro-batches. Only the model is replaced, by the table of logits. The published formula of every preset
is in `test_presets.py`; here single knobs, old samples, KL terms and entropy are asked what they are *equal to* in
expectation: the exact gradient where it is unbiased, its own closed form where it is not. Nothing is sampled, so the
tolerance is rounding: the trainer's logprobs and weights are float32.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from enumerable_language import Batch, Language, draw, expected_step, gradient_of, relative_distance
from torch import Tensor
from train_builders import make_config
from update_builders import table_shard, update_loss

from areal_lite.config.presets import read_preset
from areal_lite.train.chunked_logits import Reading
from areal_lite.train.micro_batch import MicroBatch

LANGUAGE = Language(num_symbols=3, max_length=3)
SHORT = Language(num_symbols=3, max_length=2)
TINY = Language(num_symbols=2, max_length=2)
LOGITS_XV = LANGUAGE.random_table(1)
OTHER_XV = LOGITS_XV + LANGUAGE.random_table(7, scale=0.7)
"""Logits of another policy, not far away."""
POLICY_XV, REFERENCE_XV = LOGITS_XV.log_softmax(dim=1), OTHER_XV.log_softmax(dim=1)
REWARDS_S = LANGUAGE.random_rewards(0)
UNCAPPED = 1e6
SIMPLEST: dict[str, Any] = {
    "baseline": "none", "scale": "none", "aggregation": "sequence_sum", "clip_low": None, "clip_high": None,
}  # fmt: skip
"""Sequence REINFORCE without baseline or clip."""


def trainer_step(
    monkeypatch: pytest.MonkeyPatch,
    knobs: dict[str, Any],
    *,
    groups: int = 1,
    samples: int = 1,
    language: Language = LANGUAGE,
    rewards_NS: Sequence[Tensor] | None = None,
    reference_XV: Tensor | None = None,
    values_X: Tensor | None = None,
    behaviour_logits_XV: Tensor | None = None,
) -> Tensor:
    """Return the expected step of `UpdateLoss` over all batches that there may be.

    Args:
        knobs: Of the objective; without a preset what they change of the simplest one, whose weights have no cap.
    """
    if "preset" not in knobs:
        has_weights = knobs.get("behaviour_weight") != "none" and knobs.get("proximal") != "behaviour"
        knobs = SIMPLEST | ({"behaviour_weight_cap": UNCAPPED} if has_weights else {}) | knobs
    config = make_config(
        groups=groups,
        samples=samples,
        objective=knobs,
        rollout={"temperature": 1.0, "max_new_tokens": 2},
        trainer={"minibatches": 1, "micro_batch_tokens": 4},
    )
    rewards_NS = [language.random_rewards(0)] if rewards_NS is None else rewards_NS
    logits_XV = language.random_table(1)
    proximal_XV = logits_XV.log_softmax(dim=1)
    behaviour_XV = proximal_XV if behaviour_logits_XV is None else behaviour_logits_XV.log_softmax(dim=1)
    if config.objective.proximal == "behaviour":
        proximal_XV = behaviour_XV

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
        language, loss, logits_XV=logits_XV, num_rows=groups * samples, behaviour_logits_XV=behaviour_logits_XV
    )


@pytest.fixture
def step(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Tensor]:
    return partial(trainer_step, monkeypatch)


def assert_equal(step_XV: Tensor, exact_XV: Tensor) -> None:
    assert float(exact_XV.norm()) > 0.01, "the test would say nothing"
    # The trainer's logprobs, weights and gradients by logprobs are float32.
    torch.testing.assert_close(step_XV, exact_XV, rtol=1e-5, atol=1e-6)


def gradient(rewards_S: Tensor, language: Language = LANGUAGE) -> Tensor:
    """Return the exact gradient of `sum over sequences of pi * reward`."""
    return gradient_of(lambda pi: (language.sequence_logprobs(pi).exp() * rewards_S).sum(), language.random_table(1))


# --- the policy's own samples ---


def test_a_critic_is_unbiased_if_it_is_right_or_lambda_is_1(step: Callable[..., Tensor]) -> None:
    """Lambda 1 is the Monte-Carlo return minus a baseline; at 0.5 a wrong critic moves the step by 0.6 of its length.

    Seen failing with the reward at the first token, gae run forwards, and delta without the next value.
    """
    right_X, wrong_X = LANGUAGE.state_values(POLICY_XV, REWARDS_S), LANGUAGE.random_table(3)[:, 0]
    for gae_lambda, values_X in ((0.0, right_X), (0.5, right_X), (0.95, right_X), (1.0, right_X), (1.0, wrong_X)):
        knobs = {"baseline": "critic", "gae_lambda": gae_lambda}
        assert_equal(step(knobs, values_X=values_X), gradient(REWARDS_S))
    biased_XV = step({"baseline": "critic", "gae_lambda": 0.5}, values_X=wrong_X)
    assert relative_distance(biased_XV, gradient(REWARDS_S)) > 0.3


@pytest.mark.parametrize(("baseline", "factor"), [("none", 1.0), ("group_mean", 1 / 2), ("batch_mean", 3 / 4)])
def test_a_mean_with_the_sample_itself_shrinks_the_gradient(
    step: Callable[..., Tensor], baseline: str, factor: float
) -> None:
    """Two prompts of two samples: a mean over n samples, the own one among them, shrinks the step to 1 - 1/n.

    The sum over both prompts' sequences is divided by all four rows, so each prompt counts half. Seen failing with
    batch and group mean swapped.
    """
    rewards_NS = [TINY.random_rewards(0), TINY.random_rewards(4)]
    step_XV = step({"baseline": baseline}, groups=2, samples=2, language=TINY, rewards_NS=rewards_NS)
    assert_equal(step_XV, factor * gradient((rewards_NS[0] + rewards_NS[1]) / 2, TINY))


def kl_by_prefix(of_XV: Tensor, to_XV: Tensor) -> Tensor:
    return (of_XV.exp() * (of_XV - to_XV)).sum(dim=1)


@pytest.mark.parametrize(
    ("knobs", "sampled_XV", "descended"),
    [
        ({"kl": "loss", "kl_coef": 1.0, "kl_estimator": "k2"}, LOGITS_XV, lambda pi: kl_by_prefix(pi, REFERENCE_XV)),
        ({"kl": "loss", "kl_coef": 1.0, "kl_estimator": "k3"}, LOGITS_XV, lambda pi: kl_by_prefix(REFERENCE_XV, pi)),
        ({"proximal_kl_coef": 1.0, "proximal": "behaviour"}, OTHER_XV, lambda pi: kl_by_prefix(REFERENCE_XV, pi)),
        ({"entropy_coef": 1.0}, LOGITS_XV, lambda pi: (pi.exp() * pi).sum(dim=1)),
    ],
)
def test_terms_beside_the_policys_count_at_the_prefixes_that_were_visited(
    step: Callable[..., Tensor], knobs: dict[str, Any], sampled_XV: Tensor, descended: Callable[[Tensor], Tensor]
) -> None:
    """k2 is grad KL(pi || ref), k3 grad KL(ref || pi): how pi's choices change the visits is left out, which is exact
    for PPO's KL(proximal || pi) alone.

    Seen failing with the estimators' gap reversed, with k3's exponent of the other sign, with PPO's direction reversed,
    and with the sign of the entropy turned.
    """
    visits_X = LANGUAGE.visits(sampled_XV.log_softmax(dim=1))
    expected_XV = -gradient_of(lambda pi: (visits_X * descended(pi)).sum(), LOGITS_XV)
    given = {"reference_XV": REFERENCE_XV if "kl" in knobs else None, "behaviour_logits_XV": sampled_XV}
    assert_equal(step(knobs, rewards_NS=[torch.zeros_like(REWARDS_S)], **given), expected_XV)


# --- old samples: drawn from another policy than the one that learns ---

GSPO = read_preset("gspo")["objective"] | {"behaviour_weight_cap": 5.0}
PRODUCT, FREE = {"behaviour_weight": "sequence"}, {"behaviour_weight_cap": UNCAPPED}


@pytest.mark.parametrize(
    ("knobs", "lost"),
    [
        ({"behaviour_weight": "sequence"}, 0.0),
        ({"behaviour_weight": "token"}, 0.69),
        ({"behaviour_weight": "none"}, 0.59),
        (GSPO | PRODUCT | FREE, 0.0),
        (GSPO | PRODUCT, 0.39),
        (GSPO | PRODUCT | {"behaviour_weight_above": "truncate"}, 0.20),
        (GSPO, 0.45),
        (GSPO | FREE, 0.45),
        (GSPO | FREE | {"behaviour_weight": "token"}, 0.56),
        (GSPO | {"behaviour_weight": "token"}, 0.60),
        (GSPO | {"behaviour_weight": "none"}, 0.76),
    ],
)
def test_what_weights_restore_of_the_gradient(step: Callable[..., Tensor], knobs: dict[str, Any], lost: float) -> None:
    """The product over the whole sequence without a cap is exact; of the others a share of the step's length is lost.

    With the samples of a group as baselines: test_rloo_climbs_the_regularised_return_exactly.
    GSPO climbs the return per token. With a weight per token there, one token's weight multiplies the gradients of all
    the others; the geometric mean, the preset's, never reaches the cap here. Seen failing with the weight inverted,
    with the product replaced by the token's own weight, with a weight of 1, and with the preset's weight per token.
    """
    exact_XV = gradient(REWARDS_S / LANGUAGE.lengths_S if "ratio_level" in knobs else REWARDS_S)
    step_XV = step(knobs, behaviour_logits_XV=OTHER_XV)
    assert relative_distance(step_XV, exact_XV) == pytest.approx(lost, abs=0.01 if lost else 1e-5)


def test_token_weights_correct_the_choice_but_not_how_it_came_to_it(step: Callable[..., Tensor]) -> None:
    """The step of `sum over prefixes of visits_mu * sum over symbols of pi * Q_mu`, everything of mu held fixed.

    Each symbol's probability is right; which prefixes are seen, and what follows the symbol, stay those of the policy
    mu that sampled. The same is true of unclipped PPO with proximal = behaviour (naive PPO), where the ratio itself is
    that weight. Seen failing with the weight inverted, and with the sequence weight in its place.
    """
    visits_X = LANGUAGE.visits(REFERENCE_XV)
    action_values_XV = LANGUAGE.action_values(REFERENCE_XV, REWARDS_S)
    expected_XV = gradient_of(lambda pi: (visits_X * (pi.exp() * action_values_XV).sum(dim=1)).sum(), LOGITS_XV)
    for proximal in ("recompute", "behaviour"):
        step_XV = step({"behaviour_weight": "token", "proximal": proximal}, behaviour_logits_XV=OTHER_XV)
        assert_equal(step_XV, expected_XV)


# --- presets with a reference, in a shorter language ---

TEACHER_XV = (SHORT.random_table(1) + SHORT.random_table(7, scale=0.7)).log_softmax(dim=1)


def regularised_gradient(coef: float) -> Tensor:
    """Return the exact gradient of E[return] - coef KL(pi || teacher)."""
    teacher_S = SHORT.sequence_logprobs(TEACHER_XV)

    def objective(logprobs_XV: Tensor) -> Tensor:
        logprobs_S = SHORT.sequence_logprobs(logprobs_XV)
        return (logprobs_S.exp() * (SHORT.random_rewards(0) - coef * (logprobs_S - teacher_S))).sum()

    return gradient_of(objective, SHORT.random_table(1))


def test_rloo_climbs_the_regularised_return_exactly(step: Callable[..., Tensor]) -> None:
    """The preset as it is, KL of 0.05 in the reward: unbiased. On old samples too, with the weight of the sequence.

    Seen failing with the KL added to the reward, with the return of the second token for the sample's, with the
    baseline of the group mean, and with a behaviour weight per token (off-policy).
    """
    exact_XV, given = regularised_gradient(0.05), {"samples": 2, "language": SHORT, "reference_XV": TEACHER_XV}
    assert_equal(step({"preset": "rloo"}, **given), exact_XV)
    knobs = {"preset": "rloo", "behaviour_weight": "sequence", "behaviour_weight_cap": UNCAPPED}
    behaviour_logits_XV = SHORT.random_table(1) + SHORT.random_table(8, scale=0.7)
    assert_equal(step(knobs, behaviour_logits_XV=behaviour_logits_XV, **given), exact_XV)
    # The mean of a group holds the whole return of the sample itself, KL included: factor 1 - 1/2 on every token.
    assert_equal(step({"preset": "rloo", "baseline": "group_mean"}, **given), exact_XV / 2)


def test_distilling_climbs_minus_the_divergence_from_the_teacher(step: Callable[..., Tensor]) -> None:
    """On-policy, tokens added up: -KL(pi || teacher) at each prefix, weighted with how often pi visits it.

    Seen failing with k3 in the preset, which climbs the other divergence.
    """
    knobs = {"preset": "distill", "reference_path": "teacher", "aggregation": "sequence_sum"}
    logits_XV = SHORT.random_table(1)
    visits_X = SHORT.visits(logits_XV.log_softmax(dim=1))
    exact_XV = gradient_of(lambda pi: -(visits_X * kl_by_prefix(pi, TEACHER_XV)).sum(), logits_XV)
    assert_equal(step(knobs, samples=2, language=SHORT, reference_XV=TEACHER_XV), exact_XV)
