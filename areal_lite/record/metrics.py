"""Declares every figure of a run: its key in `metrics.jsonl`, how it is reduced over ranks and updates, its unit, and
where it is shown.

To add one: a declaration here, and the line that computes it: `tally.add(name=value)` in `train/trainer.py`, or, for a
sum over the tokens of a micro-batch, an entry of `sums` in `train/objective.py` (a new divisor goes into `COUNTS` of
`train/stats.py`). Rows, curves, the terminal's panel and the tables of `docs/runs.md` follow; `python docs/tables.py`
writes the last.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import KW_ONLY, dataclass
from enum import StrEnum
from functools import partial
from typing import Any, Literal


class Reduction(StrEnum):
    """How a figure is reduced over updates and ranks."""

    SUM = "sum"
    MAX = "largest"
    ALIKE = "alike on all ranks"
    """Summed over the updates, not over the ranks."""


@dataclass(frozen=True, slots=True)
class Metric:
    """One figure of a step.

    Example: `Metric("entropy", "of the policy", reduction=Reduction.SUM, over="tokens_trained")` is a mean over tokens.
    """

    name: str
    """Its key in a row."""
    about: str
    """What it is, and when it is missing."""
    unit: str = ""
    """Of the value, as on its axis."""
    _: KW_ONLY
    reduction: Reduction | None = None
    """Of the trainer's totals; None = measured by the controller or the queue."""
    over: str = ""
    """What the total is divided by: another metric, or a count of `train/stats.py`."""
    empty: float | None = None
    """The value of a step in which nothing was added, or with nothing to divide by."""
    board: str = ""
    """Its group in TensorBoard; empty = not shown. Of a mapping every entry is shown."""
    curve: str = ""
    """Title of its curve in the report; empty = no curve."""
    section: Literal["Loss diagnostics", "Lengths", "Speed and idle time"] = "Loss diagnostics"
    """The part of the report with the curve."""
    panel: tuple[str, str] | None = None
    """Row of the terminal's panel, and the text there."""

    @property
    def tag(self) -> str:
        """Its name in TensorBoard; the group `eval` replaces the prefix of the key."""
        return f"{self.board}/{self.name.removeprefix('eval_') if self.board == 'eval' else self.name}"

    def parts(self, row: Mapping[str, Any]) -> dict[str, float]:
        """Return its value in a row by part, "" for the whole of one without parts; empty where there is none."""
        value = row.get(self.name)
        parts = value if isinstance(value, Mapping) else {"": value}
        return {name: float(part) for name, part in parts.items() if part is not None}

    def of(self, totals: Mapping[str, float | None]) -> float | None:
        """Return the step's value from the totals over updates and ranks."""
        total, count = totals.get(self.name, self.empty), totals.get(self.over)
        if not self.over or total is None:
            return total
        return total / count if count else self.empty

    def words(self, row: Mapping[str, Any], **bounds: float) -> str:
        """Return the text for the terminal: a dash if there is no value, each part if there are several."""
        assert self.panel is not None
        text, value = self.panel[1], row.get(self.name)
        if isinstance(value, float) and 0 < value < 10:
            text = text.replace(":,.0f", ":.2g")  # a slow run's speed is not 0
        if isinstance(value, Mapping):
            return ", ".join(f"{name} {text.format(part)}" for name, part in value.items()) if len(value) > 1 else ""
        return (re.sub(r"\{:.*?}", "-", text) if value is None else text).format(value, **bounds)


_SUM, _MAX, _ALIKE = Reduction
_token_mean = partial(Metric, reduction=_SUM, over="tokens_trained", board="train")
_row_mean = partial(Metric, reduction=_SUM, over="rows", board="rollout", section="Lengths")
_alike = partial(Metric, reduction=_ALIKE, board="train")
_largest = partial(Metric, reduction=_MAX)
_rate = partial(Metric, board="rollout", section="Speed and idle time")

# fmt: off
METRICS = (
    Metric("step", "completed trainer steps"),
    Metric("version", "version of the weights after the step"),
    Metric("time_s", "since the run began, start-up included; time between a run and its resume is left out", "s"),
    _alike("reward_mean", "over the scored samples of the batch, as verifiers gave it, step rewards included",
           board="reward", panel=("reward", "{:.3f}")),
    _alike("reward_shaped_mean", "the same after scale, bias, clip and overlong penalty", board="reward"),
    _alike("varied_groups_fraction", "groups whose rewards differ, from which group baselines learn; with one sample "
           "per prompt, the batch is the group",
           "share of groups", board="reward", curve="groups whose rewards differ"),
    Metric("loss", "of applied policy updates, with KL terms and entropy bonus, without language-model term", "loss",
           reduction=_SUM, over="policy_updates", board="train", curve="loss"),
    _alike("grad_norm", "of applied policy updates", "before clipping", over="policy_updates",
           curve="gradient norm", panel=("policy", "gradient norm {:.3f}")),
    _alike("step_skipped", "updates of policy or critic not applied: gradient norm not finite, or no token to train",
           empty=0),
    _token_mean("entropy", "of the current policy at trained tokens, temperature applied", "nats per token",
                curve="entropy", panel=("policy", "entropy {:.3f}")),
    _token_mean("kl_behav_prox", "behaviour minus proximal logprob: the estimator k1 of KL(behaviour || proximal)",
                "nats per token", curve="KL behaviour to proximal"),
    _token_mean("behav_weight_mean", "as used in the loss: 0 for tokens that cap or filter removes",
                "proximal / behaviour", curve="behaviour weight, mean"),
    _token_mean("behav_weight_masked_fraction", "trained tokens above the cap of the behaviour weight", "share",
                curve="tokens over the weight's cap"),
    _token_mean("clip_fraction", "trained tokens whose ratio is clipped", "share", curve="clipped tokens"),
    Metric("loss_metrics", "figures that `objective.loss_function` returns besides `clipped`, by name: means over "
           "trained tokens", board="train"),
    _alike("advantage_std", "standard deviation over the loss mask, before `scale: batch_std` divides by it",
           curve="advantages, standard deviation"),
    _token_mean("kl_ref", "KL(current || reference), the estimator k3 with the behaviour weight; null without a "
                "reference, or when every weight is 0", "nats per token", over="weighted_tokens",
                curve="KL to the reference"),
    _alike("kl_coef", "weight of the KL to the reference in this step; null without one",
           curve="coefficient of that KL"),
    Metric("value_loss", "of applied critic updates; null without any",
           reduction=_SUM, over="critic_updates", board="critic", curve="value loss"),
    _alike("value_explained_variance", "1 - var(target - value) / var(target) before the updates; null without a "
           "critic, or when all targets are equal",
           "share", board="critic", curve="explained variance of the critic"),
    _alike("lr", "learning rate of the step", curve="learning rate"),
    Metric("tokens_trained", "loss-mask tokens of the applied updates", "per step", reduction=_SUM, empty=0,
           board="train", curve="tokens trained"),
    Metric("tokens_filtered", "loss-mask tokens that the behaviour filter removes; null without a filter",
           "per step", reduction=_SUM, board="train"),
    _token_mean("age_mean", "trained tokens, in trainer steps", "versions", board="queue",
                panel=("tokens", "age {:.2f}")),
    _largest("age_max", "largest age of a trained token; 0 when none was trained", "versions", empty=0, board="queue",
             panel=("tokens", "oldest {:d} of {age_limit} allowed")),
    Metric("tokens_masked_stale", "tokens masked because they exceed the age bound", "per step",
           reduction=_SUM, board="queue", curve="tokens masked as stale", panel=("tokens", "{:,d} masked as stale")),
    Metric("tokens_trained_stale", "trained tokens that exceed the age bound (`queue.on_stale: keep`)", "per step",
           reduction=_SUM, empty=0, board="queue", curve="tokens trained over age"),
    Metric("age_histogram", "trained tokens by age"),
    Metric("tokens_by_quarter", "tokens of each quarter of the samples, by sample length: all that may train, and "
           "those not masked as stale"),
    _largest("behav_prox_max_abs_diff_age0", "|behaviour - trainer| logprob over loss-mask tokens of age 0, the "
             "trainer's with the weights of the batch's version; the largest float when any is not finite",
             "nats", board="weights"),
    Metric("parity_mean_abs_logprob_diff", "mean |engine - trainer| logprob in a parity check right after the "
           "publication, for the engine that is furthest off; only in rows where it was measured",
           "nats", board="weights", curve="engine against trainer, mean difference"),
    Metric("parity_p99_abs_logprob_diff", "99th percentile of the same", "nats", board="weights"),
    Metric("parity_max_abs_logprob_diff", "largest of the same",
           "nats", board="weights", curve="engine against trainer, largest difference"),
    _alike("prepare_s", "on rank 0: packing and advantages", "s", board=""),
    _alike("proximal_s", "on rank 0: passes before the updates, of policy, reference and critic", "s", board=""),
    _alike("update_s", "on rank 0: optimiser updates, and what is measured after them", "s", board=""),
    _largest("gpu_rest_gib", "memory of a rank's tensors on its GPU as the step begins; null on a CPU", "GiB",
             board="time"),
    _largest("gpu_peak_gib", "peak of the same during the step; null on a CPU", "GiB", board="time"),
    Metric("trainer_wait_s", "the trainer waited for the batch", "s", board="queue"),
    _alike("train_s", "from taking the batch to the new weights", "s", board="time"),
    Metric("publish_s", "handing the weights over", "s", board="time"),
    Metric("publish_mb_s", "speed at which each engine received them; over `gloo`", "MB/s", board="time"),
    Metric("paused_s", "sum over the rollout workers", "s", board="time"),
    _rate("samples_per_s", "trained, over the time since the last row", "samples/s",
          curve="samples trained per second", panel=("speed", "{:,.0f} samples/s trained")),
    _rate("gen_tokens_per_s", "generated, over the time since the last row", "tokens/s",
          curve="tokens generated per second", panel=("speed", "{:,.0f} tokens/s generated")),
    _rate("rollout_occupancy", "running sequences over slots, since the last row", "share",
          curve="occupancy of the rollout slots"),
    _row_mean("length_mean", "completions, an environment's replies included, every row counted", "tokens",
              curve="mean length", panel=("policy", "length {:.1f}")),
    _row_mean("truncated_fraction", "completions that ended at the token limit", "share of samples",
              curve="truncated at the token limit", panel=("policy", "{:.0%} truncated")),
    Metric("reward_by_source", "mean reward by data source", board="reward", panel=("reward", "{:.3f}")),
    Metric("reward_parts", "means of the verifiers' reward parts", board="reward"),
    Metric("verifier_metrics", "means of the verifiers' further figures", board="reward"),
    Metric("verifiers", "calls, time-outs, restarts, failures and latencies so far, by verifier"),
    Metric("verifier_failures", "failed verifications so far, by reason"),
    Metric("agent_calls_unconstrained", "agent calls so far that were served without the constraint they asked for, by "
           "field (`rollout.serve_unconstrained`)"),
    Metric("prefix_cache_hit_fraction", "context tokens so far that an engine found in its prefix cache; null before "
           "any", "share of tokens", board="rollout"),
    Metric("workers", "rollout and verifier workers by state as the row is written: healthy, suspect (last call "
           "unanswered), restarting, joining (waits for the next publication), dead", panel=("workers", "{}")),
    Metric("memory_mb", "resident memory of each process and of those that it started, as last measured; for the "
           "controller, only its own", "MiB", board="memory"),
    Metric("eval_reward", "mean reward of held-out prompts, in the first row after it was measured", "share",
           board="reward"),
    Metric("eval_step", "the step that was evaluated"),
    Metric("eval_by_source", "the same by data source", board="reward"),
    Metric("eval_watched", "the same, scored by the verifiers of `reward_watch`", board="reward"),
    Metric("ledger", "groups by state as the row is written"),
)
"""Keys of a row of `metrics.jsonl`."""

_offline = partial(Metric, board="train")

OFFLINE_METRICS = (
    *METRICS[:2],
    _offline("time_s", METRICS[2].about, "s"),
    _offline("loss", "mean over the batch before the update", "loss", curve="loss", panel=("loss", "{:.3f}")),
    _offline("grad_norm", "before clipping", "before clipping", curve="gradient norm",
             panel=("policy", "gradient norm {:.3f}")),
    _offline("accuracy", "SFT: tokens that the model ranks first; pairs: those ranked correctly", "share"),
    _offline("margin", "by which the chosen completion is ahead of the rejected", "chosen - rejected", curve="margin"),
    _offline("lr", "learning rate of the step", curve="learning rate"),
    _offline("tokens", "completion tokens trained on", "per step", curve="tokens trained",
             panel=("policy", "{:,.0f} tokens")),
    _offline("step_skipped", "1 if the gradient norm was not finite and nothing was learned"),
    _offline("train_s", "training the batch", "s"),
    Metric("eval_loss", "held-out rows, where it was measured", board="eval"),
    Metric("eval_accuracy", "held-out rows, where it was measured", "share", board="eval"),
    Metric("eval_margin", "held-out pairs, where it was measured", board="eval"),
)
"""The same of `sft`, `reward-model` and `dpo`."""

SHARES = (
    Metric("rollout_idle_fraction", "not paused, and nothing running", panel=("idle", "generators {:.0%}")),
    Metric("paused_fraction", "from the pause call to the resume", panel=("idle", "paused {:.0%}")),
    Metric("trainer_idle_fraction", "the trainer waits for a batch", panel=("idle", "trainer {:.0%}")),
)
"""Shares of the time between the first and the last trained step, in `summary.json`; means over the workers."""
# fmt: on


def mean_called(rewards: Iterable[float], *, before: Iterable[str | None] = ()) -> str:
    """Return what a mean of rewards is called: an accuracy where each is 0 or 1, also of the means `before` it."""
    return "accuracy" if set(rewards) <= {0.0, 1.0} and "mean reward" not in before else "mean reward"
