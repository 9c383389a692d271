"""TRPO on CartPole-v1: the largest step along the natural gradient that keeps the mean KL divergence below a bound.

The step solves `F x = g` by conjugate gradients, with `F` the Fisher matrix, seen only through its products with
vectors; it is scaled to `0.5 s'Fs = bound`, then halved until the KL holds and the surrogate has grown (line search).
The surrogate is the project's `policy_loss` with an open clip; advantages and critic are those of `ppo.py` (`gae`,
`value_loss`).

Source: arXiv 1502.05477 §4-6 and appendix C; arXiv 1506.02438 for the advantages.
Known answer: conjugate gradients give the solution of the dense system; the KL is below the bound after every update,
and near it for the full step; the mean return reaches gymnasium's threshold of 475.
"""

from collections.abc import Callable

import torch
from learner import SOLVED, CartPoles, Steps, begin, evaluate, greedy, logprobs_of, network, plain
from matplotlib.figure import Figure
from plotting import command_line, curves, new_figure
from ppo import judge
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from areal_lite.algo.losses import policy_loss, value_loss

UPDATES, ENVS, STEPS, BOUND, DAMPING = 40, 8, 256, 0.02, 0.01


def conjugate_gradient(product: Callable[[Tensor], Tensor], b: Tensor, *, rounds: int) -> Tensor:
    """Solve `A x = b` for a positive definite A that is only known by its product with a vector."""
    x, rest, direction = torch.zeros_like(b), b.clone(), b.clone()
    for _ in range(rounds):
        if rest.norm() < 1e-6 * b.norm():
            break
        image = product(direction)
        length = (rest @ rest) / (direction @ image)
        x, new_rest = x + length * direction, rest - length * image
        direction, rest = new_rest + (new_rest @ new_rest) / (rest @ rest) * direction, new_rest
    return x


def update(policy: nn.Module, steps: Steps, advantages_T: Tensor, *, rounds: int = 10) -> dict[str, Tensor]:
    """Move the policy; return the KL of the full and of the accepted step, and the error of the conjugate gradients."""
    parameters = list(policy.parameters())
    old_TA = policy(steps.observations_T).log_softmax(-1).detach()
    arguments = plain(len(advantages_T))

    def surrogate() -> Tensor:
        logprobs_T = logprobs_of(policy(steps.observations_T), steps.actions_T)
        return -policy_loss(logprobs_T, proximal_logprobs_T=old_TA.gather(1, steps.actions_T[:, None])[:, 0],
                            advantages_T=advantages_T, surrogate="ratio", clip_low=None, clip_high=None,
                            **arguments)[0]  # fmt: skip

    def divergence() -> Tensor:
        gaps_TA = old_TA - policy(steps.observations_T).log_softmax(-1)
        return (old_TA.exp() * gaps_TA).sum(-1).mean()

    slope = parameters_to_vector(torch.autograd.grad(divergence(), parameters, create_graph=True))

    def fisher(vector: Tensor) -> Tensor:  # the Hessian of the KL at the old policy, times a vector
        parts = torch.autograd.grad(slope @ vector, parameters, retain_graph=True)
        return parameters_to_vector(parts) + DAMPING * vector

    before = surrogate()
    gradient = parameters_to_vector(torch.autograd.grad(before, parameters))
    direction = conjugate_gradient(fisher, gradient, rounds=rounds)
    step = direction * (2 * BOUND / (direction @ fisher(direction))).sqrt()
    start, results = parameters_to_vector(parameters).detach(), {}
    for halvings in range(10):
        vector_to_parameters(start + step / 2**halvings, parameters)
        with torch.no_grad():
            results["accepted"] = divergence()
            results.setdefault("full", results["accepted"])
            if results["accepted"] <= BOUND and surrogate() > before:
                break
    else:  # not even a thousandth of the step is good: stay
        vector_to_parameters(start, parameters)
        results["accepted"] = torch.tensor(0.0)
    if rounds > 10:
        dense = torch.stack([fisher(row) for row in torch.eye(len(start))])
        exact = torch.linalg.solve(dense, gradient)
        results["error"] = (direction - exact).norm() / exact.norm()
    return results


def fit(critic: nn.Module, optimiser: torch.optim.Optimizer, steps: Steps, values_T: Tensor, targets_T: Tensor) -> None:
    """Let the critic learn the targets, four passes of minibatches."""
    for part in torch.randperm(len(values_T)).repeat(4).split(256):
        inside = {name: plain(len(part))[name] for name in ("loss_mask_T", "token_weights_T")}
        loss = value_loss(critic(steps.observations_T[part])[:, 0], old_values_T=values_T[part],
                          targets_T=targets_T[part], clip=None, **inside)  # fmt: skip
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()


def main(seed: int = 0) -> Figure:
    """Learn CartPole, checking the step every time."""
    begin(seed)
    policy, critic = network(4, 16, 2), network(4, 64, 64, 1)
    optimiser = torch.optim.Adam(critic.parameters(), lr=1e-3)
    poles, results = CartPoles(ENVS, seed=seed * 1000), []
    for index in range(UPDATES):
        steps = poles.play(policy, steps=STEPS)
        values_T, advantages_T, targets_T = judge(critic, steps)
        results.append(update(policy, steps, advantages_T, rounds=100 if index == 0 else 10))
        fit(critic, optimiser, steps, values_T, targets_T)
    full, accepted = ([float(result[name]) for result in results] for name in ("full", "accepted"))
    middle, score = sorted(full)[UPDATES // 2], float(evaluate(greedy(policy)).mean())
    print(f"conjugate gradients against the dense solution: relative error {float(results[0]['error']):.1e}")
    print(f"KL: full step {middle:.4f} in the middle, accepted at most {max(accepted):.4f} (bound {BOUND})")
    print(f"mean return {score:.1f} over 20 fresh episodes (threshold {SOLVED})")
    assert results[0]["error"] < 1e-2
    assert max(accepted) <= BOUND
    assert BOUND / 2 < middle < BOUND * 2
    assert score >= SOLVED

    figure, (left, right) = new_figure()
    curves(left, {"return": poles.returns}, goal=SOLVED, goal_label="solved", xlabel="episode", title="While learning")
    curves(right, {"accepted step": accepted, "full step": full}, goal=BOUND, goal_label="bound", xlabel="update")
    right.set(title="KL divergence of a step", ylim=(0, 2.5 * BOUND))
    return figure


if __name__ == "__main__":
    command_line(main)
