"""Actor-critic with generalised advantages, tabular: the critic says by how much an action did better than expected.

On Russell & Norvig's 4x3 world. The actor has one logit per cell and action, the critic one value per cell; advantages
and targets are the project's `gae`, the losses its `policy_loss` and `value_loss`. Walks are cut after 30 steps, and a
cut one goes on with the critic's value of the cell it stands on.

Source: Sutton & Barto §13.5; arXiv 1506.02438 eq. 16.
Known answer: the best value of the start is 0.705; the exact values of the policy learned (a linear system) say how
near it comes, and what the critic should say.
"""

import numpy as np
import torch
from learner import begin, logprobs_of, plain
from matplotlib.figure import Figure
from plotting import command_line, curves, new_figure, value_map
from torch import Tensor
from value_iteration import value_iteration
from worlds import SMALL, World, exact_values, grid_world

from areal_lite.algo.advantages import gae
from areal_lite.algo.losses import policy_loss, value_loss

UPDATES, WALKS, LIMIT, LAMBDA = 250, 32, 30, 0.9


def walks(world: World, policy_SA: np.ndarray, rng: np.random.Generator) -> tuple[Tensor, ...]:
    """Return states, actions, rewards [T] of walks, one after another, their lengths and last states [B]."""
    places = np.full(WALKS, world.start)
    rows: list[tuple[np.ndarray, ...]] = []
    for _ in range(LIMIT):
        actions = (rng.random((WALKS, 1)) > policy_SA[places].cumsum(1)[:, :3]).sum(1)
        chances = world.chances_SAS[places, actions].cumsum(1)[:, :-1]
        after = np.where(world.final_S[places], places, (rng.random((WALKS, 1)) > chances).sum(1))
        rows.append((places, actions, world.rewards_SA[places, actions]))
        places = after
    states_BL, actions_BL, rewards_BL = (np.stack(column, axis=1) for column in zip(*rows, strict=True))
    alive_BL = ~world.final_S[states_BL]
    parts = (states_BL[alive_BL], actions_BL[alive_BL], rewards_BL[alive_BL], alive_BL.sum(1), places)
    return tuple(torch.from_numpy(part) for part in parts)


def main(seed: int = 0) -> Figure:
    """Learn the world and hold both tables against exact values."""
    begin(seed)
    rng, world = np.random.default_rng(seed), grid_world(SMALL, slip=0.2, step=-0.04, plus=1.0, minus=-1.0)
    actor_SA = torch.zeros(world.rewards_SA.shape, dtype=torch.float64, requires_grad=True)
    critic_S = torch.zeros(len(actor_SA), dtype=torch.float64, requires_grad=True)
    optimiser = torch.optim.Adam([{"params": [actor_SA], "lr": 0.1}, {"params": [critic_S], "lr": 0.02}])
    final_S, start_values = torch.from_numpy(world.final_S), []
    for _ in range(UPDATES):
        policy_SA = actor_SA.detach().softmax(-1).numpy()
        start_values.append(exact_values(world, policy_SA, gamma=1.0)[world.start])
        states_T, actions_T, rewards_T, lengths_B, last_B = walks(world, policy_SA, rng)
        values_T = critic_S[states_T]
        last_values_B = torch.where(final_S[last_B], 0.0, critic_S[last_B])
        advantages_T, targets_T = gae(rewards_T, values_T=values_T, lengths_B=lengths_B, gamma=1.0, gae_lambda=LAMBDA,
                                      last_values_B=last_values_B)  # fmt: skip
        logprobs_T, arguments = logprobs_of(actor_SA[states_T], actions_T), plain(len(states_T))
        loss, _ = policy_loss(logprobs_T, proximal_logprobs_T=logprobs_T.detach(), advantages_T=advantages_T,
                              surrogate="ratio", clip_low=None, clip_high=None, **arguments)  # fmt: skip
        inside = {name: arguments[name] for name in ("loss_mask_T", "token_weights_T")}
        error = value_loss(values_T, old_values_T=values_T, targets_T=targets_T, clip=None, **inside)
        optimiser.zero_grad()
        (loss + error).backward()
        optimiser.step()
    policy_SA = actor_SA.detach().softmax(-1).numpy()
    exact_S, learned_S = exact_values(world, policy_SA, gamma=1.0), critic_S.detach().numpy()
    best = value_iteration(world, gamma=1.0)[0][world.start]
    path = [8, 4, 0, 1, 2]  # the cells of the best way, all seen often
    error = abs(learned_S - exact_S)[path].max()
    print(f"value of the start {exact_S[world.start]:.3f} (optimum {best:.3f}); critic off by {error:.3f} on the way")
    assert exact_S[world.start] > best - 0.03
    assert error < 0.1

    figure, (left, middle, right) = new_figure(3, width=9.6)
    arrows = world.arrows(policy_SA.argmax(1))
    value_map(left, world.grid(learned_S), policy=arrows, title="The critic, and the likeliest actions")
    value_map(middle, world.grid(exact_S), policy=arrows, title="Exact values of that policy")
    curves(right, {"start, exact": start_values}, goal=best, goal_label="optimum", xlabel="update", ylim=(-1, 1))
    return figure


if __name__ == "__main__":
    command_line(main)
