"""Policy iteration: evaluate the policy exactly, act greedily on its values, and again until the policy stays.

On an 8x8 maze with walls and a pit (-1), where one action in ten goes astray; gamma = 0.95.

Source: Sutton & Barto §4.1-4.3.
Known answer: no cell ever gets worse from one policy to the next (policy improvement theorem), it ends after a handful
of policies, and its values are those of value iteration. The evaluation is held against the book's Figure 4.1:
-14, -20, -22 for the random walk on a 4x4 grid.
"""

from itertools import pairwise

import numpy as np
from matplotlib.figure import Figure
from plotting import command_line, new_figure, value_map
from value_iteration import value_iteration
from worlds import MAZE, World, action_values, exact_values, grid_world, soft_greedy

GAMMA = 0.95


def policy_iteration(world: World, *, gamma: float, epsilon: float = 0.0) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Return the values [S] and the best actions [S] of every policy on the way; the first goes up everywhere.

    All of them explore with probability `epsilon`; the last one is the best of all that do.
    """
    actions, values = [np.zeros(len(world.rewards_SA), dtype=int)], []
    while len(actions) < 2 or (actions[-1] != actions[-2]).any():
        policy_SA = soft_greedy(np.eye(4)[actions[-1]], epsilon=epsilon)
        values.append(exact_values(world, policy_SA, gamma=gamma))
        actions.append(action_values(world, values[-1], gamma=gamma).round(9).argmax(1))
    return values, actions[:-1]


def main() -> Figure:
    """Solve the maze by both ways and compare."""
    plain = grid_world(("+@..", "....", "....", "...+"), step=-1.0, plus=0.0, minus=0.0)
    random_S = exact_values(plain, np.full((16, 4), 0.25), gamma=1.0)
    assert abs(random_S[:8] - [0, -14, -20, -22, -14, -18, -20, -20]).max() < 1e-9

    world = grid_world(MAZE, slip=0.1, step=-0.01, plus=1.0, minus=-1.0)
    values, actions = policy_iteration(world, gamma=GAMMA)
    best_S, sweeps = value_iteration(world, gamma=GAMMA)
    worst = min((after - before).min() for before, after in pairwise(values))
    print(f"{len(values)} policies, {len(sweeps)} sweeps of value iteration, ", end="")
    print(f"largest difference {abs(values[-1] - best_S).max():.1e}, largest loss of a cell {-worst:.1e}")
    assert worst > -1e-9
    assert abs(values[-1] - best_S).max() < 1e-8
    assert len(values) < 20

    figure, axes = new_figure(3, width=9.6, height=3.4)
    for index, plot in zip((1, len(values) // 2, len(values) - 1), axes, strict=True):
        title = f"policy {index + 1} of {len(values)}"
        value_map(plot, world.grid(values[index]), policy=world.arrows(actions[index]), title=title)
    return figure


if __name__ == "__main__":
    command_line(main)
