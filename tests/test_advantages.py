"""Group-normalised advantages: hand-computed values, failed samples, uninformative groups."""

import math

import pytest
import torch

from areal_lite.algo.advantages import group_normalised_advantages

NAN = float("nan")


def test_golden_values() -> None:
    """Two groups by hand: [1 0 0 1] has mean 1/2, std sqrt(4 * 0.25 / 3); [3 1 2 NaN] has mean 2, std 1.

    Seen failing with NaN samples counted in the mean, and with n instead of n - 1 in the std.
    """
    rewards = torch.tensor([[1.0, 0.0, 0.0, 1.0], [3.0, 1.0, 2.0, NAN]])
    high = 0.5 / math.sqrt(1 / 3)
    expected = torch.tensor([[high, -high, -high, high], [1.0, -1.0, 0.0, 0.0]])
    torch.testing.assert_close(group_normalised_advantages(rewards, eps=0.0), expected)


def test_eps_is_added_to_the_std() -> None:
    advantages = group_normalised_advantages(torch.tensor([[3.0, 1.0, 2.0]]), eps=1.0)
    torch.testing.assert_close(advantages, torch.tensor([[0.5, -0.5, 0.0]]))


@pytest.mark.parametrize("reward", [0.1, 1 / 3, -7.7, 1e6, 0.0])
def test_equal_rewards_say_nothing(reward: float) -> None:
    """Exactly zero, without an eps to hide rounding in the mean. Seen failing in float32 arithmetic."""
    rewards = torch.tensor([[reward] * 7 + [NAN]])
    assert group_normalised_advantages(rewards, eps=0.0).tolist() == [[0.0] * 8]


@pytest.mark.parametrize("row", [[NAN, NAN, NAN], [NAN, 1.0, NAN]])
def test_fewer_than_two_scored_samples_say_nothing(row: list[float]) -> None:
    rewards = torch.tensor([row, [0.0, 1.0, 0.0]])
    advantages = group_normalised_advantages(rewards)
    assert advantages[0].tolist() == [0.0, 0.0, 0.0]
    assert advantages[1, 1] > 1.0


def test_a_failed_sample_leaves_the_baseline() -> None:
    """With and without the failed sample the others get the same."""
    with_failed = group_normalised_advantages(torch.tensor([[1.0, NAN, 0.0, 0.25]]))[0, [0, 2, 3]]
    torch.testing.assert_close(with_failed, group_normalised_advantages(torch.tensor([[1.0, 0.0, 0.25]]))[0])


def test_shift_scale_and_order_of_rewards() -> None:
    rewards = torch.tensor([[0.25, -1.25, 2.0, 0.875, 0.875]])
    advantages = group_normalised_advantages(rewards, eps=0.0)
    torch.testing.assert_close(group_normalised_advantages(5.0 * rewards + 3.0, eps=0.0), advantages)
    order = torch.tensor([3, 1, 0, 4, 2])
    torch.testing.assert_close(group_normalised_advantages(rewards[:, order], eps=0.0), advantages[:, order])
    assert abs(float(advantages.sum())) < 1e-6
    assert float(advantages.std()) == pytest.approx(1.0)


@pytest.mark.parametrize("rewards", [torch.tensor([1.0, 0.0]), torch.tensor([[1.0, float("inf")]])])
def test_refuses_what_is_no_matrix_of_finite_rewards(rewards: torch.Tensor) -> None:
    with pytest.raises(ValueError, match=r"matrix \[groups, samples\]"):
        group_normalised_advantages(rewards)
