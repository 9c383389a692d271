"""A trainer step written a second time: token by token, in plain Python, with nothing of `areal_lite.algo`.

No padding, no micro-batches, no ranks, no flat tensors: every completion is one forward pass, every quantity a list per
row. Slow and easy to read. What a preset's loss is, test_presets.py derives; here is what stands around it: credit,
baselines, critic, optimisers, several updates.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification

from areal_lite.config.recipe import Config
from areal_lite.types import GIVEN, Row

NAN = float("nan")


def row_outputs(model: nn.Module, row: Row) -> Tensor:
    """Logits (or values) that stand before each completion token, [T, outputs]."""
    tokens = [*row.prompt_token_ids, *row.sample.token_ids.tolist()]
    return model(input_ids=torch.tensor([tokens])).logits[0, len(row.prompt_token_ids) - 1 : -1]


def row_logprobs(model: nn.Module, row: Row, temperature: float) -> Tensor:
    logprobs_TV = torch.log_softmax(row_outputs(model, row) / temperature, -1)
    return logprobs_TV[range(row.sample.num_tokens), row.sample.token_ids.tolist()]


@dataclass
class PlainRow:
    """A row with all that is known of it before the updates."""

    row: Row
    mask: list[bool]
    own: list[bool]
    """Which tokens the model produced: the time steps of the episode."""
    proximal: list[float] = field(default_factory=list)
    reference: list[float] = field(default_factory=list)
    values: list[float] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    """Per token."""
    advantages: list[float] = field(default_factory=list)
    targets: list[float] = field(default_factory=list)
    kept: list[bool] = field(default_factory=list)

    @property
    def times(self) -> list[int]:
        """The time steps of the episode."""
        return [t for t, mine in enumerate(self.own) if mine]

    def time_of(self, token: int) -> int:
        """The time step at a token, or the last one before it."""
        return max(t for t in self.times if t <= token)

    def steps_before(self, t: int) -> int:
        """How many steps were rewarded at a time before this one."""
        return sum(self.time_of(step.token) < t for step in self.row.sample.step_rewards)

    @property
    def behaviour(self) -> list[float]:
        return self.row.sample.logprobs.tolist()

    @property
    def place(self) -> tuple[int, int]:
        return self.row.group_index, self.row.sample_index

    @property
    def trained(self) -> int:
        return sum(self.mask)


class PlainTrainer:
    """Takes the same steps as `Trainer` on one rank, from the same folder."""

    def __init__(self, config: Config, model_folder: str, *, version: int) -> None:
        self.config, self.objective, self.version = config, config.objective, version
        self.model = AutoModelForCausalLM.from_pretrained(model_folder)
        self.optimizer = self._adam(self.model, config.trainer.lr)
        self.reference = AutoModelForCausalLM.from_pretrained(self.objective.reference_path or model_folder)
        self.critic: Any = AutoModelForTokenClassification.from_pretrained(model_folder, num_labels=1).eval()
        nn.init.zeros_(self.critic.score.weight)
        nn.init.zeros_(self.critic.score.bias)
        self.critic_optimizer = self._adam(self.critic, config.critic.lr)
        self.losses: list[float] = []
        self.value_losses: list[float] = []

    def step(self, rows: Sequence[Row], rewards: np.ndarray) -> None:
        """Train one batch."""
        plain = [self._plain_row(row, rewards) for row in rows]
        self._score(plain)
        self._credit(plain, rewards)
        for minibatch in range(self.config.trainer.minibatches):
            part = [p for p in plain if p.row.minibatch == minibatch]
            self._filter(part)
            self._update(self.model, self.optimizer, self._policy_loss(part), self.losses)
            if self.objective.baseline == "critic":
                self._update(self.critic, self.critic_optimizer, self._value_loss(part), self.value_losses)
        self.version += 1

    def _adam(self, model: nn.Module, lr: float) -> torch.optim.Optimizer:
        decay = self.config.trainer.weight_decay
        layers = [layer for layer in model.modules() if isinstance(layer, nn.Linear | nn.Embedding)]
        matrices = {layer.weight: None for layer in layers}
        others = [parameter for parameter in model.parameters() if parameter not in matrices]
        groups = [{"params": list(matrices), "weight_decay": decay}, {"params": others, "weight_decay": 0.0}]
        return torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95))

    def _update(self, model: nn.Module, optimizer: Any, loss: Tensor, losses: list[float]) -> None:
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(float(loss.detach()))

    def _plain_row(self, row: Row, rewards: np.ndarray) -> PlainRow:
        group, reward = rewards[row.group_index].tolist(), float(rewards[row.group_index, row.sample_index])
        scored = [r for r in group if not math.isnan(r)]
        trains = not math.isnan(reward)
        if self.objective.sample_filter == "varied_groups" and trains:
            trains = len(set(scored)) > 1
        versions = [span.version for span in row.sample.spans for _ in range(span.start, span.end)]
        own = [v != GIVEN for v in versions]
        oldest = self.version - self.config.queue.max_staleness
        return PlainRow(row, [trains and mine and v >= oldest for v, mine in zip(versions, own, strict=True)], own)

    @torch.no_grad()
    def _score(self, plain: list[PlainRow]) -> None:
        temperature = self.config.rollout.temperature
        for p in plain:
            p.proximal = row_logprobs(self.model, p.row, temperature).tolist()
            p.reference = row_logprobs(self.reference, p.row, temperature).tolist()
            p.values = row_outputs(self.critic, p.row)[:, 0].tolist()

    def _credit(self, plain: list[PlainRow], rewards: np.ndarray) -> None:
        """Shape rewards, and compare them with a baseline."""
        knobs = self.objective
        for p in plain:
            raw = float(rewards[p.place])
            shaped = knobs.reward_scale * raw + knobs.reward_bias
            if knobs.reward_clip is not None and not math.isnan(raw):
                shaped = min(max(shaped, -knobs.reward_clip), knobs.reward_clip)
            p.rewards = [0.0] * len(p.mask)
            p.rewards[-1] = 0.0 if math.isnan(raw) else shaped
            for step in p.row.sample.step_rewards:
                p.rewards[p.time_of(step.token)] += knobs.reward_scale * step.value
                p.rewards[-1] -= knobs.reward_scale * step.value
            if knobs.kl == "reward":
                assert knobs.kl_estimator == "k1"
                for t in p.times:
                    p.rewards[t] -= knobs.kl_coef * (p.proximal[t] - p.reference[t])
        if knobs.baseline == "critic":
            self._generalised(plain)
        else:
            self._compared(plain, rewards)
        if knobs.scale == "batch_std":
            inside = [a for p in plain for a, m in zip(p.advantages, p.mask, strict=True) if m]
            std = np.std(inside, ddof=1)
            for p in plain:
                p.advantages = [a / std for a in p.advantages]

    def _generalised(self, plain: list[PlainRow]) -> None:
        gamma, lam = self.objective.gamma, self.objective.gae_lambda
        for p in plain:
            after, carried, p.advantages = 0.0, 0.0, [0.0] * len(p.own)
            for t in reversed(p.times):
                carried = p.rewards[t] + gamma * after - p.values[t] + gamma * lam * carried
                after = p.values[t]
                p.advantages[t] = carried
            p.targets = [a + v for a, v in zip(p.advantages, p.values, strict=True)]
            if self.config.critic.target == "monte_carlo":
                p.targets = self._to_go(p)

    def _to_go(self, p: PlainRow) -> list[float]:
        to_go = [0.0] * len(p.own)
        for now, t in enumerate(p.times):
            later = enumerate(p.times[now:])
            to_go[t] = sum(self.objective.gamma**passed * p.rewards[k] for passed, k in later)
        return to_go

    def _compared(self, plain: list[PlainRow], rewards: np.ndarray) -> None:
        """Compare with those of the group, or the batch, who have come as far: behind as many rewarded steps."""
        reached: dict[int, np.ndarray] = {}
        for p in plain:
            for t in reversed(p.times):  # the first token of a place stays
                if not math.isnan(rewards[p.place]):
                    reached.setdefault(p.steps_before(t), np.full(rewards.shape, NAN))[p.place] = self._to_go(p)[t]
        for p in plain:
            p.advantages = [0.0] * len(p.mask)
            if math.isnan(rewards[p.place]):
                continue
            totals = reached[0][p.row.group_index]
            divisor = np.nanstd(totals, ddof=1) + 1e-6 if self.objective.scale == "group_std" else 1.0
            if self.objective.scale == "group_std" and np.nanstd(totals) == 0:
                continue
            for t in p.times:
                returns = reached[p.steps_before(t)]
                group = returns[p.row.group_index]
                others = np.delete(group, p.row.sample_index)
                is_alone = np.isnan(others).all()
                baseline = {
                    "none": 0.0,
                    "batch_mean": np.nanmean(returns),
                    "group_mean": np.nanmean(group),
                    "leave_one_out": group[p.row.sample_index] if is_alone else np.nanmean(others),
                }[self.objective.baseline]
                p.advantages[t] = (self._to_go(p)[t] - baseline) / divisor

    @torch.no_grad()
    def _filter(self, part: list[PlainRow]) -> None:
        """Of the active tokens, drop the largest squares until the mean of those that are left is small enough."""
        active: list[tuple[float, int, int]] = []
        for i, p in enumerate(part):
            p.kept = p.mask.copy()
            gaps = [a - b for a, b in zip(p.proximal, p.behaviour, strict=True)]
            if self.objective.behaviour_filter == "geometric" and p.trained:
                mean = math.exp(sum(gap for gap, m in zip(gaps, p.mask, strict=True) if m) / p.trained)
                is_near = self.objective.geometric_low <= mean <= self.objective.geometric_high
                p.kept = [m and is_near for m in p.mask]
            if self.objective.behaviour_filter == "m2po":
                now = row_logprobs(self.model, p.row, self.config.rollout.temperature).tolist()
                moves = [a - b for a, b in zip(now, p.behaviour, strict=True)]
                active += [(moves[t] ** 2, i, t) for t, m in enumerate(p.mask) if m and moves[t] * p.advantages[t] > 0]
        active.sort()
        while active and np.mean([square for square, _, _ in active]) > self.objective.m2po_threshold:
            _, i, t = active.pop()
            part[i].kept[t] = False

    def _token_weight(self, part: list[PlainRow], p: PlainRow) -> float:
        """What a token of this row weighs in the loss of its update."""
        num_rows = sum(q.trained > 0 for q in part)
        if self.objective.aggregation == "token_mean":
            return 1 / sum(q.trained for q in part)
        return {"sequence_mean": 1 / p.trained, "sequence_sum": 1.0}[self.objective.aggregation] / num_rows

    def _policy_loss(self, part: list[PlainRow]) -> Tensor:
        knobs, loss = self.objective, torch.zeros(())
        for p in part:
            if not p.trained:
                continue
            current = row_logprobs(self.model, p.row, self.config.rollout.temperature)
            for t in [t for t, m in enumerate(p.mask) if m]:
                weight = math.exp(p.proximal[t] - p.behaviour[t])
                if not p.kept[t] or weight > knobs.behaviour_weight_cap:
                    weight = 0.0
                term = -weight * self._surrogate((current[t] - p.proximal[t]).exp(), p.advantages[t])
                if knobs.kl == "loss":
                    d = current[t] - p.reference[t]
                    term = term + knobs.kl_coef * weight * ((-d).exp() - 1 + d)
                loss = loss + self._token_weight(part, p) * term
        return loss

    def _surrogate(self, ratio: Tensor, advantage: float) -> Tensor:
        knobs = self.objective
        low = 0.0 if knobs.clip_low is None else 1 - knobs.clip_low
        high = math.inf if knobs.clip_high is None else 1 + knobs.clip_high
        held = ratio.clip(low, high)
        if knobs.clip_dual is not None and advantage < 0 and ratio.item() > knobs.clip_dual:
            return ratio.detach() * 0 + knobs.clip_dual * advantage
        # Not torch.minimum: at a tie it halves the gradient between both sides, which is the same only where both move.
        return ratio * advantage if (ratio * advantage <= held * advantage).item() else held * advantage

    def _value_loss(self, part: list[PlainRow]) -> Tensor:
        loss, clip = torch.zeros(()), self.config.critic.value_clip
        for p in part:
            values = row_outputs(self.critic, p.row)[:, 0]
            for t in range(len(p.mask)):
                if p.mask[t]:
                    error = (values[t] - p.targets[t]) ** 2
                    if clip is not None:
                        held = p.values[t] + (values[t] - p.values[t]).clip(-clip, clip)
                        error = torch.maximum(error, (held - p.targets[t]) ** 2)
                    loss = loss + self._token_weight(part, p) * 0.5 * error
        return loss
