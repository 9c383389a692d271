"""Shared by the scripts with networks: constant arguments of the project's losses, small networks, CartPole batches.

The project's losses see tokens: here a token is a step, a row an episode or a piece of one, and as the policy that acts
is the one that learns, behaviour weights are 1 and every step counts.

Shape letters: `T` steps, one row after another, `B` rows, `E` environments side by side.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import gymnasium
import numpy as np
import torch
from torch import Tensor, nn

SOLVED = 475.0  # mean return of CartPole-v1 that gymnasium's registry calls solved (of at most 500)


def begin(seed: int) -> None:
    """Seed torch, and keep it on one thread: more only slow networks this small down."""
    torch.manual_seed(seed)
    torch.set_num_threads(1)


def plain(num_steps: int, *, denominator: int | None = None) -> dict[str, Any]:
    """Return the arguments of `policy_loss` that are constant here; the loss is divided by `denominator` (steps)."""
    ones_T = torch.ones(num_steps)
    return {
        "behaviour_weights_T": ones_T,
        "loss_mask_T": ones_T.bool(),
        "token_weights_T": ones_T / (denominator or num_steps),
        "rows_T": torch.zeros(num_steps, dtype=torch.int64),
        "num_rows": 1,
        "ratio_level": "token",
    }


def network(*sizes: int) -> nn.Sequential:
    """Return a tanh network; its last layer begins near zero, so that a policy begins near uniform."""
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(sizes):
        layers += [nn.Linear(inputs, outputs), nn.Tanh()]
    with torch.no_grad():
        layers[-2].weight.mul_(0.1)
    return nn.Sequential(*layers[:-1])


def logprobs_of(logits_TA: Tensor, actions_T: Tensor) -> Tensor:
    """Return the log-probability [T] of each action."""
    return logits_TA.log_softmax(-1).gather(-1, actions_T[:, None])[:, 0]


@dataclass(frozen=True, slots=True, kw_only=True)
class Steps:
    """The steps of `CartPoles.play`: rows end where an episode or the batch ended."""

    observations_T: Tensor  # [T, 4]
    actions_T: Tensor
    rewards_T: Tensor
    lengths_B: Tensor
    last_observations_B: Tensor  # [B, 4] after each row's last step
    failed_B: Tensor  # the pole fell: worth 0 from here; otherwise the time was up, and the value goes on


class CartPoles:
    """Some CartPole-v1 side by side, stepped by a stochastic policy."""

    def __init__(self, count: int, *, seed: int) -> None:
        self.envs = [gymnasium.make("CartPole-v1") for _ in range(count)]
        self.observations = [env.reset(seed=seed + index)[0] for index, env in enumerate(self.envs)]
        self.returns: list[float] = []  # of all episodes that ended
        self._running = [0.0] * count

    @torch.no_grad()
    def play(self, policy: nn.Module, *, steps: int) -> Steps:
        """Step every environment `steps` times with actions sampled from the policy's logits."""
        lanes: list[list[tuple[Any, ...]]] = [[] for _ in self.envs]
        for step in range(steps):
            observations_E = torch.from_numpy(np.stack(self.observations))
            actions_E = torch.multinomial(policy(observations_E).softmax(-1), 1)[:, 0].tolist()
            for lane, (env, action) in enumerate(zip(self.envs, actions_E, strict=True)):
                before = self.observations[lane]
                after, reward, failed, late, _ = env.step(action)
                lanes[lane].append((before, action, reward, after, failed, failed or late or step == steps - 1))
                self._running[lane] += float(reward)
                self.observations[lane] = after
                if failed or late:
                    self.returns.append(self._running[lane])
                    self.observations[lane], self._running[lane] = env.reset()[0], 0.0
        return _flat([row for lane in lanes for row in lane])


def _flat(rows: list[tuple[Any, ...]]) -> Steps:
    observations, actions, rewards, after, failed, ends = map(np.array, zip(*rows, strict=True))
    last = np.flatnonzero(ends)
    return Steps(
        observations_T=torch.from_numpy(observations),
        actions_T=torch.from_numpy(actions),
        rewards_T=torch.from_numpy(rewards).float(),
        lengths_B=torch.from_numpy(np.diff(last, prepend=-1)),
        last_observations_B=torch.from_numpy(after[last]),
        failed_B=torch.from_numpy(failed[last]),
    )


def evaluate(choose: Callable[[np.ndarray], np.ndarray], *, episodes: int = 20, seed: int = 10_000) -> np.ndarray:
    """Return the returns [E] of fresh CartPole episodes; `choose` maps observations [E, 4] to actions [E]."""
    envs = gymnasium.make_vec("CartPole-v1", num_envs=episodes, vectorization_mode="sync")
    observations, _ = envs.reset(seed=seed)
    returns, alive = np.zeros(episodes), np.ones(episodes, dtype=bool)
    while alive.any():  # an environment that has ended starts over, which no longer counts
        observations, rewards, failed, late, _ = envs.step(choose(observations).astype(int))
        returns += rewards * alive
        alive &= ~(failed | late)
    return returns


def greedy(policy: nn.Module) -> Callable[[np.ndarray], np.ndarray]:
    """Return the choice of the largest logit (or Q), for `evaluate`."""
    return lambda observations: policy(torch.from_numpy(observations)).argmax(-1).numpy()
