"""Baselines, advantages, filters and generalised advantage estimation: hand-computed values and relations.

And the shaping of rewards.
"""

import math
import re
from typing import Any

import numpy as np
import pytest
import torch

from areal_lite.algo.advantages import (
    gae,
    kept_samples,
    masked_sums,
    returns_to_go,
    sample_advantages,
    sample_baselines,
    std_from_sums,
)
from areal_lite.algo.rewards import overlong_penalties, shape_rewards, token_rewards

NAN = float("nan")
REWARDS = torch.tensor([[1.0, 0.0, 0.0, 1.0], [3.0, 1.0, 2.0, NAN]])


def test_golden_advantages() -> None:
    """Two groups by hand: [1 0 0 1] has mean 1/2, std sqrt(4 * 0.25 / 3); [3 1 2 NaN] has mean 2, std 1.

    Seen failing with NaN samples counted in the mean, and with n instead of n - 1 in the std.
    """
    high = 0.5 / math.sqrt(1 / 3)
    expected = torch.tensor([[high, -high, -high, high], [1.0, -1.0, 0.0, 0.0]])
    advantages = sample_advantages(REWARDS, baseline="group_mean", scale="group_std", eps=0.0)
    torch.testing.assert_close(advantages, expected)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("none", [[0.0] * 4, [0.0] * 4]),
        ("batch_mean", [[8 / 7] * 4, [8 / 7] * 4]),  # (1 + 0 + 0 + 1 + 3 + 1 + 2) / 7
        ("group_mean", [[0.5] * 4, [2.0] * 4]),
        ("leave_one_out", [[1 / 3, 2 / 3, 2 / 3, 1 / 3], [1.5, 2.5, 2.0, 3.0]]),  # (3 + 1 + 2 - r) / 2, unscored aside
    ],
)
def test_golden_baselines(kind: Any, expected: list[list[float]]) -> None:
    """Seen failing with the sample left in its own leave-one-out mean, and with n = G where a sample is unscored."""
    baselines = sample_baselines(REWARDS, kind=kind)
    scored = ~REWARDS.isnan()
    np.testing.assert_allclose(baselines[scored], torch.tensor(expected, dtype=torch.float64)[scored], rtol=1e-12)
    advantages = sample_advantages(REWARDS, baseline=kind, scale="none")
    assert advantages[1, 3] == 0.0
    np.testing.assert_allclose(advantages[scored], (REWARDS - torch.tensor(expected))[scored], rtol=1e-6)


@pytest.mark.parametrize("reward", [0.1, 1 / 3, -7.7, 1e6, 0.0])
@pytest.mark.parametrize(
    ("baseline", "scale"),
    [("group_mean", "group_std"), ("group_mean", "none"), ("leave_one_out", "none"), ("none", "group_std")],
)
def test_equal_rewards_say_nothing(reward: float, baseline: Any, scale: Any) -> None:
    """Exactly zero, without an eps to hide rounding in the mean. Seen failing in float32 arithmetic."""
    rewards = torch.tensor([[reward] * 7 + [NAN]])
    assert sample_advantages(rewards, baseline=baseline, scale=scale, eps=0.0).tolist() == [[0.0] * 8]


@pytest.mark.parametrize("row", [[NAN, NAN, NAN], [NAN, 1.0, NAN]])
@pytest.mark.parametrize("baseline", ["group_mean", "leave_one_out"])
@pytest.mark.parametrize("scale", ["none", "group_std"])
def test_fewer_than_two_scored_samples_say_nothing(row: list[float], baseline: Any, scale: Any) -> None:
    """Seen failing with a baseline of 0 for a lone sample under leave-one-out."""
    advantages = sample_advantages(torch.tensor([row, [0.0, 1.0, 0.0]]), baseline=baseline, scale=scale)
    assert advantages[0].tolist() == [0.0, 0.0, 0.0]
    assert advantages[1, 1] > 0.6


def test_filters() -> None:
    """Seen failing with all of several best samples kept, and with an unscored one counted as varied."""
    rewards = torch.tensor([[0.0, 1.0, 1.0], [1.0, NAN, 1.0], [NAN, NAN, NAN], [-5.0, NAN, -9.0]])
    scored = [[True] * 3, [True, False, True], [False] * 3, [True, False, True]]
    assert kept_samples(rewards, sample_filter="all").tolist() == scored
    best = kept_samples(rewards, sample_filter="best_of_group")
    assert best.tolist() == [[False, True, False], [True, False, False], [False] * 3, [True, False, False]]
    varied = kept_samples(rewards, sample_filter="varied_groups")
    assert varied.tolist() == [[True] * 3, [False] * 3, [False] * 3, [True, False, True]]


def derive_gae(
    rewards: np.ndarray, values: np.ndarray, last_value: float, gamma: float, gae_lambda: float
) -> np.ndarray:
    """The sum of arXiv 1506.02438 eq. 16 for one row: A_t = sum over l of (gamma * lambda)^l * delta_(t+l)."""
    next_values = np.append(values[1:], last_value)
    deltas = rewards + gamma * next_values - values
    size = len(rewards)
    return np.array([sum((gamma * gae_lambda) ** (u - t) * deltas[u] for u in range(t, size)) for t in range(size)])


@pytest.mark.parametrize(("gamma", "gae_lambda"), [(1.0, 0.95), (0.9, 0.5), (1.0, 1.0), (0.7, 0.0)])
@pytest.mark.parametrize("bootstrapped", [False, True])
def test_gae_against_its_definition(gamma: float, gae_lambda: float, bootstrapped: bool) -> None:
    """Seen failing with the carry of another row, the last value dropped, and lambda left out of the carry."""
    rng = np.random.default_rng(0)
    lengths = [3, 1, 0, 5, 2]
    rewards, values = rng.normal(size=(2, 11))
    last_values = rng.normal(size=5) if bootstrapped else np.zeros(5)
    advantages, returns = gae(
        torch.tensor(rewards),
        values_T=torch.tensor(values),
        lengths_B=torch.tensor(lengths),
        gamma=gamma,
        gae_lambda=gae_lambda,
        last_values_B=torch.tensor(last_values) if bootstrapped else None,
    )
    ends = np.cumsum(lengths)
    expected = np.concatenate(
        [
            derive_gae(rewards[end - size : end], values[end - size : end], last, gamma, gae_lambda)
            for end, size, last in zip(ends, lengths, last_values, strict=True)
        ]
    )
    np.testing.assert_allclose(advantages, expected, atol=1e-12)
    np.testing.assert_allclose(returns, expected + values, atol=1e-12)


def test_lambda_one_is_monte_carlo_and_needs_no_critic() -> None:
    """R_t of rewards [1 2 4] at gamma 0.5 by hand: 4, 2 + 2 = 4, 1 + 2 = 3; the values cancel."""
    rewards, lengths = torch.tensor([1.0, 2.0, 4.0, 8.0]), torch.tensor([3, 1])
    expected = torch.tensor([3.0, 4.0, 4.0, 8.0])
    torch.testing.assert_close(returns_to_go(rewards, lengths_B=lengths, gamma=0.5), expected)
    values = torch.tensor([0.3, -2.0, 5.0, 1.0])
    _, returns = gae(rewards, values_T=values, lengths_B=lengths, gamma=0.5, gae_lambda=1.0)
    torch.testing.assert_close(returns, expected)


def test_a_nan_stays_in_its_row_and_nothing_carries_a_gradient() -> None:
    rewards = torch.tensor([1.0, NAN, 2.0, 3.0])
    values = torch.zeros(4, requires_grad=True)
    advantages, returns = gae(rewards, values_T=values, lengths_B=torch.tensor([2, 2]), gamma=1.0, gae_lambda=0.9)
    assert advantages.isnan().tolist() == [True, True, False, False]
    assert not advantages.requires_grad
    assert not returns.requires_grad


def test_gae_of_nothing_and_of_wrong_lengths() -> None:
    nothing = torch.zeros(0)
    for lengths in (torch.zeros(0, dtype=torch.int64), torch.zeros(3, dtype=torch.int64)):
        advantages, _ = gae(nothing, values_T=nothing, lengths_B=lengths, gamma=1.0, gae_lambda=1.0)
        assert advantages.shape == (0,)
    with pytest.raises(ValueError, match=r"rows of \[2\] tokens"):
        gae(torch.zeros(3), values_T=torch.zeros(3), lengths_B=torch.tensor([2]), gamma=1.0, gae_lambda=1.0)


@pytest.mark.parametrize(("name", "shape"), [("last_values_B", (1,)), ("last_values_B", (2, 1)), ("lengths_B", (2, 1))])
def test_gae_broadcasts_nothing(name: str, shape: tuple[int, ...]) -> None:
    """Seen failing without the check: one last value went to both rows."""
    wrong: dict[str, Any] = {"lengths_B": torch.tensor([2, 1]), "last_values_B": torch.ones(2)}
    wrong[name] = wrong[name][: shape[0]].view(shape)
    with pytest.raises(ValueError, match=re.escape(str(shape))):
        gae(torch.zeros(3), values_T=torch.zeros(3), gamma=1.0, gae_lambda=1.0, **wrong)


def test_standard_deviation_from_sums_of_parts() -> None:
    """The sums of parts add up; what is masked has no effect. Seen failing with n in the denominator."""
    rng = np.random.default_rng(0)
    values, mask = rng.normal(5, 2, 30), rng.random(30) < 0.7
    hidden = np.where(mask, values, NAN)
    parts = [masked_sums(torch.tensor(hidden[cut]), torch.tensor(mask[cut])) for cut in (slice(0, 11), slice(11, 30))]
    assert std_from_sums(parts[0] + parts[1]) == pytest.approx(np.std(values[mask], ddof=1))
    for size in (0, 1):
        assert std_from_sums(masked_sums(torch.ones(size), torch.ones(size, dtype=torch.bool))) == 0.0
    assert std_from_sums(masked_sums(torch.full((7,), 0.1), torch.ones(7, dtype=torch.bool))) < 1e-8
    with pytest.raises(ValueError, match="boolean mask"):
        masked_sums(torch.ones(2), torch.ones(2))


# --- rewards: golden values, bounds, and the logged reward left alone ---


def test_shaping_by_hand_leaves_the_reward_alone() -> None:
    """2 * r - 1, clipped to -3..3. Seen failing with clip before bias, and computed in place."""
    rewards = torch.tensor([[1.0, 9.0, NAN], [-4.0, 0.0, 2.25]])
    before = rewards.clone()
    shaped = shape_rewards(rewards, scale=2.0, bias=-1.0, clip=3.0)
    np.testing.assert_array_equal(shaped, [[1.0, 3.0, NAN], [-3.0, -1.0, 3.0]])
    np.testing.assert_array_equal(rewards, before)
    unclipped = shape_rewards(rewards, scale=2.0, bias=-1.0, clip=None)
    np.testing.assert_array_equal(unclipped, [[1.0, 17.0, NAN], [-9.0, -1.0, 3.5]])


def test_overlong_penalty_by_cases() -> None:
    """DAPO's piecewise form with max 100 and a buffer of 20: 0 to 80, then (80 - length) / 20, then -1.

    Seen failing without a lower bound (-5.95 at length 199), and with the buffer counted from the end of the limit on.
    """
    lengths = torch.tensor([0, 79, 80, 81, 90, 99, 100, 101, 199])
    expected = [0.0 if n <= 80 else (80 - n) / 20 if n <= 100 else -1.0 for n in lengths.tolist()]
    penalties = overlong_penalties(lengths, limits=torch.tensor(100), buffer=0.2)
    np.testing.assert_allclose(penalties, expected, rtol=1e-6)
    assert penalties.dtype == torch.float32


def test_reward_stands_at_the_last_token_of_every_row() -> None:
    """The longest row too, whose last token is where a padded table ends; an empty row has none.

    Seen failing with the end found by the padded width, and with the empty row's reward given to its neighbour.
    """
    costs = torch.tensor([0.1, 0.2, 0.3, 0.4, 0.5, 0.6])
    rewards = torch.tensor([1.0, 5.0, -2.0, NAN])
    got = token_rewards(rewards, lengths_B=torch.tensor([2, 0, 3, 1]), costs_T=costs)
    np.testing.assert_allclose(got, [-0.1, 0.8, -0.3, -0.4, -2.5, NAN], rtol=1e-6)
    bare = token_rewards(rewards, lengths_B=torch.tensor([2, 0, 3, 1]))
    np.testing.assert_array_equal(bare, [0.0, 1.0, 0.0, 0.0, -2.0, NAN])
