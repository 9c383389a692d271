"""What a trainer step reports, and how it is added up over micro-batches and ranks.

The trainer adds the sums of every optimiser update that was applied to a `StepTally`; `StepTally.reduce` makes the
`StepStats` of the whole batch out of all ranks' tallies. Means are over the loss-mask tokens, or over the rows,
of all ranks; where there are none they are 0.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from areal_lite.train.distributed import max_over_ranks, sum_over_ranks
from areal_lite.types import Shard, StopReason

__all__ = ["StepStats", "StepTally"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepStats:
    """One trainer step, alike on all ranks but for the times."""

    loss: float
    """Mean of the applied updates' losses."""
    grad_norm: float
    """Mean of the applied updates' gradient norms, before clipping."""
    lr: float
    """Learning rate of the step."""
    step_skipped: int
    """Updates not applied: a gradient norm that was not finite, or no loss-mask token at all."""
    entropy: float
    """Mean entropy of the current policy at trained tokens, in nats, temperature applied."""
    kl_behav_prox: float
    """Mean of behaviour minus proximal logprob, in nats: the estimator k1 of KL(behaviour || proximal)."""
    behav_weight_mean: float
    """Mean behaviour weight; 0 counts for tokens above the cap."""
    behav_weight_masked_fraction: float
    """Share of trained tokens above the cap."""
    clip_fraction: float
    """Share of trained tokens whose ratio the clip holds back."""
    reward_mean: float
    """Mean over all scored samples of the batch."""
    length_mean: float
    """Mean completion length in tokens, every row counted."""
    truncated_fraction: float
    """Share of rows that ended at the token limit."""
    tokens_trained: int
    """Loss-mask tokens of the applied updates."""
    tokens_masked_stale: int
    """Tokens of scored samples that the staleness bound masked."""
    age_mean: float
    """Mean age of trained tokens, in trainer steps."""
    age_max: int
    """Largest age of a trained token; 0 when none was trained."""
    age_histogram: dict[int, int]
    """Trained tokens by age."""
    behav_prox_max_abs_diff_age0: float
    """Largest |behaviour - trainer| logprob difference over loss-mask tokens of age 0, the trainer's with the weights
    of the batch's version; infinite when any is not finite, 0 when there is none."""
    prepare_s: float
    """Seconds on this rank: advantages and packing."""
    proximal_s: float
    """Seconds on this rank: proximal pass."""
    update_s: float
    """Seconds on this rank: optimiser updates."""
    train_s: float
    """Seconds on this rank: the whole step."""


@dataclass(slots=True)
class StepTally:
    """Sums on one rank while a step runs."""

    token_sums: Counter[str] = field(default_factory=Counter)
    """Sums over the trained tokens, by name."""
    ages: Counter[int] = field(default_factory=Counter)
    """Trained tokens by age."""
    max_age0_diff: float = 0.0
    grad_norms: list[float] = field(default_factory=list)
    """Of the applied updates; the same on all ranks."""
    num_skipped: int = 0
    """Updates not applied; the same on all ranks."""

    def add_update(self, sums: Mapping[str, float], *, ages: Sequence[int], grad_norm: float) -> None:
        """Count an applied update: sums over its loss-mask tokens on this rank, and those tokens' ages."""
        self.token_sums.update(sums)
        self.ages.update(ages)
        self.grad_norms.append(grad_norm)

    def reduce(
        self,
        shard: Shard,
        *,
        num_stale_tokens: int,
        lr: float,
        seconds: Mapping[str, float],
        device: torch.device,
    ) -> StepStats:
        """Add up all ranks' tallies; collective.

        Args:
            shard: The rank's shard.
            num_stale_tokens: Tokens of this rank's scored samples that the bound masked.
            lr: Learning rate of the step.
            seconds: The four times of `StepStats`, by field name.
            device: Of the process group's tensors.
        """
        highest = torch.tensor([max(self.ages, default=0), self.max_age0_diff], dtype=torch.float64, device=device)
        age_max, max_age0_diff = max_over_ranks(highest).tolist()
        names = ("loss", "entropy", "kl_behav_prox", "behav_weight", "behav_weight_masked", "clipped")
        local = [
            *(self.token_sums[name] for name in names),
            len(shard.rows),
            sum(row.sample.num_tokens for row in shard.rows),
            sum(row.sample.stop_reason is StopReason.LENGTH for row in shard.rows),
            num_stale_tokens,
            *(self.ages[age] for age in range(int(age_max) + 1)),
        ]
        # float64 is exact for counts up to 2**53.
        total = sum_over_ranks(torch.tensor(local, dtype=torch.float64, device=device)).tolist()
        loss, entropy, kl, weight, weight_masked, clipped, num_rows, num_tokens, num_truncated, num_stale = total[:10]
        ages = {age: int(count) for age, count in enumerate(total[10:]) if count}
        num_trained = sum(ages.values())
        return StepStats(
            loss=_mean(loss, len(self.grad_norms)),
            grad_norm=_mean(sum(self.grad_norms), len(self.grad_norms)),
            lr=lr,
            step_skipped=self.num_skipped,
            entropy=_mean(entropy, num_trained),
            kl_behav_prox=_mean(kl, num_trained),
            behav_weight_mean=_mean(weight, num_trained),
            behav_weight_masked_fraction=_mean(weight_masked, num_trained),
            clip_fraction=_mean(clipped, num_trained),
            reward_mean=_mean(float(np.nansum(shard.rewards)), int(np.count_nonzero(~np.isnan(shard.rewards)))),
            length_mean=_mean(num_tokens, num_rows),
            truncated_fraction=_mean(num_truncated, num_rows),
            tokens_trained=num_trained,
            tokens_masked_stale=int(num_stale),
            age_mean=_mean(sum(age * count for age, count in ages.items()), num_trained),
            age_max=int(age_max),
            age_histogram=ages,
            behav_prox_max_abs_diff_age0=max_age0_diff,
            prepare_s=seconds["prepare_s"],
            proximal_s=seconds["proximal_s"],
            update_s=seconds["update_s"],
            train_s=seconds["train_s"],
        )


def _mean(total: float, count: float) -> float:
    return total / count if count else 0.0
