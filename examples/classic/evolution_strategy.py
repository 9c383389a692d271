"""An evolution strategy on CartPole-v1: no gradient of the policy at all, only scores of noisy copies of it.

`theta += rate / (n sigma) * sum over i of score(theta + sigma e_i) * e_i`, with mirrored noise (e and -e) and ranks in
place of scores. The policy is linear: push right where `theta . observation > 0`.

Source: arXiv 1703.03864, algorithm 1 and §2.1 (mirrored sampling, fitness shaping).
Known answer: on a bowl `-|theta - c|^2` the estimate has the mean `-2 (theta - c)`, the gradient itself; on CartPole
the mean return reaches gymnasium's threshold of 475.
"""

from collections.abc import Callable

import numpy as np
from learner import SOLVED, evaluate
from matplotlib.figure import Figure
from plotting import command_line, curves, new_figure

PAIRS, SIGMA, RATE, UPDATES = 16, 0.3, 0.3, 20


def gradient(
    score: Callable[[np.ndarray], np.ndarray], theta_D: np.ndarray, rng: np.random.Generator, *, pairs: int
) -> np.ndarray:
    """Estimate the gradient [D] of the expected score of `theta + sigma * noise`; `score` maps [P, D] to [P]."""
    noise_PD = rng.normal(size=(pairs, len(theta_D)))
    noise_PD = np.concatenate([noise_PD, -noise_PD])
    return score(theta_D + SIGMA * noise_PD) @ noise_PD / (len(noise_PD) * SIGMA)


def ranks(scores_P: np.ndarray) -> np.ndarray:
    """Replace scores by their ranks, from -0.5 to 0.5; equal scores get equal ranks."""
    order = (scores_P[:, None] > scores_P).sum(1) + (scores_P[:, None] >= scores_P).sum(1) - 1
    return order / (2 * (len(scores_P) - 1)) - 0.5


def main(seed: int = 0) -> Figure:
    """Check the estimate on a bowl, then climb on CartPole."""
    rng = np.random.default_rng(seed)
    place, bottom = np.array([1.0, -1.0, 0.5, 2.0]), np.zeros(4)
    estimate = gradient(lambda points: -((points - bottom) ** 2).sum(1), place, rng, pairs=50_000)
    print(f"bowl: estimated {estimate.round(3)}, exact {-2 * (place - bottom)}")
    assert abs(estimate + 2 * (place - bottom)).max() < 0.12

    means, theta_D = [], np.zeros(4)
    for update in range(UPDATES):

        def play(points_PD: np.ndarray, update: int = update) -> np.ndarray:
            def choose(observations_P: np.ndarray) -> np.ndarray:
                return (points_PD * observations_P).sum(1) > 0

            returns_P = evaluate(choose, episodes=len(points_PD), seed=1000 * (seed * UPDATES + update))
            means.append(returns_P.mean())
            return ranks(returns_P)

        theta_D = theta_D + RATE * gradient(play, theta_D, rng, pairs=PAIRS)
    score = float(evaluate(lambda observations: observations @ theta_D > 0, seed=10**6).mean())
    print(f"CartPole: mean return {score:.1f} over 20 fresh episodes (threshold {SOLVED}), theta {theta_D.round(2)}")
    assert score >= SOLVED

    figure, (left, right) = new_figure()
    curves(
        left, {"mean of the noisy copies": means}, goal=SOLVED, goal_label="solved", xlabel="update", ylabel="return"
    )
    right.bar(["place", "speed", "angle", "turning"], theta_D, color="#1f6f8b")
    right.set(title="The four weights learned")
    return figure


if __name__ == "__main__":
    command_line(main)
