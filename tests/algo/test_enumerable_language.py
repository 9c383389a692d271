"""Every online estimator on its own policy's samples, against the exact gradient of an enumerable language.

Each is asked what it is *equal to* in expectation: the exact policy gradient where it is unbiased, its own closed form
where it is not. Nothing is sampled, so the tolerance of 1e-6 is rounding (advantages are float32). Old samples, and the
terms beside the policy's, are in `test_enumerable_off_policy.py`.
"""

from math import comb
from typing import Any

import pytest
import torch
from enumerable_language import Language, gradient_of, relative_distance
from enumerable_objective import (
    LANGUAGE,
    LIMIT,
    SMALL,
    TINY,
    assert_equal,
    estimate,
    other_logits,
    plain,
    policy,
    weighted_gradient,
)
from torch import Tensor

# The language itself.


def test_the_enumeration_is_a_probability_distribution() -> None:
    """15 sequences; visits and values agree with their recursions. Seen failing with cut-off sequences left out."""
    logprobs_XV, logprobs_S = policy()
    rewards_S = LANGUAGE.random_rewards(0)
    assert len(LANGUAGE.sequences) == 15
    assert len(LANGUAGE.prefixes) == 7
    assert float(logprobs_S.exp().sum()) == pytest.approx(1.0)
    assert float(LANGUAGE.visits(logprobs_XV).sum()) == pytest.approx(
        float((logprobs_S.exp() * LANGUAGE.lengths_S).sum())
    )
    assert float(LANGUAGE.state_values(logprobs_XV, rewards_S)[0]) == pytest.approx(
        float((logprobs_S.exp() * rewards_S).sum())
    )


def test_the_exact_gradient_against_finite_differences() -> None:
    rewards_S, logits_XV = LANGUAGE.random_rewards(0), LANGUAGE.random_table(1)

    def expected_return(logits_XV: Tensor) -> float:
        return float((LANGUAGE.sequence_logprobs(logits_XV.log_softmax(dim=1)).exp() * rewards_S).sum())

    exact_XV = weighted_gradient(rewards_S)
    for x, v in [(0, 0), (2, 1), (6, 2)]:
        step_XV = torch.zeros_like(logits_XV)
        step_XV[x, v] = 1e-5
        slope = (expected_return(logits_XV + step_XV) - expected_return(logits_XV - step_XV)) / 2e-5
        assert slope == pytest.approx(float(exact_XV[x, v]), abs=1e-8)


# Unbiased estimators.


@pytest.mark.parametrize("surrogate", ["ratio", "weighted_likelihood"])
@pytest.mark.parametrize(
    ("language", "samples", "baseline"),
    [
        (LANGUAGE, 1, "none"),
        (LANGUAGE, 2, "none"),
        (LANGUAGE, 2, "leave_one_out"),
        (SMALL, 3, "leave_one_out"),
        (Language(num_symbols=4, max_length=4), 1, "none"),
    ],
)
def test_no_baseline_and_leave_one_out_are_unbiased(
    language: Language, samples: int, baseline: str, surrogate: str
) -> None:
    """REINFORCE, RLOO, and CISPO's weighted likelihood at ratio 1.

    Seen failing with a leave-one-out mean that holds the sample itself (the group mean), and with a likelihood that
    forgets the advantage.
    """
    step_XV = estimate(plain(baseline=baseline, surrogate=surrogate), language=language, samples=samples)
    assert_equal(step_XV, weighted_gradient(language.random_rewards(0), language))


@pytest.mark.parametrize("gae_lambda", [0.0, 0.5, 0.95, 1.0])
def test_a_critic_that_is_right_is_unbiased_for_every_lambda(gae_lambda: float) -> None:
    """Seen failing with the reward at the first token, gae run forwards, and delta without the next value."""
    rewards_S = LANGUAGE.random_rewards(0)
    values_X = LANGUAGE.state_values(policy()[0], rewards_S)
    step_XV = estimate(plain(baseline="critic", gae_lambda=gae_lambda), values_X=values_X)
    assert_equal(step_XV, weighted_gradient(rewards_S))


def test_any_critic_is_unbiased_at_lambda_1_and_biased_below() -> None:
    """Lambda 1 is the Monte-Carlo return minus a baseline; at 0.5 a wrong critic moves the step by 0.6 of its length.

    Seen failing with the reward at the first token, gae run forwards, and delta without the next value.
    """
    values_X, exact_XV = LANGUAGE.random_table(3)[:, 0], weighted_gradient(LANGUAGE.random_rewards(0))
    assert_equal(estimate(plain(baseline="critic", gae_lambda=1.0), values_X=values_X), exact_XV)
    biased_XV = estimate(plain(baseline="critic", gae_lambda=0.5), values_X=values_X)
    assert relative_distance(biased_XV, exact_XV) > 0.3


@pytest.mark.parametrize("baseline", ["none", "leave_one_out", "critic"])
def test_kl_in_the_reward_climbs_the_regularised_return(baseline: str) -> None:
    """E[return] - 0.3 KL(pi || reference), whose gradient needs no term for the reward's own dependence on pi.

    The estimator is k1; with k3 in the reward the step is off by 0.34 of its length: k3 is KL on average, but its
    correlation with the likelihood is not k1's. Seen failing with the costs added instead of subtracted, and with
    reference and policy swapped.
    """
    rewards_S, reference_XV = LANGUAGE.random_rewards(0), other_logits().log_softmax(dim=1)
    reference_S = LANGUAGE.sequence_logprobs(reference_XV)

    def regularised_return(logprobs_XV: Tensor) -> Tensor:
        logprobs_S = LANGUAGE.sequence_logprobs(logprobs_XV)
        return (logprobs_S.exp() * (rewards_S - 0.3 * (logprobs_S - reference_S))).sum()

    exact_XV = gradient_of(regularised_return, LANGUAGE.random_table(1))
    settings: dict[str, Any] = {"baseline": baseline, "kl": "reward", "kl_coef": 0.3, "gae_lambda": 1.0}
    arguments: dict[str, Any] = {
        "samples": 2 if baseline == "leave_one_out" else 1,
        "values_X": LANGUAGE.random_table(3)[:, 0],
        "reference_XV": reference_XV,
    }
    assert_equal(estimate(plain(**settings), **arguments), exact_XV)
    assert relative_distance(estimate(plain(**settings, kl_estimator="k3"), **arguments), exact_XV) > 0.2


# Biased estimators: each to its own closed form.


@pytest.mark.parametrize(("baseline", "factor"), [("none", 1.0), ("group_mean", 1 / 2), ("batch_mean", 3 / 4)])
def test_a_mean_with_the_sample_itself_shrinks_the_gradient(baseline: str, factor: float) -> None:
    """Two prompts of two samples: a mean over n samples, the own one among them, shrinks the step to 1 - 1/n.

    The sum over both prompts' sequences is divided by all four rows, so each prompt counts half. Seen failing with
    batch and group mean swapped.
    """
    rewards_NS = [TINY.random_rewards(0), TINY.random_rewards(4)]
    step_XV = estimate(plain(baseline=baseline), language=TINY, rewards_NS=rewards_NS, samples=2)
    exact_XV = sum((weighted_gradient(rewards_S, TINY) / 2 for rewards_S in rewards_NS), torch.zeros(()))
    assert_equal(step_XV, factor * exact_XV)


@pytest.mark.parametrize("ratio_level", ["token", "sequence"])
def test_sequence_mean_climbs_the_return_per_token(ratio_level: str) -> None:
    """1 / length within the sum makes a long sequence's reward count less: the step is that of E[R / length].

    With a group mean of two samples the closed form is half of grad E[R / length] - E[R] grad E[1 / length]: the second
    term is the length bias that Dr. GRPO (arXiv 2503.20783) removes. GSPO at ratio 1, with its sequence ratio, has
    the same step. Seen failing with the row's tokens counted as the batch's, and with the sequence ratio a sum of log
    ratios instead of their mean.
    """
    rewards_S, logprobs_S = LANGUAGE.random_rewards(0), policy()[1]
    shares_S = 1 / LANGUAGE.lengths_S
    knobs: dict[str, Any] = {"aggregation": "sequence_mean", "ratio_level": ratio_level}
    plain_step_XV = weighted_gradient(rewards_S * shares_S)
    assert_equal(estimate(plain(**knobs)), plain_step_XV)
    mean = (logprobs_S.exp() * rewards_S).sum()
    expected_XV = (plain_step_XV - mean * weighted_gradient(shares_S)) / 2
    assert_equal(estimate(plain(**knobs, baseline="group_mean"), samples=2), expected_XV)
    assert relative_distance(plain_step_XV, weighted_gradient(rewards_S)) > 0.5


def test_the_constant_normaliser_is_the_exact_gradient_by_the_limit() -> None:
    """Dr. GRPO up to its group mean. Seen failing with the row's own length in place of the limit."""
    step_XV = estimate(plain(aggregation="constant", baseline="leave_one_out"), samples=2)
    assert_equal(step_XV, weighted_gradient(LANGUAGE.random_rewards(0)) / LIMIT)


def test_token_mean_divides_by_the_length_of_the_whole_batch() -> None:
    """A sequence counts by 2 / (its length + its partner's), on average over partners: the step of E[c R].

    Seen failing with token_mean per row.
    """
    rewards_S, logprobs_S = LANGUAGE.random_rewards(0), policy()[1]
    lengths_S = LANGUAGE.lengths_S.double()
    counts_S = (logprobs_S.exp() * 2 / (lengths_S[:, None] + lengths_S)).sum(dim=1)
    assert_equal(estimate(plain(aggregation="token_mean"), samples=2), weighted_gradient(counts_S * rewards_S))


def test_group_std_of_two_is_the_gradient_of_winning() -> None:
    """With two samples (r - mean) / std is +-1/sqrt(2) whatever the distance: the step is that of the share of wins.

    Seen failing with n in the denominator of the std.
    """
    rewards_S, logprobs_S = LANGUAGE.random_rewards(0), policy()[1]
    wins_S = ((rewards_S[:, None] - rewards_S).sign() * logprobs_S.exp()).sum(dim=1) / 2**0.5
    step_XV = estimate(plain(baseline="group_mean", scale="group_std"), samples=2)
    torch.testing.assert_close(step_XV, weighted_gradient(wins_S), rtol=0, atol=1e-4)
    assert_equal(step_XV * (1 + 1e-6), estimate(plain(baseline="leave_one_out", scale="group_std"), samples=2) / 2)


def test_group_std_with_right_or_wrong_rescales_each_prompt_by_its_difficulty() -> None:
    """GRPO with rewards 0 and 1: the step is the exact one times a factor of the success probability p alone.

    With K of G right, std = sqrt(K (G - K) / (G (G - 1))); a right sample gets (1 - K/G) / std and a wrong one
    -(K/G) / std. The factor is the expected difference of the two, over K of the *other* samples, binomial in p. For
    G = 5 it is larger where p is near 0 or 1: the difficulty bias of arXiv 2503.20783 (for G = 2 and 3 it is constant).
    Seen failing with n in the denominator of the std.
    """
    group, factors = 5, {}
    objective = plain(baseline="group_mean", scale="group_std")
    for rewards in ([0.0, 1.0, 0.0], [1.0, 0.0, 0.0], [1.0, 1.0, 0.0]):
        rewards_S = torch.tensor(rewards, dtype=torch.float64)
        p = float((policy(TINY)[1].exp() * rewards_S).sum())
        factors[p] = expected_factor(p, group)
        step_XV = estimate(objective, language=TINY, rewards_NS=[rewards_S], samples=group)
        # The project adds 1e-6 to each std, of about 0.5.
        exact_XV = weighted_gradient(rewards_S, TINY)
        torch.testing.assert_close(step_XV, factors[p] * exact_XV, rtol=4e-6, atol=1e-6)
    assert sorted(factors, key=factors.__getitem__) == sorted(factors, key=lambda p: abs(p - 0.5))


def expected_factor(p: float, group: int) -> float:
    factor = 0.0
    for others in range(group):
        chance = comb(group - 1, others) * p**others * (1 - p) ** (group - 1 - others)
        for right, distance in ((others + 1, 1 - (others + 1) / group), (others, others / group)):
            if 0 < right < group:
                factor += chance * distance / (right * (group - right) / (group * (group - 1))) ** 0.5
    return factor


@pytest.mark.parametrize("samples", [2, 3])
def test_best_of_group_is_supervised_learning_on_the_distribution_of_the_best(samples: int) -> None:
    """RAFT: P(best = y) = P(reward <= R(y))^G - P(reward < R(y))^G, shared among equal rewards by their probability.

    Seen failing with the worst sample kept, and with all samples kept.
    """
    rewards_S = SMALL.random_rewards(0)
    rewards_S[3] = rewards_S[5]
    probabilities_S = policy(SMALL)[1].exp()
    at_most_S = ((rewards_S <= rewards_S[:, None]) * probabilities_S).sum(dim=1)
    below_S = ((rewards_S < rewards_S[:, None]) * probabilities_S).sum(dim=1)
    best_S = (at_most_S**samples - below_S**samples) * probabilities_S / (at_most_S - below_S)
    assert float(best_S.sum()) == pytest.approx(1.0)
    step_XV = estimate(
        plain(sample_filter="best_of_group", surrogate="likelihood"),
        language=SMALL,
        rewards_NS=[rewards_S],
        samples=samples,
    )
    expected_XV = gradient_of(
        lambda logprobs_XV: (best_S * SMALL.sequence_logprobs(logprobs_XV)).sum(), SMALL.random_table(1)
    )
    assert_equal(step_XV, expected_XV)
