"""Value iteration: apply Bellman's optimality equation until nothing changes.

`V(s) <- max_a [r(s, a) + gamma * sum_s' p(s'|s, a) V(s')]` on Russell & Norvig's 4x3 world: actions go astray one time
in five, a step costs 0.04, the ends pay +1 and -1, gamma = 1.

Source: Sutton & Barto §4.4; the world and its values: Russell & Norvig, chapter "Making Complex Decisions".
Known answer: the published table (0.812, 0.868, 0.918 / 0.762, 0.660 / 0.705, 0.655, 0.611, 0.388), and the exact
values of the policy found, a linear system.
"""

import numpy as np
from matplotlib.figure import Figure
from plotting import command_line, curves, new_figure, value_map
from worlds import SMALL, World, action_values, exact_values, grid_world, soft_greedy

PUBLISHED = [0.812, 0.868, 0.918, 0.762, 0.660, 0.705, 0.655, 0.611, 0.388]


def value_iteration(world: World, *, gamma: float, tolerance: float = 1e-10) -> tuple[np.ndarray, list[float]]:
    """Return the optimal values [S] and the largest change of each sweep."""
    values_S, changes = np.zeros(len(world.rewards_SA)), [1.0]
    while changes[-1] > tolerance:
        new_S = action_values(world, values_S, gamma=gamma).max(1)
        changes.append(float(abs(new_S - values_S).max()))
        values_S = new_S
    return values_S, changes[1:]


def main() -> Figure:
    """Solve the 4x3 world and compare with the book."""
    world = grid_world(SMALL, slip=0.2, step=-0.04, plus=1.0, minus=-1.0)
    values_S, changes = value_iteration(world, gamma=1.0)
    found = values_S[~(world.walls_S | world.final_S)]
    print(f"values {found.round(3)}, {len(changes)} sweeps\n   book {np.array(PUBLISHED)}")
    values_SA = action_values(world, values_S, gamma=1.0)
    assert abs(found - PUBLISHED).max() < 6e-4
    assert abs(exact_values(world, soft_greedy(values_SA), gamma=1.0) - values_S).max() < 1e-8

    figure, (left, right) = new_figure()
    shown_S = values_S + np.array([1.0 if cell == "+" else -1.0 if cell == "-" else 0.0 for cell in "".join(SMALL)])
    value_map(left, world.grid(shown_S), policy=world.arrows(values_SA.argmax(1)), title="Optimal values and actions")
    curves(right, {"largest change": changes}, yscale="log", xlabel="sweep", title="It contracts")
    return figure


if __name__ == "__main__":
    command_line(main)
