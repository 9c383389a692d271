"""A rank's shard of a taken batch as flat tensors: one value per completion token. Called by the trainer.

Shape letters: `N` groups of the batch, `G` samples of a group, `T` completion tokens of the shard, in the
flat order of `micro_batch.py`.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from areal_lite.algo.advantages import group_normalised_advantages
from areal_lite.sample_queue.staleness import token_ages, trainable_mask
from areal_lite.train.micro_batch import TokenRows
from areal_lite.types import Row, Shard

__all__ = ["PolicyBatch"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyBatch:
    """What the objective needs to know of every completion token."""

    rows: TokenRows
    minibatches: tuple[tuple[int, ...], ...]
    """The rows of each optimiser update."""
    token_ids_T: Tensor
    """[T] int64."""
    behaviour_logprobs_T: Tensor
    """[T] float32 nats, as the engine reported them."""
    advantages_T: Tensor
    """[T] float32, the sample's advantage on each of its tokens."""
    ages_T: Tensor
    """[T] int32 trainer steps."""
    loss_mask_T: Tensor
    """[T] booleans: age within the bound, and the sample scored."""
    num_stale_tokens: int
    """Tokens of scored samples that the bound masks."""

    @classmethod
    def from_shard(
        cls, shard: Shard, *, max_staleness: int, num_minibatches: int, device: torch.device
    ) -> "PolicyBatch":
        """Compute advantages on whole groups, and lay out the shard's own rows.

        Args:
            shard: From the sample queue.
            max_staleness: eta, the largest age that trains.
            num_minibatches: Optimiser updates of the step.
            device: Where the tensors go.
        """
        advantages_NG = group_normalised_advantages(torch.tensor(shard.rewards)).numpy()
        rows = TokenRows((row.prompt_token_ids, row.sample.token_ids) for row in shard.rows)
        groups, samples = [row.group_index for row in shard.rows], [row.sample_index for row in shard.rows]
        scored_T = rows.spread(~np.isnan(shard.rewards[groups, samples]))
        young_T = np.concatenate([np.empty(0, np.bool_), *(_young(row, shard, max_staleness) for row in shard.rows)])
        ages = [token_ages(row.sample.spans, version=shard.version) for row in shard.rows]
        logprobs = [row.sample.logprobs for row in shard.rows]
        return cls(
            rows=rows,
            minibatches=tuple(
                tuple(index for index, row in enumerate(shard.rows) if row.minibatch == minibatch)
                for minibatch in range(num_minibatches)
            ),
            token_ids_T=torch.from_numpy(rows.output_ids).to(device),
            behaviour_logprobs_T=torch.from_numpy(np.concatenate([np.empty(0, np.float32), *logprobs])).to(device),
            advantages_T=torch.from_numpy(rows.spread(advantages_NG[groups, samples])).to(device),
            ages_T=torch.from_numpy(np.concatenate([np.empty(0, np.int32), *ages])).to(device),
            loss_mask_T=torch.from_numpy(scored_T & young_T).to(device),
            num_stale_tokens=int((scored_T & ~young_T).sum()),
        )


def _young(row: Row, shard: Shard, max_staleness: int) -> npt.NDArray[np.bool_]:
    return trainable_mask(
        row.sample.spans, num_tokens=row.sample.num_tokens, version=shard.version, max_staleness=max_staleness
    )
