"""A rank's shard of a taken batch as flat tensors: one value per completion token. Called by the trainer.

Shape letters: `N` groups of the batch, `G` samples of a group, `B` rows and `T` completion tokens of the shard, in the
flat order of `micro_batch.py`.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from areal_lite.algo.advantages import kept_samples
from areal_lite.config.recipe import Config
from areal_lite.sample_queue.staleness import own_mask, token_ages, trainable_mask
from areal_lite.train.micro_batch import TokenRows
from areal_lite.types import Row, Shard, StopReason

__all__ = ["PolicyBatch"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyBatch:
    """What was sampled, how old it is, what it earned, and which of it trains."""

    rows: TokenRows
    minibatches: tuple[tuple[int, ...], ...]
    """The rows of each optimiser update."""
    rewards_NG: Tensor
    """[N, G] float64 total rewards of the whole batch, as the verifier gave them; NaN = unscored."""
    step_rewards_T: Tensor | None
    """[T] float64, the part of the total that was given for steps, at the tokens they end with; None when no sample of
    the whole batch has any, on all ranks alike."""
    groups_B: Tensor
    """[B] int64, the row of `rewards_NG`."""
    samples_B: Tensor
    """[B] int64, the column of `rewards_NG`."""
    lengths_B: Tensor
    """[B] int64 completion tokens."""
    rows_T: Tensor
    """[T] int64, the row of each token."""
    token_ids_T: Tensor
    """[T] int64."""
    behaviour_logprobs_T: Tensor
    """[T] float32 nats, as the engine reported them."""
    steps_before_T: Tensor
    """[T] int64, how many steps of its sample were rewarded before each token: where it stands on the way."""
    ages_T: Tensor
    """[T] int32 trainer steps; -1 where given."""
    own_T: Tensor
    """[T] booleans: produced by the model, not given by an environment."""
    loss_mask_T: Tensor
    """[T] booleans: age within the bound, the sample scored, and taken out by no filter."""
    num_stale_tokens: int
    """Tokens of scored samples that the bound masks."""

    @classmethod
    def from_shard(cls, shard: Shard, *, config: Config, device: torch.device) -> "PolicyBatch":
        """Lay out the shard's own rows, and decide on whole groups which of them train.

        Args:
            shard: From the sample queue.
            config: The recipe: staleness bound, minibatches, filters.
            device: Where the tensors go.
        """
        rows = TokenRows((row.prompt_token_ids, row.sample.token_ids) for row in shard.rows)
        groups, samples = [row.group_index for row in shard.rows], [row.sample_index for row in shard.rows]
        scored_T = rows.spread(~np.isnan(shard.rewards[groups, samples]))
        young = [_young(row, shard, config.queue.max_staleness) for row in shard.rows]
        young_T = np.concatenate([np.empty(0, np.bool_), *young])
        ages = [token_ages(row.sample.spans, version=shard.version) for row in shard.rows]
        own_T = np.concatenate([np.empty(0, np.bool_), *(own_mask(row.sample.spans) for row in shard.rows)])
        steps = [_steps(row) for row in shard.rows]
        logprobs = [row.sample.logprobs for row in shard.rows]

        def on_device(values: npt.ArrayLike, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.tensor(values, dtype=dtype).to(device)

        return cls(
            rows=rows,
            minibatches=tuple(
                tuple(index for index, row in enumerate(shard.rows) if row.minibatch == minibatch)
                for minibatch in range(config.trainer.minibatches)
            ),
            rewards_NG=on_device(shard.rewards, torch.float64),
            groups_B=on_device(groups),
            samples_B=on_device(samples),
            lengths_B=on_device(rows.output_lengths),
            rows_T=on_device(rows.spread(np.arange(len(rows)))),
            token_ids_T=on_device(rows.output_ids),
            behaviour_logprobs_T=on_device(np.concatenate([np.empty(0, np.float32), *logprobs]), torch.float32),
            step_rewards_T=on_device(np.concatenate([np.empty(0), *(earned for earned, _ in steps)]), torch.float64)
            if shard.has_step_rewards
            else None,
            steps_before_T=on_device(np.concatenate([np.empty(0, np.int64), *(before for _, before in steps)])),
            ages_T=on_device(np.concatenate([np.empty(0, np.int32), *ages]), torch.int32),
            own_T=on_device(own_T, torch.bool),
            loss_mask_T=on_device(young_T & rows.spread(_training_rows(shard, config)), torch.bool),
            num_stale_tokens=int((scored_T & own_T & ~young_T).sum()),
        )

    def spread(self, values_B: Tensor) -> Tensor:
        """Repeat one value per row over the row's completion tokens, [T]."""
        return values_B[self.rows_T]


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


def _young(row: Row, shard: Shard, max_staleness: int) -> npt.NDArray[np.bool_]:
    return trainable_mask(
        row.sample.spans, num_tokens=row.sample.num_tokens, version=shard.version, max_staleness=max_staleness
    )


def _steps(row: Row) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.int64]]:
    """Return what the step that ends with each token earned, and how many steps ended before it, [T] each.

    A step that ends inside an environment's reply counts for the model's token before it.
    """
    own = np.flatnonzero(own_mask(row.sample.spans))
    earned, ended = np.zeros(row.sample.num_tokens), np.zeros(row.sample.num_tokens, np.int64)
    for step in row.sample.step_rewards:
        token = own[max(int(np.searchsorted(own, step.token, side="right")) - 1, 0)]
        earned[token] += step.value
        ended[token] += 1
    return earned, ended.cumsum() - ended
