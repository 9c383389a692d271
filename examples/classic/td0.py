"""TD(0) evaluation: move each value towards the reward plus the next state's value, without waiting for the end.

The TD errors are the project's `gae` at lambda = 0 (at lambda = 1 it gives Monte-Carlo errors). On the book's random
walk, and on its eight episodes of Example 6.4 ("A, 0, B, 0", then six times "B, 1" and once "B, 0").

Source: Sutton & Barto §6.1-6.3, Figure 6.2 and Example 6.4.
Known answer: V = 1/6 ... 5/6 on the walk. On the eight episodes, repeated until nothing changes, TD(0) says
V(A) = 3/4, the value in the most likely model; Monte Carlo says 0, the mean of the returns seen.
"""

import numpy as np
import torch
from matplotlib.figure import Figure
from monte_carlo import EXACT_S, random_walks
from plotting import command_line, curves, new_figure
from torch import Tensor

from areal_lite.algo.advantages import gae


def sweep(
    values_S: Tensor, states_T: Tensor, rewards_T: Tensor, lengths_B: Tensor, *, rate: float, lam: float
) -> Tensor:
    """Return the values after one batch update: `V(s) += rate * (sum of the errors of the visits to s)`."""
    values_T = values_S[states_T]
    errors_T, _ = gae(rewards_T, values_T=values_T, lengths_B=lengths_B, gamma=1.0, gae_lambda=lam)
    return values_S.index_add(0, states_T, rate * errors_T)


def learn(episodes: int, *, rate: float, lam: float, seed: int) -> list[float]:
    """Learn online from one walk after another; return the error after each of them."""
    rng, values_S, errors = np.random.default_rng(seed), torch.full((5,), 0.5), []
    for episode in range(episodes):
        states_T, rewards_T, lengths_B = random_walks(rng, 1)
        step = rate / (1 + rate * episode / 10)  # falling steps: their sum diverges, that of their squares does not
        values_S = sweep(values_S, torch.from_numpy(states_T), rewards_T, lengths_B, rate=step, lam=lam)
        errors.append(float(np.sqrt(np.mean((values_S.numpy() - EXACT_S) ** 2))))
    return errors


def main(seed: int = 0) -> Figure:
    """Learn the walk's values, and show on eight episodes what TD and Monte Carlo converge to."""
    runs = {name: [learn(400, rate=0.1, lam=lam, seed=seed + run) for run in range(5)]
            for name, lam in (("TD(0)", 0.0), ("Monte Carlo", 1.0))}  # fmt: skip
    errors = {name: np.mean(lines, axis=0) for name, lines in runs.items()}
    print(", ".join(f"{name}: error {line[-1]:.3f}" for name, line in errors.items()))

    states_T = torch.tensor([0, 1] + [1] * 7)  # A, B, then seven times B
    rewards_T = torch.tensor([0.0, 0.0] + [1.0] * 6 + [0.0])
    lengths_B = torch.tensor([2] + [1] * 7)
    answers = {"TD(0)": [torch.zeros(2)], "Monte Carlo": [torch.zeros(2)]}
    for (_, line), lam in zip(answers.items(), (0.0, 1.0), strict=True):
        for _ in range(300):
            line.append(sweep(line[-1], states_T, rewards_T, lengths_B, rate=0.05, lam=lam))
    print(", ".join(f"{name}: V(A) {line[-1][0]:.3f}, V(B) {line[-1][1]:.3f}" for name, line in answers.items()))
    assert errors["TD(0)"][-1] < 0.06
    torch.testing.assert_close(answers["TD(0)"][-1], torch.tensor([0.75, 0.75]), atol=1e-3, rtol=0.0)
    torch.testing.assert_close(answers["Monte Carlo"][-1], torch.tensor([0.0, 0.75]), atol=1e-3, rtol=0.0)

    figure, (left, right) = new_figure()
    curves(left, errors, xlabel="walk", ylabel="error", title="Random walk: mean of 5 runs")
    lines = {f"V(A) by {name}": [float(values[0]) for values in line] for name, line in answers.items()}
    curves(
        right, lines, goal=0.75, goal_label="most likely model", xlabel="sweep", title="Eight episodes, again and again"
    )
    return figure


if __name__ == "__main__":
    command_line(main)
