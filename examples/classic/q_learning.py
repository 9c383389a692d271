"""Q-learning: learn the value of acting greedily while behaving otherwise (off-policy).

`Q(s, a) += rate * (r + gamma * max_b Q(s', b) - Q(s, a))` on cliff walking: a step costs 1, a fall 100 and a new start.
The behaviour explores one step in ten, so falls go on, but the greedy path does not care.

Source: Sutton & Barto §6.5, Example 6.6.
Known answer: the shortest path along the edge, return -13; Q on it is that of value iteration.
"""

import numpy as np
from matplotlib.figure import Figure
from plotting import command_line, curves, new_figure, value_map
from value_iteration import value_iteration
from worlds import CLIFF, World, action_values, exact_values, grid_world, path, soft_greedy

EPSILON = 0.1


def cliff() -> World:
    """Return the book's 4x12 cliff: the world of this script and of `sarsa.py`."""
    return grid_world(CLIFF, step=-1.0, plus=0.0, minus=-100.0)


def learn(world: World, *, on_policy: bool, episodes: int, rate: float, seed: int) -> tuple[np.ndarray, list[float]]:
    """Return Q [S, A] and the return of every episode; `on_policy` puts SARSA's target in place of Q-learning's."""
    rng = np.random.default_rng(seed)
    next_SA = world.chances_SAS.argmax(2)  # nothing slips here
    Q, returns = np.zeros(world.rewards_SA.shape), []

    def choose(state: int) -> int:
        return int(rng.integers(4)) if rng.random() < EPSILON else int(Q[state].argmax())

    for episode in range(episodes):
        rate_now = rate * min(1.0, 500 / (episode + 1))  # SARSA only settles with falling steps: its target is noisy
        state, total = world.start, 0.0
        action = choose(state)
        while not world.final_S[state]:
            reward, after = world.rewards_SA[state, action], int(next_SA[state, action])
            next_action = choose(after)
            target = Q[after, next_action] if on_policy else Q[after].max()  # at an end Q stays 0
            Q[state, action] += rate_now * (reward + target - Q[state, action])
            state, action, total = after, next_action, total + reward
        returns.append(total)
    return Q, returns


def main(seed: int = 0) -> Figure:
    """Learn on the cliff and compare with the optimum."""
    world = cliff()
    Q, returns = learn(world, on_policy=False, episodes=1000, rate=0.5, seed=seed)
    actions_S, (best_S, _) = Q.argmax(1), value_iteration(world, gamma=1.0)
    best_SA, cells = action_values(world, best_S, gamma=1.0), path(world, Q.argmax(1))
    greedy_return = sum(world.rewards_SA[cell, actions_S[cell]] for cell in cells[:-1])
    error = abs(Q - best_SA)[cells[:-1], actions_S[cells[:-1]]].max()
    behaviour = exact_values(world, soft_greedy(Q, epsilon=EPSILON), gamma=1.0)[world.start]
    print(f"greedy return {greedy_return:.0f} (optimum {best_S[world.start]:.0f}), Q on the path off by {error:.1e}")
    print(f"exploring one step in ten it earns {behaviour:.1f}, exactly; seen at the end {np.mean(returns[-500:]):.1f}")
    assert greedy_return == best_S[world.start] == -13
    assert error < 1e-6

    figure, (left, right) = new_figure(width=9.6)
    arrows = np.where(np.isin(np.arange(48), cells), actions_S, -1)
    value_map(left, world.grid(Q.max(1)), policy=world.arrows(arrows), title="Largest Q, greedy path", text="{:.0f}")
    smooth = np.convolve(returns, np.ones(50) / 50, "valid")
    curves(
        right,
        {"return while exploring": smooth},
        goal=-13.0,
        goal_label="greedy path",
        xlabel="episode",
        ylim=(-120, 0),
    )
    return figure


if __name__ == "__main__":
    command_line(main)
