"""Monte-Carlo evaluation: the value of a state is the mean of the returns that followed it.

On the book's random walk: five states in a row, each step goes left or right by a coin, only leaving on the right
pays 1. Every visit counts. The returns are the project's `returns_to_go`, on rows of different lengths.

Source: Sutton & Barto §5.1 and Example 6.2.
Known answer: V = 1/6, 2/6, 3/6, 4/6, 5/6; the error shrinks like one over the root of the number of episodes.
"""

import numpy as np
import torch
from matplotlib.figure import Figure
from plotting import command_line, curves, new_figure
from torch import Tensor

from areal_lite.algo.advantages import returns_to_go

EXACT_S = np.arange(1, 6) / 6


def random_walks(rng: np.random.Generator, count: int) -> tuple[np.ndarray, Tensor, Tensor]:
    """Return the states [T] of walks from the middle, one walk after another, their rewards [T] and lengths [B]."""
    states, rewards, lengths = [], [], []
    for _ in range(count):
        state, begin = 2, len(states)
        while 0 <= state <= 4:
            states.append(state)
            state += 1 if rng.random() < 0.5 else -1
            rewards.append(float(state == 5))
        lengths.append(len(states) - begin)
    return np.array(states), torch.tensor(rewards), torch.tensor(lengths)


def monte_carlo(states_T: np.ndarray, rewards_T: Tensor, lengths_B: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Return the mean return of each state [S], and how often it was visited [S]."""
    returns_T = returns_to_go(rewards_T, lengths_B=lengths_B, gamma=1.0).numpy()
    visits_S = np.bincount(states_T, minlength=5)
    return np.bincount(states_T, weights=returns_T, minlength=5) / np.maximum(visits_S, 1), visits_S


def main(seed: int = 0) -> Figure:
    """Estimate the values from more and more walks."""
    counts = [10, 30, 100, 300, 1000, 3000]
    rng = np.random.default_rng(seed)
    errors, estimates = [], {}
    for count in counts:
        runs = [monte_carlo(*random_walks(rng, count))[0] for _ in range(5 if count > 100 else 30)]
        errors.append(float(np.sqrt(np.mean([(values_S - EXACT_S) ** 2 for values_S in runs]))))
        estimates[count] = runs[0]
    print(f"after {counts[-1]} walks {estimates[counts[-1]].round(3)}, exact {EXACT_S.round(3)}")
    slope = float(np.polyfit(np.log(counts), np.log(errors), 1)[0])
    print(
        f"error {errors[0]:.3f} after 10 walks, {errors[-1]:.3f} after {counts[-1]}; exponent {slope:.2f} (theory -0.5)"
    )
    assert abs(estimates[counts[-1]] - EXACT_S).max() < 0.05
    assert -0.75 < slope < -0.3

    figure, (left, right) = new_figure()
    shown = {f"{count} walks": estimates[count] for count in (10, 100, 3000)}
    curves(left, {**shown, "exact": EXACT_S}, xlabel="state", ylabel="value", title="Values from returns")
    root = np.sqrt(np.array(counts) / counts[0])
    curves(right, {"error": errors, "one over the root": errors[0] / root}, x=counts, xscale="log", yscale="log")
    right.set(xlabel="walks", title="Root mean square error")
    return figure


if __name__ == "__main__":
    command_line(main)
