"""Reward shaping: golden values, bounds, and the logged reward left alone."""

import numpy as np
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
