"""A rank's shard of a batch as tensors: its rows, their micro-batches, and what is known of every completion token.

Shape letters: `N` groups of the batch, `G` samples of a group, `B` rows and `T` completion tokens of the shard, in the
order of `micro_batch.py`.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from areal_lite.algo.advantages import kept_samples
from areal_lite.config.recipe import Config
from areal_lite.sample_queue.staleness import age_limit, own_mask, token_ages, trainable_mask
from areal_lite.train.micro_batch import MicroBatch, TokenRows, split_micro_batches
from areal_lite.types import Row, Sample, Shard, StopReason


@dataclass(slots=True, kw_only=True)
class Tokens:
    """Facts about the completion tokens of a shard, or of one of its micro-batches; [T] each."""

    rows_T: Tensor
    """int64, the row of the shard."""
    ages_T: Tensor
    """int32 trainer steps; -1 where given."""
    own_T: Tensor
    """Booleans: produced by the model, not given by an environment."""
    step_rewards_T: Tensor | None
    """float64, the part of the total reward that was given for steps, at the tokens they end with; None on all ranks
    when no sample of the whole batch has any."""
    steps_before_T: Tensor
    """int64, how many steps of its sample were rewarded before each token."""
    loss_mask_T: Tensor
    """Booleans: age within the bound (any under `queue.on_stale: keep`), and a sample that is scored and not filtered
    out."""
    stale_T: Tensor
    """Booleans: the same, but of age over eta."""
    behaviour_logprobs_T: Tensor
    """float32 nats, as the engine reported them."""

    proximal_logprobs_T: Tensor
    """float32 nats; the behaviour policy's until `score_batch`, or the first update, fills them in."""
    reference_logprobs_T: Tensor | None = None
    """float32 nats under the reference model, from `score_batch`; None without a KL term."""
    values_T: Tensor | None = None
    """float32, the critic's value of the state before each token, from `score_batch`; None without a critic."""
    advantages_T: Tensor
    """float32; 0 until `batch_advantages`."""
    targets_T: Tensor | None = None
    """float32, what the critic learns, from `batch_advantages`; None without a critic."""
    kept_T: Tensor
    """Booleans: loss-mask tokens that the behaviour filter leaves; all until `filter_tokens`."""
    weights_T: Tensor
    """float32 weight of each token in the loss of its update, divided by that update's denominator; 0 until
    `weigh_tokens`."""

    @classmethod
    def from_rows(cls, rows: TokenRows, shard: Shard, *, config: Config, device: torch.device) -> "Tokens":
        """Lay out the shard's completion tokens, and decide which of them train, for whole groups."""
        samples, version, eta = [row.sample for row in shard.rows], shard.version, config.queue.max_staleness
        limit = age_limit(eta, on_stale=config.queue.on_stale)

        def join(of: Callable[[Sample], npt.NDArray[Any]], kind: torch.dtype) -> Tensor:
            # Booleans are promoted to any other kind.
            return torch.tensor(np.concatenate([np.empty(0, np.bool_), *map(of, samples)]), dtype=kind).to(device)

        def is_young(sample: Sample) -> npt.NDArray[np.bool_]:
            return trainable_mask(sample.spans, version=version, max_staleness=limit)

        logprobs_T = join(lambda sample: sample.logprobs, torch.float32)
        trains_T = torch.tensor(rows.spread(_training_rows(shard, config))).to(device)
        loss_mask_T = trains_T & join(is_young, torch.bool)
        ages_T = join(lambda sample: token_ages(sample.spans, version=version), torch.int32)
        return cls(
            rows_T=torch.tensor(rows.spread(np.arange(len(rows)))).to(device),
            ages_T=ages_T,
            own_T=join(lambda sample: own_mask(sample.spans), torch.bool),
            step_rewards_T=join(lambda sample: _steps(sample)[0], torch.float64) if shard.has_step_rewards else None,
            steps_before_T=join(lambda sample: _steps(sample)[1], torch.int64),
            loss_mask_T=loss_mask_T,
            stale_T=trains_T & (ages_T > eta),
            behaviour_logprobs_T=logprobs_T,
            proximal_logprobs_T=logprobs_T.clone(),
            advantages_T=torch.zeros_like(logprobs_T),
            kept_T=loss_mask_T.clone(),
            weights_T=torch.zeros_like(logprobs_T),
        )

    def at(self, places_T: Tensor) -> "Tokens":
        """Return the same facts about the tokens at these places."""
        known = {field.name: getattr(self, field.name) for field in fields(self)}
        chosen: dict[str, Any] = {name: None if value is None else value[places_T] for name, value in known.items()}
        return Tokens(**chosen)


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyBatch:
    """The rows of a shard, their micro-batches, rewards and tokens."""

    updates: list[list[MicroBatch]]
    """The micro-batches of each optimiser update, equally many on every rank."""
    tokens: Tokens
    rewards_NG: Tensor
    """[N, G] float64 total rewards of the whole batch, as the verifier gave them; NaN = unscored."""
    groups_B: Tensor
    """[B] int64, the row of `rewards_NG`."""
    samples_B: Tensor
    """[B] int64, the column of `rewards_NG`."""
    firsts_B: Tensor
    """[B] booleans: not a branch, so the row represents its rollout in its group."""
    lengths_B: Tensor
    """[B] int64 completion tokens."""
    limits_B: Tensor
    """[B] int64 the most completion tokens that each may have."""

    @property
    def micro_batches(self) -> list[MicroBatch]:
        """Those of all updates."""
        return list(chain.from_iterable(self.updates))

    @classmethod
    def from_shard(cls, shard: Shard, *, config: Config, device: torch.device) -> "PolicyBatch":
        """Build the micro-batches and tokens of the shard's own rows; collective."""
        pairs = ((row.prompt_token_ids, row.sample.token_ids) for row in shard.rows)
        rows = TokenRows(pairs, [row.sample.routes for row in shard.rows] if config.rollout.replay_routes else None)
        minibatches = [
            [index for index, row in enumerate(shard.rows) if row.minibatch == number]
            for number in range(config.trainer.minibatches)
        ]
        return cls(
            updates=split_micro_batches(rows, minibatches, device=device, **config.trainer.micro_batches),
            tokens=Tokens.from_rows(rows, shard, config=config, device=device),
            rewards_NG=torch.tensor(shard.rewards, dtype=torch.float64).to(device),
            groups_B=torch.tensor([row.group_index for row in shard.rows], dtype=torch.int64).to(device),
            samples_B=torch.tensor([row.sample_index for row in shard.rows], dtype=torch.int64).to(device),
            firsts_B=torch.tensor([not row.is_branch for row in shard.rows], dtype=torch.bool).to(device),
            lengths_B=torch.tensor(rows.output_lengths, dtype=torch.int64).to(device),
            limits_B=torch.tensor([_limit(row, config) for row in shard.rows], dtype=torch.int64).to(device),
        )


def described(value: object) -> str:
    """Describe, for an error message, a result that should be another kind of tensor."""
    if not isinstance(value, Tensor):
        return type(value).__name__
    return f"{value.dtype} of shape {tuple(value.shape)}" + ("" if value.isfinite().all() else ", not all finite")


def _limit(row: Row, config: Config) -> int:
    if row.sample.prompt_ids:  # of an agent, whose `max_new_tokens` is that of one call
        return config.model.max_context - len(row.prompt_token_ids)
    return row.max_new_tokens or config.rollout.max_new_tokens


def _training_rows(shard: Shard, config: Config) -> npt.NDArray[np.bool_]:
    """Return which rows train, [B]: scored, kept by the sample filter, and not cut off where that counts."""
    objective = config.objective
    kept_NG = kept_samples(torch.tensor(shard.rewards), sample_filter=objective.sample_filter).numpy()
    kept = [
        kept_NG[row.group_index, row.sample_index]
        and not (objective.mask_truncated and row.sample.stop_reason is StopReason.LENGTH)
        for row in shard.rows
    ]
    return np.array(kept, np.bool_)


def _steps(sample: Sample) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.int64]]:
    """Return what the step that ends with each token earned, and how many steps ended before it, [T] each.

    A step that ends inside an environment's reply counts for the model's token before it.
    """
    own = np.flatnonzero(own_mask(sample.spans))
    earned, ended = np.zeros(sample.num_tokens), np.zeros(sample.num_tokens, np.int64)
    for step in sample.step_rewards:
        token = own[max(int(np.searchsorted(own, step.token, side="right")) - 1, 0)]
        earned[token] += step.value
        ended[token] += 1
    return earned, ended.cumsum() - ended
