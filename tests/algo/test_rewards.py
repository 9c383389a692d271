"""Reward shaping: golden values, bounds, and the logged reward left alone."""

import numpy as np
import pytest
import torch

from areal_lite.algo.rewards import overlong_penalties, shape_rewards, token_rewards

NAN = float("nan")


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
    penalties = overlong_penalties(lengths, max_new_tokens=100, buffer=0.2)
    np.testing.assert_allclose(penalties, expected, rtol=1e-6)
    assert penalties.dtype == torch.float32


@pytest.mark.parametrize("buffer", [0.0, 1e-6, 0.3, 1.0])
def test_overlong_penalty_is_bounded_and_falls(buffer: float) -> None:
    lengths = torch.arange(0, 5000).reshape(50, 100)
    penalties = overlong_penalties(lengths, max_new_tokens=512, buffer=buffer)
    assert penalties.shape == lengths.shape
    assert penalties.min() >= -1.0
    assert penalties.max() <= 0.0
    assert (penalties.reshape(-1).diff() <= 0).all()
    assert (penalties == 0).all() == (buffer == 0.0)


@pytest.mark.parametrize(("buffer", "limit"), [(-0.1, 8), (1.1, 8), (0.5, 0)])
def test_overlong_refuses_impossible_settings(buffer: float, limit: int) -> None:
    with pytest.raises(ValueError, match="expected a buffer"):
        overlong_penalties(torch.tensor([1]), max_new_tokens=limit, buffer=buffer)


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


def test_token_rewards_add_up_to_reward_minus_costs() -> None:
    rng = np.random.default_rng(0)
    lengths, rewards, costs = (
        torch.tensor([4, 1, 7]),
        torch.tensor(rng.normal(size=3)),
        torch.tensor(rng.normal(size=12)),
    )
    total = token_rewards(rewards, lengths_B=lengths, costs_T=costs).sum()
    assert float(total) == pytest.approx(float(rewards.sum() - costs.sum()))


def test_token_rewards_carry_no_gradient_and_refuse_other_shapes() -> None:
    costs = torch.ones(2, requires_grad=True)
    assert not token_rewards(torch.ones(1), lengths_B=torch.tensor([2]), costs_T=costs).requires_grad
    with pytest.raises(ValueError, match="one reward per row and one cost per token"):
        token_rewards(torch.ones(2), lengths_B=torch.tensor([2]))
    with pytest.raises(ValueError, match="one reward per row and one cost per token"):
        token_rewards(torch.ones(1), lengths_B=torch.tensor([2]), costs_T=torch.ones(3))
