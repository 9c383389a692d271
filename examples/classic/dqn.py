"""DQN: Q-learning with a network, on steps drawn from a memory, towards a frozen copy of itself.

`y = r + gamma * max_b Q_frozen(s', b)`, with 0 in place of the maximum after an end. Both tricks of the paper are here:
replay (steps in random order) and the frozen copy, renewed now and then. The world is the 8x8 maze of
`policy_iteration.py`; the network sees a cell as its row and its column (16 inputs), so it must make cells up from
parts.

Source: arXiv 1312.5602 algorithm 1; Mnih et al. (2015) for the frozen copy; Sutton & Barto §16.5.
Known answer: the optimal Q by policy iteration. The greedy policy's exact value at the start is the optimum's, and Q is
close in every cell.
"""

import numpy as np
import torch
from learner import begin, network
from matplotlib.figure import Figure
from plotting import command_line, curves, new_figure, value_map
from policy_iteration import policy_iteration
from torch import nn
from worlds import MAZE, World, action_values, exact_values, grid_world, soft_greedy

UPDATES, WALKERS, BATCH, RENEW, GAMMA, RATE = 4000, 16, 128, 50, 0.95, 2e-3


class Walkers:
    """Some walkers in a world, and the memory of all their steps: state, action, reward, next state."""

    def __init__(self, world: World, *, rng: np.random.Generator) -> None:
        self.world, self.rng, self.count = world, rng, 0
        self.places = np.full(WALKERS, world.start)
        self.memory = np.zeros((UPDATES * WALKERS, 4))

    def step(self, Q: np.ndarray, *, epsilon: float) -> None:
        """Take and remember one step each, exploring with probability `epsilon`; after an end, start anywhere."""
        explore = self.rng.random(WALKERS) < epsilon
        actions = np.where(explore, self.rng.integers(4, size=WALKERS), Q[self.places].argmax(1))
        chances = self.world.chances_SAS[self.places, actions].cumsum(1)[:, :-1]
        after = (self.rng.random((WALKERS, 1)) > chances).sum(1)
        rewards = self.world.rewards_SA[self.places, actions]
        self.memory[self.count : self.count + WALKERS] = np.stack([self.places, actions, rewards, after], axis=1)
        self.count += WALKERS
        anywhere = self.rng.choice(np.flatnonzero(~(self.world.walls_S | self.world.final_S)), size=WALKERS)
        lifted = self.rng.random(WALKERS) < 0.05  # now and then from the middle of the way too: all cells are seen
        self.places = np.where(self.world.final_S[after] | lifted, anywhere, after)

    def draw(self) -> tuple[torch.Tensor, ...]:
        """Return a random batch of remembered steps."""
        states, actions, rewards, after = self.memory[self.rng.integers(self.count, size=BATCH)].T
        whole = (torch.from_numpy(part.astype(np.int64)) for part in (states, actions, after))
        return *whole, torch.from_numpy(rewards).float()


def main(seed: int = 0) -> Figure:
    """Learn the maze and compare with the exact Q."""
    begin(seed)
    world = grid_world(MAZE, slip=0.1, step=-0.01, plus=1.0, minus=-1.0)
    walkers, final_S = Walkers(world, rng=np.random.default_rng(seed)), torch.from_numpy(world.final_S)
    inputs_SI = torch.cat([torch.eye(8).repeat_interleave(8, 0), torch.eye(8).repeat(8, 1)], dim=1)
    q, frozen, reached = network(16, 128, 128, 4), network(16, 128, 128, 4), []
    optimiser = torch.optim.Adam(q.parameters(), lr=RATE)
    for update in range(UPDATES):
        if update % RENEW == 0:
            frozen.load_state_dict(q.state_dict())
            with torch.no_grad():
                Q, targets_S = q(inputs_SI).numpy(), frozen(inputs_SI).max(-1).values.masked_fill(final_S, 0.0)
            reached.append(exact_values(world, soft_greedy(Q), gamma=GAMMA)[world.start])
        optimiser.param_groups[0]["lr"] = RATE * (1 - update / UPDATES)  # the best actions lie close together
        walkers.step(Q, epsilon=max(0.2, 1 - 2 * update / UPDATES))
        states, actions, after, rewards = walkers.draw()
        guesses = q(inputs_SI[states]).gather(1, actions[:, None])[:, 0]
        loss = nn.functional.smooth_l1_loss(guesses, rewards + GAMMA * targets_S[after])
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    Q = q(inputs_SI).detach().numpy()
    best_S = policy_iteration(world, gamma=GAMMA)[0][-1]
    best_SA, value_S = action_values(world, best_S, gamma=GAMMA), exact_values(world, soft_greedy(Q), gamma=GAMMA)
    error = abs(Q - best_SA)[~(world.walls_S | world.final_S)].mean()
    print(f"greedy policy: value of the start {value_S[world.start]:.4f} (optimum {best_S[world.start]:.4f}); ", end="")
    print(f"Q off by {error:.3f} in the mean")
    assert value_S[world.start] > 0.97 * best_S[world.start]
    assert error < 0.05

    figure, (left, middle, right) = new_figure(3, width=9.6, height=3.4)
    value_map(
        left,
        world.grid(np.where(world.final_S, 0.0, Q.max(1))),
        policy=world.arrows(Q.argmax(1)),
        title="Largest Q of the network",
        text=None,
    )
    value_map(middle, world.grid(best_S), policy=world.arrows(best_SA.argmax(1)), title="Optimum", text=None)
    x = [RENEW * index for index in range(len(reached))]
    curves(
        right, {"greedy policy, exact": reached}, x=x, goal=best_S[world.start], goal_label="optimum", xlabel="update"
    )
    right.set(title="Value of the start")
    return figure


if __name__ == "__main__":
    command_line(main)
