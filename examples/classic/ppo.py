"""PPO on CartPole-v1: several passes over the same steps, with a clip that takes away the reason to go far.

Everything that counts is the project's: `gae`, `policy_loss` (ratio, clipped at 0.2), `value_loss`, `entropy_bonus` and
the k3 estimate of how far an update went. The same functions train language models in `areal_lite/train/objective.py`;
there a step is a token.

Source: arXiv 1707.06347 eqs. 7, 9 and 11; arXiv 1506.02438 eq. 16.
Known answer: a mean return of at least 475 (of 500) over fresh episodes, gymnasium's threshold for this task.
"""

import torch
from learner import SOLVED, CartPoles, Steps, begin, evaluate, greedy, logprobs_of, network, plain
from matplotlib.figure import Figure
from plotting import command_line, curves, new_figure
from torch import Tensor, nn

from areal_lite.algo.advantages import gae
from areal_lite.algo.kl import kl_estimate
from areal_lite.algo.losses import entropy_bonus, policy_loss, value_loss

UPDATES, ENVS, STEPS, PASSES, MINIBATCH, CLIP, RATE, GAMMA = 30, 8, 256, 4, 256, 0.2, 1e-3, 0.99


def judge(critic: nn.Module, steps: Steps) -> tuple[Tensor, Tensor, Tensor]:
    """Return the critic's values, the advantages (mean 0, std 1) and the critic's targets, all [T]."""
    with torch.no_grad():
        values_T = critic(steps.observations_T)[:, 0]
        last_values_B = torch.where(steps.failed_B, 0.0, critic(steps.last_observations_B)[:, 0])
    rewards_T = steps.rewards_T * (1 - GAMMA)  # values of at most 1: a critic starting at 0 has not far to go
    advantages_T, targets_T = gae(rewards_T, values_T=values_T, lengths_B=steps.lengths_B, gamma=GAMMA,
                                  gae_lambda=0.95, last_values_B=last_values_B)  # fmt: skip
    return values_T, (advantages_T - advantages_T.mean()) / (advantages_T.std() + 1e-8), targets_T


def update(policy: nn.Module, critic: nn.Module, optimiser: torch.optim.Optimizer, steps: Steps) -> tuple[float, float]:
    """Take some passes of minibatches over the steps; return the KL estimate and the share of clipped steps."""
    values_T, advantages_T, targets_T = judge(critic, steps)
    old_T = logprobs_of(policy(steps.observations_T), steps.actions_T).detach()
    clipped = seen = 0
    for _ in range(PASSES):
        for part in torch.randperm(len(old_T)).split(MINIBATCH):
            logits = policy(steps.observations_T[part])
            logprobs = logprobs_of(logits, steps.actions_T[part])
            arguments = plain(len(part))
            inside = {name: arguments[name] for name in ("loss_mask_T", "token_weights_T")}
            loss, sums = policy_loss(logprobs, proximal_logprobs_T=old_T[part], advantages_T=advantages_T[part],
                                     surrogate="ratio", clip_low=CLIP, clip_high=CLIP, **arguments)  # fmt: skip
            error = value_loss(critic(steps.observations_T[part])[:, 0], old_values_T=values_T[part],
                               targets_T=targets_T[part], clip=None, **inside)  # fmt: skip
            entropies = -(logits.softmax(-1) * logits.log_softmax(-1)).sum(-1)
            optimiser.zero_grad()
            (loss + 0.5 * error - 0.01 * entropy_bonus(entropies, **inside)).backward()
            nn.utils.clip_grad_norm_([*policy.parameters(), *critic.parameters()], 0.5)
            optimiser.step()
            clipped, seen = clipped + int(sums["clipped"]), seen + len(part)
    with torch.no_grad():
        new_T = logprobs_of(policy(steps.observations_T), steps.actions_T)
        moved = kl_estimate(old_T, reference_logprobs_T=new_T, estimator="k3").mean()
    return float(moved), clipped / seen


def main(seed: int = 0) -> Figure:
    """Learn CartPole and judge the greedy policy on fresh episodes."""
    begin(seed)
    policy, critic = network(4, 64, 64, 2), network(4, 64, 64, 1)
    optimiser = torch.optim.Adam([*policy.parameters(), *critic.parameters()], lr=RATE)
    poles, moves = CartPoles(ENVS, seed=seed * 1000), []
    for index in range(UPDATES):
        optimiser.param_groups[0]["lr"] = RATE * (1 - index / UPDATES)
        moves.append(update(policy, critic, optimiser, poles.play(policy, steps=STEPS)))
    score = float(evaluate(greedy(policy)).mean())
    print(f"mean return {score:.1f} over 20 fresh episodes (threshold {SOLVED}), {ENVS * STEPS * UPDATES} steps")
    assert score >= SOLVED

    figure, (left, right) = new_figure()
    curves(left, {"return": poles.returns}, goal=SOLVED, goal_label="solved", xlabel="episode", title="While learning")
    kl, clipped = zip(*moves, strict=True)
    curves(right, {"KL from the old policy": kl, "share clipped": clipped}, xlabel="update", title="The clip at work")
    return figure


if __name__ == "__main__":
    command_line(main)
