"""An 8x8 gridworld and its exact values by dynamic programming, for tests of returns, advantages and critics.

A move costs 0.02 and slips to either side with probability 0.1 each; walls and the border hold the walker in place.
The goal pays 1 and the pits -1; both end the episode. The policy prefers the way to the goal and is otherwise random.

Shape letters: `S` states that do not end the episode, `A` the four actions.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

MAP = ("........", "..#.....", "..#..O..", "..##....", "....#...", ".O..#.#.", "......#.", "...O...G")
MOVES = ((-1, 0), (0, 1), (1, 0), (0, -1))
PREFERENCES = (0.0, 2.0, 2.0, 0.0)
"""Logits of up, right, down and left, before a bit of noise in each state."""
GAMMA = 0.95
STEP_COST = 0.02

Array = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Gridworld:
    """The Markov decision process with a fixed policy; place S stands for the end."""

    transitions_SAS: Array
    """[S, A, S + 1] probability of each next place."""
    rewards_SAS: Array
    """[S, A, S + 1] reward of each step."""
    policy_SA: Array

    @property
    def num_states(self) -> int:
        return len(self.policy_SA)

    def values(self) -> Array:
        """Return V, [S], by policy evaluation: V <- sum over actions of pi * Q until nothing moves."""
        values_S = np.zeros(self.num_states)
        while True:
            improved_S = (self.policy_SA * self.action_values(values_S)).sum(axis=1)
            if np.abs(improved_S - values_S).max() < 1e-14:
                return improved_S
            values_S = improved_S

    def action_values(self, values_S: Array) -> Array:
        """Return Q, [S, A]: the reward of a step plus gamma times the value of where it leads."""
        future = self.rewards_SAS + GAMMA * np.append(values_S, 0.0)
        return (self.transitions_SAS * future).sum(axis=2)

    def return_deviations(self, values_S: Array) -> Array:
        """Return the standard deviation of the return from each state, [S], from E[G^2] by the same recursion."""
        squares_S = values_S**2
        for _ in range(1000):
            following = GAMMA**2 * np.append(squares_S, 0.0) + 2 * GAMMA * self.rewards_SAS * np.append(values_S, 0.0)
            squares_S = np.einsum(
                "sa,sat,sat->s", self.policy_SA, self.transitions_SAS, self.rewards_SAS**2 + following
            )
        deviations_S: Array = np.sqrt(squares_S - values_S**2)
        return deviations_S

    def chain(self) -> tuple[Array, Array]:
        """Return the policy's Markov chain: [S + 1, S + 1] transitions, the end staying itself, and [S + 1] rewards."""
        size = self.num_states + 1
        moves, rewards = np.zeros((size, size)), np.zeros(size)
        moves[:-1] = np.einsum("sa,sat->st", self.policy_SA, self.transitions_SAS)
        moves[-1, -1] = 1.0
        rewards[:-1] = np.einsum("sa,sat,sat->s", self.policy_SA, self.transitions_SAS, self.rewards_SAS)
        return moves, rewards

    def episodes(self, starts: npt.NDArray[np.int64], rng: np.random.Generator) -> list[tuple[list[int], list[float]]]:
        """Walk from each start to the end; return the states before each step, and its reward."""
        walks: list[tuple[list[int], list[float]]] = [([], []) for _ in starts]
        active, states = np.arange(len(starts)), starts
        joint = (self.policy_SA[:, :, None] * self.transitions_SAS).reshape(self.num_states, -1).cumsum(axis=1)
        rewards = self.rewards_SAS.reshape(self.num_states, -1)
        while len(active):
            drawn = (rng.random((len(active), 1)) * joint[states, -1:] > joint[states]).sum(axis=1)
            for walk, state, reward in zip(active, states, rewards[states, drawn], strict=True):
                walks[walk][0].append(int(state))
                walks[walk][1].append(float(reward))
            following = drawn % (self.num_states + 1)
            goes_on = following < self.num_states
            active, states = active[goes_on], following[goes_on]
        return walks


def make_gridworld() -> Gridworld:
    """Build the world of the map above."""
    cells = [(row, column) for row in range(8) for column in range(8) if MAP[row][column] == "."]
    place = {cell: state for state, cell in enumerate(cells)}
    transitions = np.zeros((len(cells), 4, len(cells) + 1))
    rewards = np.zeros_like(transitions)
    ending_rewards = {"G": 1.0, "O": -1.0}
    for cell, state in place.items():
        for action in range(4):
            for slip, probability in ((0, 0.8), (1, 0.1), (-1, 0.1)):
                row, column = (position + move for position, move in zip(cell, MOVES[(action + slip) % 4], strict=True))
                inside = 0 <= row < 8 and 0 <= column < 8 and MAP[row][column] != "#"
                target = place.get((row, column), len(cells)) if inside else state
                transitions[state, action, target] += probability
                # Two endings beside one state never share an action here, so that a step's reward is its target's.
                reward = ending_rewards[MAP[row][column]] if target == len(cells) else -STEP_COST
                rewards[state, action, target] = reward
    logits = np.array(PREFERENCES) + np.random.default_rng(0).normal(0, 0.3, (len(cells), 4))
    policy = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    return Gridworld(transitions_SAS=transitions, rewards_SAS=rewards, policy_SA=policy)
