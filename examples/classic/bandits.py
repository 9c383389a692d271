"""Bandits: explore or exploit. Two rules on ten arms that pay 0 or 1, 200 runs side by side.

epsilon-greedy tries a random arm with a fixed probability, for ever: its regret grows linearly.
UCB adds a bonus to arms that it knows little of, `sqrt(2 ln t / n)`: its regret grows like a logarithm.

Source: Sutton & Barto §2.2-2.7; Auer, Cesa-Bianchi, Fischer (2002), Theorem 1.
Known answer: epsilon-greedy comes to take the best arm with probability `1 - eps + eps / K` and to lose
`eps * mean(gap)` each step. UCB's regret stays below Auer's bound `sum 8 ln(t) / gap + (1 + pi^2 / 3) sum gap`, and
what it loses each step goes to zero.
"""

import numpy as np
from matplotlib.figure import Figure
from plotting import command_line, curves, new_figure

MEANS_K = np.linspace(0.05, 0.95, 10)
GAPS_K = MEANS_K.max() - MEANS_K
STEPS, RUNS, EPSILON = 10_000, 200, 0.1


def play(rule: str, *, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Return the mean regret so far and the share of runs on the best arm, both [STEPS]."""
    rng = np.random.default_rng(seed)
    every = np.arange(RUNS)
    counts_RK, sums_RK = np.zeros((2, RUNS, len(MEANS_K)))
    regret, best = np.zeros(STEPS), np.zeros(STEPS)
    for step in range(STEPS):
        means_RK = sums_RK / np.maximum(counts_RK, 1)
        if step < len(MEANS_K):  # every arm once
            arms_R = np.full(RUNS, step)
        elif rule == "ucb":
            arms_R = (means_RK + np.sqrt(2 * np.log(step) / counts_RK)).argmax(1)
        else:
            explore_R = rng.random(RUNS) < EPSILON
            arms_R = np.where(explore_R, rng.integers(len(MEANS_K), size=RUNS), means_RK.argmax(1))
        counts_RK[every, arms_R] += 1
        sums_RK[every, arms_R] += rng.random(RUNS) < MEANS_K[arms_R]
        regret[step], best[step] = GAPS_K[arms_R].mean(), (GAPS_K[arms_R] == 0).mean()
    return regret.cumsum(), best


def main(seed: int = 0) -> Figure:
    """Play both rules and hold them against theory."""
    regrets, shares = {}, {}
    for rule in ("epsilon-greedy", "ucb"):
        regrets[rule], shares[rule] = play(rule, seed=seed)
    share = shares["epsilon-greedy"][-2000:].mean()
    slope, ucb_slope = (np.diff(regrets[rule])[-2000:].mean() for rule in regrets)
    ucb_early = np.diff(regrets["ucb"])[1000:3000].mean()
    print(f"epsilon-greedy: best arm {share:.3f} (theory {1 - EPSILON + EPSILON / 10:.3f}), ", end="")
    print(f"regret a step {slope:.4f} (theory {EPSILON * GAPS_K.mean():.4f})")
    gaps = GAPS_K[GAPS_K > 0]
    bound = 8 * np.log(np.arange(1, STEPS + 1)) * (1 / gaps).sum() + (1 + np.pi**2 / 3) * gaps.sum()
    ucb = regrets["ucb"][-1]
    print(f"UCB: regret {ucb:.0f} (bound {bound[-1]:.0f}), a step {ucb_early:.4f}, later {ucb_slope:.4f}")
    assert abs(share - (1 - EPSILON + EPSILON / 10)) < 0.02
    assert abs(slope - EPSILON * GAPS_K.mean()) < 0.1 * EPSILON * GAPS_K.mean()
    assert (regrets["ucb"] <= bound).all()
    assert ucb_slope < min(slope, ucb_early) / 2

    figure, (left, right) = new_figure()
    curves(left, regrets, xlabel="step", ylabel="regret", title="Regret: a line against a logarithm")
    smooth = {rule: np.convolve(line, np.ones(100) / 100, "valid") for rule, line in shares.items()}
    curves(right, smooth, goal=1 - EPSILON + EPSILON / 10, goal_label="1 - eps + eps / K", xlabel="step")
    right.set(title="Share of runs on the best arm", ylim=(0, 1))
    return figure


if __name__ == "__main__":
    command_line(main)
