"""The declarations of metrics: names, TensorBoard, and what a step's totals become."""

import math
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest
import torch

from areal_lite.record.metrics import METRICS, OFFLINE_METRICS, SHARES, Metric
from areal_lite.train.stats import COUNTS, StepTally
from areal_lite.types import Shard

TAGS = {
    "train": ("lr", "loss", "grad_norm", "step_skipped", "entropy", "kl_behav_prox", "clip_fraction",
              "behav_weight_mean", "behav_weight_masked_fraction", "tokens_trained", "tokens_filtered",
              "advantage_std", "kl_ref", "kl_coef"),
    "critic": ("value_loss", "value_explained_variance"),
    "queue": ("age_mean", "age_max", "tokens_masked_stale", "tokens_trained_stale", "trainer_wait_s"),
    "rollout": ("length_mean", "truncated_fraction", "gen_tokens_per_s", "samples_per_s", "rollout_occupancy"),
    "reward": ("reward_mean", "reward_shaped_mean", "eval_reward",
               "reward_by_source", "reward_parts", "verifier_metrics", "eval_by_source"),
    "time": ("train_s", "publish_s", "paused_s"),
    "weights": ("parity_mean_abs_logprob_diff", "parity_p99_abs_logprob_diff", "parity_max_abs_logprob_diff",
                "behav_prox_max_abs_diff_age0"),
}  # fmt: skip
"""The names in TensorBoard, which users' dashboards rely on."""


def test_tensorboard_has_the_promised_names() -> None:
    promised = {f"{group}/{name}" for group, names in TAGS.items() for name in names}
    assert promised <= {metric.tag for metric in METRICS if metric.board}
    assert {"train/loss", "train/time_s", "eval/loss", "eval/margin"} <= {metric.tag for metric in OFFLINE_METRICS}


@pytest.mark.parametrize("metrics", [METRICS, OFFLINE_METRICS, SHARES])
def test_each_metric_is_declared_once_and_divided_by_something_known(metrics: tuple[Metric, ...]) -> None:
    names = [metric.name for metric in metrics]
    assert len(set(names)) == len(names)
    assert {metric.over for metric in metrics} <= {*names, *COUNTS, ""}


def test_a_step_is_summed_over_updates_and_divided_as_declared() -> None:
    """Two updates of 2 and 1 tokens. Seen failing with the mean of the updates' means, and with 0 as that of none."""
    tally = StepTally()
    for ages, entropy, norm in (([0, 2], 1.0, 4.0), ([2], 0.5, 2.0)):
        tally.add_tokens(ages)
        tally.add(entropy=entropy, grad_norm=norm, policy_updates=1, behav_prox_max_abs_diff_age0=entropy)
    row = tally.reduce(torch.device("cpu"))
    assert (row["entropy"], row["grad_norm"], row["behav_prox_max_abs_diff_age0"]) == (0.5, 3.0, 1.0)
    assert (row["tokens_trained"], row["age_mean"], row["age_max"]) == (3, 4 / 3, 2)
    assert row["age_histogram"] == {0: 1, 2: 2}
    nothing = StepTally().reduce(torch.device("cpu"))
    assert (nothing["entropy"], nothing["tokens_trained"], nothing["step_skipped"]) == (None, 0, 0)
    assert list(row) == [metric.name for metric in METRICS if metric.reduction] + ["age_histogram", "tokens_by_quarter"]


def test_groups_whose_rewards_differ_are_counted_where_one_sample_each_the_batch_is_one() -> None:
    """A failed sample differs from nobody. Seen failing with it counted as 0, and with lone samples as groups."""

    def varied(*rewards: list[float]) -> float:
        tally, shard = StepTally(), SimpleNamespace(rewards=np.array(rewards, np.float32), rows=[])
        tally.add_shard(cast(Shard, shard))
        return tally["varied_groups_fraction"]

    assert varied([0.0, 1.0], [1.0, 1.0], [math.nan, 0.5], [math.nan, math.nan]) == 0.25
    assert (varied([0.0], [1.0]), varied([1.0], [1.0])) == (1.0, 0.0)


def test_a_figure_that_nobody_declared_is_a_mistake() -> None:
    """Seen failing with a bare KeyError."""
    with pytest.raises(ValueError, match=r"a declared metric, got 'entropi'. Fix: .* record/metrics\.py"):
        StepTally().add(entropi=1.0)
