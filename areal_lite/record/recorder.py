"""What every kind of run writes: rows with trackers beside them, events, and the summary."""

import contextlib
import itertools
import logging
import math
import os
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from areal_lite.config.offline import OfflineConfig
from areal_lite.config.recipe import Config
from areal_lite.config.sections import RunConfig
from areal_lite.events import Event
from areal_lite.network import local_address
from areal_lite.node import package_versions
from areal_lite.record.lanes import (
    GAP,
    PAUSE_PARTS,
    LaneClocks,
    Stretch,
    lane_events,
    reading,
    sample_lengths,
    slices,
    steps_before_gaps,
)
from areal_lite.record.metrics import METRICS, OFFLINE_METRICS, Metric
from areal_lite.record.run_folder import RunFolder
from areal_lite.record.trackers import PrometheusPage, Tracker, open_trackers
from areal_lite.types import Group, Sample

logger = logging.getLogger(__name__)


class Recorder:
    """The part that does not depend on the kind of run."""

    def __init__(self, folder: RunFolder, metrics: Iterable[Metric], run: RunConfig) -> None:
        self._folder, self._metrics = folder, metrics
        self._trackers: list[Tracker] = []
        if (port := run.prometheus_port) is not None:
            self._trackers.append(PrometheusPage(metrics, address=local_address(run.network), port=port))
        self._commit = commit_of_code()  # now: files may change while the run goes on
        self.rows: list[dict[str, Any]] = folder.read("metrics.jsonl")
        """Rows of `metrics.jsonl`; a resumed run goes on behind those it finds."""
        self.stopped_by = ""
        """What asked the run to stop before its end: Ctrl-C, a signal, ...; of an error the status tells."""
        last = self.rows[-1] if self.rows else {"step": 0, "time_s": 0.0}
        self._started = time.time() - last["time_s"]
        self._earlier: list[Event] = sorted(folder.read("events.jsonl"), key=lambda event: event["time"])
        if self._earlier:
            gap = {"time": self._earlier[-1]["time"], "lane": "controller", "kind": GAP}
            self._earlier.append(gap)
            folder.append("events.jsonl", [gap])
        self.evaluations: dict[int, dict[str, Any]] = {
            event["step"]: event.get("figures")
            or {key: value for key, value in event.items() if key not in ("time", "lane", "kind", "step")}
            for event in self._earlier
            if event["kind"] == "eval"
        }
        """Figures over the held-out rows, by completed steps."""
        self._trackers += open_trackers(run.trackers, folder.path, next_step=int(last["step"]) + 1)

    def feed(self, events: Sequence[Event]) -> None:
        """Write events down."""
        self._folder.append("events.jsonl", events)

    def write(self, step: int, **figures: Any) -> dict[str, Any]:
        """Write and return the row of a completed step, with what its metrics say in TensorBoard."""
        times = {"step": step, "version": step, "time_s": time.time() - self._started}
        row = {name: _finite(value) for name, value in (times | figures).items()}
        self.rows.append(row)
        self._folder.append("metrics.jsonl", [row])
        shown = [(metric.tag, metric.parts(row)) for metric in self._metrics if metric.board]
        figures = {f"{tag}/{part}" if part else tag: value for tag, parts in shown for part, value in parts.items()}
        self._track(lambda tracker: tracker.show(row, figures))
        return row

    def _track(self, show: Callable[[Tracker], None]) -> None:
        for tracker in self._trackers:
            with _going_on(Exception):  # of packages that know networks and servers
                show(tracker)

    def sum_up(self, status: str, figures: Mapping[str, Any]) -> dict[str, Any]:
        """Write `summary.json` and `trace.json.gz`, and return the summary."""
        content = {
            "status": status,
            "stopped_by": self.stopped_by or None,
            "steps": len(self.rows),
            "version": self.rows[-1]["version"] if self.rows else 0,
            "wall_s": time.time() - self._started,
            **figures,
            "versions": package_versions(),
            "commit": self._commit,
        }
        with _going_on():
            self._folder.write_json("summary.json", content)
        with _going_on():
            self._folder.write_trace()
        self.close()
        return content

    def close(self) -> None:
        """Let go of the trackers."""
        self._track(lambda tracker: tracker.close())


_PARITY = ("mean", "p99", "max")
"""Of |engine - trainer| log-probabilities."""
_SPEEDS = ("samples_per_s", "gen_tokens_per_s", "trained_tokens_per_s", "rollout_occupancy")


class OnlineRecorder(Recorder):
    """Everything that is written about one run of `train`."""

    def __init__(self, config: Config, folder: RunFolder) -> None:
        super().__init__(folder, METRICS, config.run)
        self._config = config
        self._clocks = LaneClocks()
        self._clocks.feed(self._earlier)
        now, trained = time.time(), [event["time"] for event in self._earlier if event["kind"] == "published"]
        self._last = _Moment(now, tokens=0.0, steps=0, lanes=self._clocks.read(now))
        self._origin = reading(self._earlier, trained[0]) if trained else None
        """The clocks at the run's first step."""
        self._done: dict[str, float] = dict.fromkeys(("seconds", *_SPEEDS), 0.0)
        """What all steps did but the first one after each start, whose time is mostly that of the start."""
        ends = steps_before_gaps(self._earlier)
        for before, row in itertools.pairwise(self.rows):
            if before["step"] not in ends:
                self._count(row, row["time_s"] - before["time_s"])
        self._earlier.clear()
        self._pending: dict[str, Any] = {}

    def feed(self, events: Sequence[Event]) -> None:
        """Take events, each lane's in order of time."""
        super().feed(events)
        self._clocks.feed(events)

    def evaluation(self, step: int, accuracy: float, **figures: Any) -> None:
        """Note a held-out mean reward; it stands in the next row and in the summary.

        Args:
            **figures: It `by_source`, what it is `called`, and the means of the scores' `parts` and `metrics`.
        """
        self.evaluations[step] = {"accuracy": accuracy, **figures}
        self._pending |= {"eval_reward": accuracy, "eval_step": step, "eval_by_source": figures["by_source"]}

    def parity(self, **nats: float) -> None:
        """Note `mean`, `p99` and `max` of |engine - trainer|; they are part of the next row and of the summary."""
        # In this order also of what is no number.
        self._pending |= {f"parity_{name}_abs_logprob_diff": min(sys.float_info.max, nats[name]) for name in _PARITY}

    def step(
        self,
        stats: Mapping[str, Any],
        *,
        step: int,
        tokens_generated: float,
        ledger: Mapping[str, int],
        **timings: float,
    ) -> dict[str, Any]:
        """Write and return the row of one completed trainer step.

        Args:
            stats: From the trainer.
            step: Number of completed steps, from 1; also the new version.
            tokens_generated: By all engines since their start.
            ledger: Groups by state as the row is written, which may be when the next batch is taken.
            **timings: `trainer_wait_s`, `train_s`, `publish_s`.
        """
        now, before = time.time(), self._last
        self._last = _Moment(now, tokens_generated, before.steps + 1, self._clocks.read(now))
        self._origin = self._origin or self._last.lanes
        measured = {
            **timings,
            "age_histogram": {str(age): count for age, count in stats["age_histogram"].items()},
            "paused_s": Stretch(before.lanes, self._last.lanes).spent(*PAUSE_PARTS),
            **self._rates(before),
            **self._pending,
            "ledger": dict(ledger),
        }
        self._pending = {}
        row = self.write(step, **{**stats, **measured})
        if before.steps:
            self._count(row, self._last.time - before.time)
        return row

    def samples(self, step: int, groups: Iterable[Group]) -> None:
        """Write some groups of a batch in readable form."""
        rows = [_readable(step, group) for group in groups]
        self._folder.append("samples.jsonl", rows)
        said = [(row, sample) for row in rows for sample in row["samples"]]
        table = [(step, row["prompt"], row["answer"], sample["text"], sample["reward"]) for row, sample in said]
        if table:
            self._track(lambda tracker: tracker.show_samples(table))

    def shares(self) -> dict[str, float]:
        """Shares of the time between the first and the last trained step: idle, paused and its parts."""
        run, trainer = Stretch(self._origin or self._last.lanes, self._last.lanes), ("training", "publishing", "other")
        return {
            "rollout_idle_fraction": run.share("idle"),
            "rollout_draining_fraction": run.share("draining"),
            "trainer_idle_fraction": run.share("waiting", lane="trainer"),
            **{f"trainer_{state}_fraction": run.share(state, lane="trainer") for state in trainer},
            "paused_fraction": run.share(*PAUSE_PARTS),
            **{f"paused_fraction_{part}": run.share(part) for part in PAUSE_PARTS},
        }

    def summary(self, status: str, *, ledger: Mapping[str, int]) -> dict[str, Any]:
        """Write `summary.json` and `trace.json.gz`, and return the summary."""
        rows, done = self.rows, self._done
        evaluations = sorted(self.evaluations.items())
        events = self._folder.read("events.jsonl")
        lanes = [found for lane, found in lane_events(events).items() if lane.startswith("rollout/")]
        pauses = [end - start for found in lanes for kind, start, end, _ in slices(found)]
        figures = {
            **{name: done[name] / done["seconds"] if done["seconds"] else None for name in _SPEEDS},
            **mean_of_ends(rows, "reward_mean", "reward"),
            "eval_called": evaluations[-1][1].get("called", "accuracy") if evaluations else None,
            "eval": {str(step): found["accuracy"] for step, found in evaluations},
            "eval_best_step": max(self.evaluations, key=lambda step: self.evaluations[step]["accuracy"], default=None),
            **{
                f"eval_{name}": {str(step): found[name] for step, found in evaluations if found.get(name)}
                for name in ("by_source", "parts", "metrics")
            },
            "length_histogram": _in_order(Counter(length // 16 * 16 for length in sample_lengths(events))),
            "age_histogram": _in_order(sum((Counter(row["age_histogram"]) for row in rows), Counter())),
            "age_max_trained": max((row["age_max"] for row in rows), default=0),
            "max_staleness": self._config.queue.max_staleness,
            "ledger": dict(ledger),
            **self.shares(),
            "warnings": [f"step {event['step']}: {event['text']}" for event in events if event["kind"] == "warning"],
            "publish_s_median": statistics.median([row["publish_s"] for row in rows] or [0.0]),
            "pause_s_median": statistics.median(pauses or [0.0]),
            **{
                name: max((row[name] for row in [*rows, self._pending] if row.get(name) is not None), default=None)
                for name in (f"parity_{kind}_abs_logprob_diff" for kind in _PARITY)
            },
        }
        return self.sum_up(status, figures)

    def _count(self, row: Mapping[str, Any], seconds: float) -> None:
        """Add a step of so many seconds to what is done."""
        self._done["seconds"] += seconds
        for name in _SPEEDS:
            is_counted = name == "trained_tokens_per_s"
            self._done[name] += row["tokens_trained"] if is_counted else row.get(name, 0.0) * seconds

    def _rates(self, since: "_Moment") -> dict[str, float]:
        """Return what was done a second, and the share of slots in use, from an earlier moment to the last."""
        seconds = max(self._last.time - since.time, 1e-9)
        lanes = Stretch(since.lanes, self._last.lanes)
        slots = self._config.rollout.slots * max(len(lanes.workers), 1)
        return {
            "samples_per_s": (self._last.steps - since.steps) * self._config.samples_per_step / seconds,
            "gen_tokens_per_s": (self._last.tokens - since.tokens) / seconds,
            "rollout_occupancy": lanes.spent("slot_seconds") / (seconds * slots),
        }


class _Moment(NamedTuple):
    """What was known when a row was written."""

    time: float
    tokens: float
    steps: int
    """Rows written by this process."""
    lanes: Mapping[str, Mapping[str, float]]
    """A reading of every clock."""


def _in_order(counts: Mapping[Any, int]) -> dict[str, int]:
    return {str(value): counts[value] for value in sorted(counts, key=int)}


def _readable(step: int, group: Group) -> dict[str, Any]:
    """Return a group as a row of `samples.jsonl`, of the step that trained it."""
    prompt, samples = group.prompt, [_readable_sample(sample) for sample in group.samples]
    told = {"step": step, "group": group.group_id, "prompt": prompt.text, "answer": prompt.answer}
    return told | ({"row": dict(prompt.row)} if prompt.row else {}) | {"samples": samples}


def _readable_sample(sample: Sample) -> dict[str, Any]:
    branches = [_readable_sample(branch) for branch in sample.branches]
    further: dict[str, Any] = {"messages": list(sample.messages), "branches": branches}
    if (score := sample.score) is not None:
        further["step_rewards"] = [[step.token, step.value] for step in score.step_rewards]
        further |= {"parts": dict(score.parts), "metrics": dict(score.metrics), "feedback": score.feedback}
    return {
        "text": sample.text,
        "reward": score and score.reward,
        "failure": score and score.failure,
        "stop_reason": sample.stop_reason.value,
        "tokens": sample.num_tokens,
        "spans": [[span.version, span.start, span.end] for span in sample.spans],
    } | {name: value for name, value in further.items() if value}


class OfflineRecorder(Recorder):
    """Everything that is written about one run of `sft`, `reward-model` or `dpo`."""

    def __init__(self, config: OfflineConfig, folder: RunFolder) -> None:
        super().__init__(folder, OFFLINE_METRICS, config.run)
        self._command = config.command

    def step(self, figures: Mapping[str, float], *, step: int, train_s: float) -> dict[str, Any]:
        """Write the row of one completed step, with the evaluation of that step if there was one, and return it."""
        evaluation = {f"eval_{name}": value for name, value in self.evaluations.get(step, {}).items()}
        return self.write(step, train_s=train_s, **figures, **evaluation)

    def summary(self, status: str) -> dict[str, Any]:
        """Write `summary.json` and `trace.json.gz`, and return the summary."""
        tokens, seconds = (sum(row[key] for row in self.rows) for key in ("tokens", "train_s"))
        figures = {
            "command": self._command,
            "trained_tokens": tokens,
            "trained_tokens_per_s": tokens / seconds if seconds else 0.0,
            **mean_of_ends(self.rows, "loss", "loss"),
            "eval": {str(step): found for step, found in sorted(self.evaluations.items())},
        }
        return self.sum_up(status, figures)


def mean_of_ends(rows: Sequence[Mapping[str, Any]], key: str, name: str) -> dict[str, float | None]:
    """Return the means of a figure over the first and the last tenth of the rows, as `<name>_first`, `<name>_last`.

    Each part has one row at least and ten at most: they overlap only in a run of one row. None where nothing is known.
    """
    known = [row[key] for row in rows if row[key] is not None]
    size = min(max(len(known) // 10, 1), 10)
    return {
        f"{name}_{end}": statistics.fmean(part) if part else None
        for end, part in (("first", known[:size]), ("last", known[-size:]))
    }


@contextlib.contextmanager
def _going_on(kind: type[Exception] = OSError) -> Iterator[None]:
    """What people read of a run may fail to be written; that ends no run."""
    try:
        yield
    except kind as error:
        logger.warning("the run goes on without what could not be written: %s", error)


def _finite(value: Any) -> Any:
    """Return what JSON can hold: null for a figure that does not exist, the largest float for an infinite one."""
    if not isinstance(value, float) or math.isfinite(value):
        return value
    return None if math.isnan(value) else math.copysign(sys.float_info.max, value)


def commit_of_code() -> str | None:
    """Return the commit of the checkout this code runs from, marked where files differ from it.

    Outside of one it is what AREAL_LITE_COMMIT says, if anything.
    """
    if named := os.environ.get("AREAL_LITE_COMMIT"):
        return named
    command, here = ["git", "describe", "--always", "--dirty", "--exclude=*"], Path(__file__).parent
    try:
        return subprocess.run(command, cwd=here, capture_output=True, text=True).stdout.strip() or None
    except OSError:  # there is no git
        return None
