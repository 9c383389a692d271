"""The metrics of a trainer step: sums over its updates, then over the ranks, as `METRICS` declares them."""

import operator
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from areal_lite.algo.advantages import masked_sums, std_from_sums
from areal_lite.record.length_bias import EDGES, LENGTHS
from areal_lite.record.metrics import METRICS, Reduction
from areal_lite.train.batch import PolicyBatch, Tokens
from areal_lite.train.distributed import gather_objects, max_over_ranks, sum_over_ranks
from areal_lite.train.optimiser import Update
from areal_lite.types import Shard, StopReason

COUNTS = {
    "rows": Reduction.SUM,
    "weighted_tokens": Reduction.SUM,
    "policy_updates": Reduction.ALIKE,
    "critic_updates": Reduction.ALIKE,
}
"""Divisors of means beside the metrics; updates are those that were applied, tokens those with a weight above 0."""

_REDUCTIONS = COUNTS | {metric.name: metric.reduction for metric in METRICS if metric.reduction}
_OWN = "loss_metrics/"


def own_metric(name: str) -> str:
    """Return the name under which a tally sums a figure that a loss function returns."""
    return f"{_OWN}{name}"


class StepTally:
    """Figures of one rank while a step runs."""

    def __init__(self) -> None:
        self._values: dict[str, float | None] = {}
        self._ages: Counter[int] = Counter()
        self._quarters = torch.zeros(2, len(LENGTHS) * 4)

    def __getitem__(self, name: str) -> float:
        return self._values.get(name) or 0

    def add(self, **values: float | None) -> None:
        """Combine values with those so far, as their metrics declare; None = this step has no such figure."""
        for name, value in values.items():
            join = max if _reduction(name) is Reduction.MAX else operator.add
            self._values[name] = None if value is None else join(value, self[name])

    def add_update(self, update: Update, **counts: float) -> None:
        """Combine the figures of an update's micro-batches, as their metrics declare, and its counts.

        An update that was not applied adds its largest values, and that it was skipped; nothing else.
        """
        for name in dict.fromkeys(name for figures in update.figures for name in figures):
            values = torch.stack([figures[name] for figures in update.figures if name in figures])
            if _reduction(name) is Reduction.MAX or update.applied:
                self.add(**{name: float(values.max() if _reduction(name) is Reduction.MAX else values.sum())})
        self.add(**(counts if update.applied else {"step_skipped": 1}))

    def add_tokens(self, ages: Sequence[int]) -> None:
        """Count the loss-mask tokens of an applied update by their ages."""
        self.add(tokens_trained=len(ages), age_mean=sum(ages), age_max=max(ages, default=0))
        self._ages.update(ages)

    def add_batch(self, batch: PolicyBatch) -> None:
        """Count tokens over age, and tokens by quarter of their sample and by its length; collective."""
        tokens, device = batch.tokens, batch.lengths_B.device
        starts_B = batch.lengths_B.cumsum(0) - batch.lengths_B
        lengths_T = batch.lengths_B[tokens.rows_T]
        places_T = torch.arange(len(lengths_T), device=device) - starts_B[tokens.rows_T]
        cells_T = 4 * torch.bucketize(lengths_T, torch.tensor(EDGES, device=device)) + 4 * places_T // lengths_T
        counted = (tokens.loss_mask_T | tokens.stale_T, tokens.loss_mask_T)
        self._quarters = torch.stack([cells_T[mask_T].bincount(minlength=len(LENGTHS) * 4) for mask_T in counted])
        self.add(
            tokens_masked_stale=int((tokens.stale_T & ~tokens.loss_mask_T).sum()),
            tokens_trained_stale=int((tokens.stale_T & tokens.loss_mask_T).sum()),
            value_explained_variance=_explained_variance(tokens),
        )

    def add_shard(self, shard: Shard) -> None:
        """Count rewards, rows and lengths."""
        rewards, samples = shard.rewards, [row.sample for row in shard.rows]
        scored = int(np.count_nonzero(~np.isnan(rewards)))
        groups = rewards if rewards.shape[1] > 1 else rewards.T
        self.add(
            reward_mean=float(np.nansum(rewards)) / scored if scored else 0.0,
            varied_groups_fraction=float(np.mean(np.fmax.reduce(groups, axis=1) > np.fmin.reduce(groups, axis=1))),
            rows=len(samples),
            length_mean=sum(sample.num_tokens for sample in samples),
            truncated_fraction=sum(sample.stop_reason is StopReason.LENGTH for sample in samples),
        )

    def reduce(self, device: torch.device, *, own_loss: bool = False) -> dict[str, Any]:
        """Return the step's metrics by name, of all ranks; collective.

        Args:
            device: Of the process group's tensors.
            own_loss: The loss function may return figures under names of its own.
        """
        totals = dict(self._values)
        for reduction, over_ranks in ((Reduction.MAX, max_over_ranks), (Reduction.SUM, sum_over_ranks)):
            # All declared names, so that ranks agree on the order.
            names = [name for name, declared in _REDUCTIONS.items() if declared is reduction]
            joined = _over_ranks(over_ranks, [self[name] for name in names], device)
            for name, total in zip(names, joined, strict=True):
                if (value := self._values.get(name)) is not None:
                    totals[name] = type(value)(total)  # a count stays a whole number
        row: dict[str, Any] = {metric.name: metric.of(totals) for metric in METRICS if metric.reduction}
        if own_loss and (own := self._own_metrics(totals.get("tokens_trained"), device)):
            row["loss_metrics"] = own
        ages = range(int(totals.get("age_max") or 0) + 1)
        trained = _over_ranks(sum_over_ranks, [self._ages[age] for age in ages], device)
        quarters = np.array(_over_ranks(sum_over_ranks, self._quarters.flatten().tolist(), device), np.int64)
        by_length = quarters.reshape(2, -1, 4).swapaxes(0, 1)
        return row | {
            "age_histogram": {age: int(count) for age, count in zip(ages, trained, strict=True) if count},
            "tokens_by_quarter": {
                name: counts.tolist() for name, counts in zip(LENGTHS, by_length, strict=True) if counts.any()
            },
        }

    def _own_metrics(self, num_tokens: float | None, device: torch.device) -> dict[str, float]:
        """Return the means over trained tokens of what the loss function returned, by name; collective."""
        own = {name.removeprefix(_OWN) for name in self._values if name.startswith(_OWN)}
        names = sorted(set().union(*gather_objects(own)))
        totals = _over_ranks(sum_over_ranks, [self[own_metric(name)] for name in names], device)
        return {name: total / max(1, num_tokens or 0) for name, total in zip(names, totals, strict=True)}


def _reduction(name: str) -> Reduction:
    if name.startswith(_OWN):
        return Reduction.SUM
    if name not in _REDUCTIONS:
        raise ValueError(
            f"a step's figure must be a declared metric, got {name!r}. Fix: add a Metric({name!r}, ...) with a "
            "reduction to METRICS in record/metrics.py"
        )
    return _REDUCTIONS[name]


def _over_ranks(over_ranks: Callable[[Tensor], Tensor], values: Iterable[float], device: torch.device) -> list[float]:
    # float64 is exact for counts up to 2**53.
    found: list[float] = over_ranks(torch.tensor(list(values), dtype=torch.float64, device=device)).tolist()
    return found


def _explained_variance(tokens: Tokens) -> float | None:
    """Return `1 - var(target - value) / var(target)` over the loss mask of all ranks; collective.

    1 = the values are the targets, 0 = no better than a constant; None where the targets do not vary, and without a
    critic.
    """
    values_T, targets_T, mask_T = tokens.values_T, tokens.targets_T, tokens.loss_mask_T
    if values_T is None or targets_T is None:
        return None
    targets_3, errors_3 = sum_over_ranks(
        torch.stack([masked_sums(targets_T, mask_T), masked_sums(targets_T - values_T, mask_T)])
    )
    target_std = std_from_sums(targets_3)
    return 1.0 - (std_from_sums(errors_3) / target_std) ** 2 if target_std > 0 else None
