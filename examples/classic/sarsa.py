"""SARSA: learn the value of the policy that acts, exploration included (on-policy).

`Q(s, a) += rate * (r + gamma * Q(s', a') - Q(s, a))` with the action a' that is taken next; the only difference to
`q_learning.py`, on the same cliff. A walker that stumbles one step in ten learns to keep away from the edge.

Source: Sutton & Barto §6.4, Example 6.6.
Known answer: a safer path (return -15 or -17 instead of -13) that earns more while exploring. How much more the best
policy of those that explore could earn is computed exactly (policy iteration within the epsilon-soft policies).
"""

import numpy as np
from matplotlib.figure import Figure
from plotting import command_line, curves, new_figure, value_map
from policy_iteration import policy_iteration
from q_learning import EPSILON, cliff, learn
from worlds import exact_values, path, soft_greedy


def main(seed: int = 0) -> Figure:
    """Learn on the cliff by both rules and compare what they earn while exploring, exactly."""
    world = cliff()
    edge = set(range(24, 36))  # the row above the cliff
    earned, shown, lines = {}, {}, {}
    for name, on_policy, rate in (("SARSA", True, 0.1), ("Q-learning", False, 0.5)):
        Q, returns = learn(world, on_policy=on_policy, episodes=5000, rate=rate, seed=seed)
        earned[name] = float(exact_values(world, soft_greedy(Q, epsilon=EPSILON), gamma=1.0)[world.start])
        cells = path(world, Q.argmax(1))
        lines[name], shown[name] = np.convolve(returns, np.ones(50) / 50, "valid"), (Q, cells)
        print(f"{name}: {len(cells) - 1} steps, {len(edge & set(cells))} of them on the edge; earns {earned[name]:.1f}")
    values, _ = policy_iteration(world, gamma=1.0, epsilon=EPSILON)
    best = float(values[-1][world.start])
    print(f"the best that can be earned while exploring: {best:.1f}")
    Q, cells = shown["SARSA"]
    assert len(edge & set(cells)) <= 2  # the way down to the goal, and the start
    assert len(cells) - 1 in (15, 17)
    assert earned["Q-learning"] < best - 10
    assert earned["SARSA"] > best - 5

    figure, (left, right) = new_figure(width=9.6)
    arrows = np.where(np.isin(np.arange(48), cells), Q.argmax(1), -1)
    value_map(left, world.grid(Q.max(1)), policy=world.arrows(arrows), title="Largest Q, greedy path", text="{:.0f}")
    curves(right, lines, goal=best, goal_label="best while exploring", xlabel="episode", ylim=(-120, 0))
    right.set(title="Return while exploring")
    return figure


if __name__ == "__main__":
    command_line(main)
