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

__all__ = ["StepFacts", "StepStats", "StepTally"]

_SUMS = (
    "loss", "entropy", "kl_behav_prox", "behav_weight", "behav_weight_masked", "clipped", "kl_ref", "value_loss",
    "ptx_loss",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class StepStats:
    """One trainer step, alike on all ranks but for the times."""

    loss: float
    """Mean of the applied policy updates' losses, KL terms and entropy bonus included, the language-model term not."""
    grad_norm: float
    """Mean of the applied policy updates' gradient norms, before clipping."""
    lr: float
    """Learning rate of the step."""
    step_skipped: int
    """Updates of policy or critic not applied: a gradient norm that was not finite, or no loss-mask token at all."""
    entropy: float
    """Mean entropy of the current policy at trained tokens, in nats, temperature applied."""
    kl_behav_prox: float
    """Mean of behaviour minus proximal logprob, in nats: the estimator k1 of KL(behaviour || proximal)."""
    behav_weight_mean: float
    """Mean behaviour weight as it counts in the loss: 0 for tokens that cap or filter take out."""
    behav_weight_masked_fraction: float
    """Share of trained tokens above the cap."""
    clip_fraction: float
    """Share of trained tokens whose ratio the clip holds back."""
    tokens_filtered: int | None
    """Loss-mask tokens of the batch that the behaviour filter takes out; None without a filter."""
    kl_ref: float | None
    """Mean of current minus reference logprob at trained tokens, in nats: the estimator k1 of KL(current || reference);
    None without a reference, or when no token was trained."""
    kl_coef: float | None
    """Its weight in this step; None without a reference."""
    proximal_kl: float | None
    """Mean KL(proximal || current) over the loss mask after the step's updates, in nats, estimated with k3; None unless
    `objective.proximal_kl_target` asks for it."""
    proximal_kl_coef: float | None
    """Its weight in this step; None without the penalty."""
    advantage_std: float
    """Standard deviation of the advantages over the loss mask, before `scale: batch_std` divides by it."""
    value_loss: float | None
    """Mean of the critic's applied updates, before `critic.coef`; None without a critic or without an update of it."""
    value_explained_variance: float | None
    """1 - var(target - value) / var(target) before the updates; None without a critic, or when targets are equal."""
    ptx_loss: float | None
    """Mean cross-entropy on the documents, in nats per token; None without a language-model term."""
    reward_mean: float
    """Mean over all scored samples of the batch, as the verifier gave it, rewards for steps included."""
    reward_shaped_mean: float
    """The same after scale, bias, clip and overlong penalty; without any of them it is `reward_mean`."""
    length_mean: float
    """Mean completion length in tokens, an environment's replies included, every row counted."""
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
    """Seconds on this rank: packing and advantages."""
    proximal_s: float
    """Seconds on this rank: passes before the updates, of policy, reference and critic."""
    update_s: float
    """Seconds on this rank: optimiser updates, and what is measured after them."""
    train_s: float
    """Seconds on this rank: the whole step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFacts:
    """What is known of a step beside its tally; alike on all ranks but for the counts and times."""

    lr: float
    num_stale_tokens: int
    """Tokens of this rank's scored samples that the bound masked."""
    num_filtered_tokens: int | None
    """Loss-mask tokens of this rank that the behaviour filter takes out; None without a filter."""
    kl_coef: float | None
    proximal_kl: float | None
    proximal_kl_coef: float | None
    advantage_std: float
    value_explained_variance: float | None
    reward_shaped_mean: float


@dataclass(slots=True)
class StepTally:
    """Sums on one rank while a step runs."""

    token_sums: dict[str, float] = field(default_factory=lambda: dict.fromkeys(_SUMS, 0.0))
    """Sums over the trained tokens, by name; losses are sums of shares."""
    ages: Counter[int] = field(default_factory=Counter)
    """Trained tokens by age."""
    max_age0_diff: float = 0.0
    grad_norms: list[float] = field(default_factory=list)
    """Of the applied policy updates; the same on all ranks."""
    num_critic_updates: int = 0
    """Applied ones; the same on all ranks."""
    num_ptx_updates: int = 0
    """Applied policy updates with a language-model term; the same on all ranks."""
    num_skipped: int = 0
    """Updates not applied; the same on all ranks."""

    def add_update(self, sums: Mapping[str, float], *, ages: Sequence[int], grad_norm: float) -> None:
        """Count an applied update: sums over its loss-mask tokens on this rank, and those tokens' ages."""
        for name, value in sums.items():
            self.token_sums[name] += value
        self.ages.update(ages)
        self.grad_norms.append(grad_norm)

    def add_ptx(self, share: float) -> None:
        """Count the language-model term of an applied update: this rank's share of its mean."""
        self.token_sums["ptx_loss"] += share
        self.num_ptx_updates += 1

    def add_critic_update(self, share: float | None) -> None:
        """Count an update of the critic: this rank's share of its loss, None when it was not applied."""
        if share is None:
            self.num_skipped += 1
            return
        self.token_sums["value_loss"] += share
        self.num_critic_updates += 1

    def reduce(
        self, shard: Shard, facts: StepFacts, *, seconds: Mapping[str, float], device: torch.device
    ) -> StepStats:
        """Add up all ranks' tallies; collective.

        Args:
            shard: The rank's shard.
            facts: Of the step.
            seconds: The four times of `StepStats`, by field name.
            device: Of the process group's tensors.
        """
        highest = torch.tensor([max(self.ages, default=0), self.max_age0_diff], dtype=torch.float64, device=device)
        age_max, max_age0_diff = max_over_ranks(highest).tolist()
        counts = {
            "rows": len(shard.rows),
            "tokens": sum(row.sample.num_tokens for row in shard.rows),
            "truncated": sum(row.sample.stop_reason is StopReason.LENGTH for row in shard.rows),
            "stale": facts.num_stale_tokens,
            "filtered": facts.num_filtered_tokens or 0,
        }
        local: dict[str, float] = {name: self.token_sums[name] for name in _SUMS} | counts
        local |= {str(age): self.ages[age] for age in range(int(age_max) + 1)}
        # float64 is exact for counts up to 2**53.
        sums = sum_over_ranks(torch.tensor(list(local.values()), dtype=torch.float64, device=device)).tolist()
        total = dict(zip(local, sums, strict=True))
        ages = {age: int(total[str(age)]) for age in range(int(age_max) + 1) if total[str(age)]}
        num_trained, num_updates = sum(ages.values()), len(self.grad_norms)
        return StepStats(
            loss=_mean(total["loss"], num_updates),
            grad_norm=_mean(sum(self.grad_norms), num_updates),
            lr=facts.lr,
            step_skipped=self.num_skipped,
            entropy=_mean(total["entropy"], num_trained),
            kl_behav_prox=_mean(total["kl_behav_prox"], num_trained),
            behav_weight_mean=_mean(total["behav_weight"], num_trained),
            behav_weight_masked_fraction=_mean(total["behav_weight_masked"], num_trained),
            clip_fraction=_mean(total["clipped"], num_trained),
            tokens_filtered=None if facts.num_filtered_tokens is None else int(total["filtered"]),
            kl_ref=None if facts.kl_coef is None or not num_trained else total["kl_ref"] / num_trained,
            kl_coef=facts.kl_coef,
            proximal_kl=facts.proximal_kl,
            proximal_kl_coef=facts.proximal_kl_coef,
            advantage_std=facts.advantage_std,
            value_loss=total["value_loss"] / self.num_critic_updates if self.num_critic_updates else None,
            value_explained_variance=facts.value_explained_variance,
            ptx_loss=total["ptx_loss"] / self.num_ptx_updates if self.num_ptx_updates else None,
            reward_mean=_mean(float(np.nansum(shard.rewards)), int(np.count_nonzero(~np.isnan(shard.rewards)))),
            reward_shaped_mean=facts.reward_shaped_mean,
            length_mean=_mean(total["tokens"], total["rows"]),
            truncated_fraction=_mean(total["truncated"], total["rows"]),
            tokens_trained=num_trained,
            tokens_masked_stale=int(total["stale"]),
            age_mean=_mean(sum(age * count for age, count in ages.items()), num_trained),
            age_max=int(age_max),
            age_histogram=ages,
            behav_prox_max_abs_diff_age0=max_age0_diff,
            **seconds,
        )


def _mean(total: float, count: float) -> float:
    return total / count if count else 0.0
