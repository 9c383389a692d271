"""REINFORCE: make each action taken more likely by as much as was earned after it.

On the book's short corridor: three cells that look all the same to the policy, where the second one turns left and
right round, and every step costs 1. Going always right never arrives; a coin with the right bias is best.
The loss is the project's `policy_loss` (`weighted_likelihood`: A log pi) on its `returns_to_go`, with no baseline.

Source: Sutton & Barto §13.3, Example 13.1; Williams (1992).
Known answer: V(p) = (2p - 4) / (p (1 - p)), at best -(6 + 4 sqrt 2) = -11.66 at p(right) = 2 - sqrt 2 = 0.586; the
gradient, averaged over many episodes, is the derivative of V.
"""

import numpy as np
import torch
from learner import begin, logprobs_of, plain
from matplotlib.figure import Figure
from plotting import command_line, curves, new_figure
from torch import Tensor

from areal_lite.algo.advantages import returns_to_go
from areal_lite.algo.losses import policy_loss


def value(p: float) -> float:
    """Return the expected return from the first cell when going right with probability p."""
    return (2 * p - 4) / (p * (1 - p))


def episodes(p: float, *, count: int) -> tuple[Tensor, Tensor]:
    """Return the actions [T] (1 = right) of episodes, one after another, and the lengths [B]."""
    states, taken = torch.zeros(count, dtype=torch.int64), []
    while (states < 3).any():
        right = torch.rand(count) < p
        taken.append(torch.where(states < 3, right.long(), -1))
        moved = (states + torch.where(right == (states != 1), 1, -1)).clamp(min=0)
        states = torch.where(states < 3, moved, states)
    actions_BL = torch.stack(taken, dim=1)
    return actions_BL[actions_BL >= 0], (actions_BL >= 0).sum(1)


def gradient(logits: Tensor, *, count: int) -> tuple[Tensor, float]:
    """Return the policy gradient's estimate from `count` episodes, and their mean return."""
    p = float(logits.detach().softmax(-1)[1])
    actions_T, lengths_B = episodes(p, count=count)
    returns_T = returns_to_go(-torch.ones(len(actions_T)), lengths_B=lengths_B, gamma=1.0)
    logprobs_T = logprobs_of(logits.expand(len(actions_T), 2), actions_T)
    loss, _ = policy_loss(logprobs_T, proximal_logprobs_T=logprobs_T.detach(), advantages_T=returns_T,
                          surrogate="weighted_likelihood", clip_low=None, clip_high=None,
                          **plain(len(actions_T), denominator=count))  # fmt: skip
    return -torch.autograd.grad(loss, logits)[0], -float(lengths_B.double().mean())


def main(seed: int = 0) -> Figure:
    """Check the gradient against the derivative, then climb."""
    begin(seed)
    p = 0.3
    estimate, _ = gradient(torch.tensor([1 - p, p]).log().requires_grad_(), count=50_000)
    exact = (value(p + 1e-5) - value(p - 1e-5)) / 2e-5 * p * (1 - p)  # dV/dp * dp/dlogit
    print(f"at p = {p}: gradient estimated {float(estimate[1]):.3f}, exact {exact:.3f}")
    assert abs(float(estimate[1]) - exact) < 0.08 * exact

    logits, chances, returns = torch.tensor([2.0, 0.0]).requires_grad_(), [], []  # begins at p = 0.12
    for update in range(400):
        step, seen = gradient(logits, count=100)
        with torch.no_grad():
            logits += 0.004 / (1 + update / 200) * step
        chances.append(float(logits.detach().softmax(-1)[1]))
        returns.append(seen)
    best, late = 2 - np.sqrt(2), float(np.mean(chances[-100:]))
    print(f"p(right) {late:.3f} (optimum {best:.3f}), value {value(late):.2f} (optimum {value(best):.2f})")
    assert abs(late - best) < 0.06
    assert value(late) > value(best) - 0.3

    figure, (left, right) = new_figure()
    curves(
        left, {"p(right)": chances}, goal=best, goal_label="2 - sqrt 2", xlabel="update of 100 episodes", ylim=(0, 1)
    )
    curves(
        right, {"mean return": returns}, goal=value(best), goal_label="-(6 + 4 sqrt 2)", xlabel="update", ylim=(-60, 0)
    )
    return figure


if __name__ == "__main__":
    command_line(main)
