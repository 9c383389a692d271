"""The loop that people write: transformers, PyTorch's AdamW, and rows padded to the longest of a micro-batch.

`bench_train.py` compares the trainer with it. It computes the same gradients of the same objective, decoupled
PPO, and takes nothing from `areal_lite.train` or `areal_lite.algo`.

Shape letters: `B` rows and `S` padded columns of a micro-batch, `V` vocabulary.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM

from areal_lite.config.recipe import Config
from areal_lite.types import Row, Shard

_Batch = dict[str, Tensor]
"""A micro-batch: `input_ids` and `attention_mask` [B, S]; with a place for each token but the first, [B, S - 1], `mask`
(1.0 at completion tokens), `behaviour` and, where it was computed, `proximal`; and `advantages` [B, 1]."""


class PaddedLoop:
    """A policy and its optimiser."""

    def __init__(self, config: Config, model_folder: str) -> None:
        """Load the model of a Hugging Face folder; `bench_train.check_recipe` refuses recipes that do not fit."""
        self._config = config
        self.model: Any = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32).train()
        settings = config.trainer
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(),
            lr=settings.lr,
            betas=(0.9, 0.95),
            weight_decay=settings.weight_decay,
        )

    def train_step(self, shard: Shard, *, rows_per_pass: int) -> dict[str, Any]:
        """Train one batch; return its completion tokens and the mean norm of its updates' gradients."""
        rewards = torch.tensor(shard.rewards)
        advantages = (rewards - rewards.mean(dim=1, keepdim=True)) / (rewards.std(dim=1, keepdim=True) + 1e-6)
        minibatches = [
            list(_micro_batches([row for row in shard.rows if row.minibatch == number], advantages, rows_per_pass))
            for number in range(self._config.trainer.minibatches)
        ]
        if self._config.objective.proximal == "recompute":
            with torch.no_grad():
                for batch in (batch for minibatch in minibatches for batch in minibatch):
                    batch["proximal"] = self._logprobs(batch)
        norms = [self._update(minibatch) for minibatch in minibatches]
        tokens = sum(row.sample.num_tokens for row in shard.rows)
        return {"tokens_trained": tokens, "grad_norm": sum(norms) / len(norms)}

    def _update(self, minibatch: Sequence[_Batch]) -> float:
        num_tokens = sum(float(batch["mask"].sum()) for batch in minibatch)
        for batch in minibatch:
            (self._loss(batch) / num_tokens).backward()  # type: ignore[no-untyped-call]
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self._config.trainer.max_grad_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(norm)

    def _loss(self, batch: _Batch) -> Tensor:
        objective, current, advantages = self._config.objective, self._logprobs(batch), batch["advantages"]
        proximal = batch["behaviour"] if objective.proximal == "behaviour" else batch.get("proximal", current.detach())
        ratio = torch.exp(current - proximal)
        low = 0.0 if objective.clip_low is None else 1 - objective.clip_low
        high = torch.inf if objective.clip_high is None else 1 + objective.clip_high
        surrogate = torch.min(ratio * advantages, ratio.clamp(low, high) * advantages)
        weight = torch.exp(proximal - batch["behaviour"])
        weight = torch.where(weight <= objective.behaviour_weight_cap, weight, 0.0)
        return -(weight * surrogate * batch["mask"]).sum()

    def _logprobs(self, batch: _Batch) -> Tensor:
        inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
        logits = self.model(**inputs, use_cache=False).logits
        logprobs = torch.log_softmax(logits[:, :-1] / self._config.rollout.temperature, dim=-1)
        return logprobs.gather(-1, batch["input_ids"][:, 1:, None]).squeeze(-1)


def _micro_batches(rows: Sequence[Row], advantages: Tensor, rows_per_pass: int) -> Iterator[_Batch]:
    for start in range(0, len(rows), rows_per_pass):
        chosen = [_tensors(row, advantages) for row in rows[start : start + rows_per_pass]]
        yield {name: pad_sequence([one[name] for one in chosen], batch_first=True) for name in chosen[0]}


def _tensors(row: Row, advantages: Tensor) -> dict[str, Tensor]:
    given, sample = torch.zeros(len(row.prompt_token_ids) - 1), row.sample
    input_ids = torch.tensor([*row.prompt_token_ids, *sample.token_ids.tolist()])
    return {
        "input_ids": input_ids,
        "attention_mask": torch.ones_like(input_ids),
        "mask": torch.cat([given, torch.ones(sample.num_tokens)]),
        "behaviour": torch.cat([given, torch.tensor(sample.logprobs)]),
        "advantages": advantages[row.group_index, row.sample_index].reshape(1),
    }
