"""Writes what a run leaves behind: a row per step, for files and trackers; events; samples; the summary.

The summary needs a few totals of the event log. They are added up as events are written, and a resume reads the log
once, event by event, so that a log of any length takes no memory.
"""

import contextlib
import itertools
import logging
import math
import os
import statistics
import subprocess
import sys
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from areal_lite.config.offline import OfflineConfig
from areal_lite.config.recipe import Config
from areal_lite.config.sections import RunConfig
from areal_lite.events import Event, now
from areal_lite.network import local_address
from areal_lite.node import machine_in_words, package_versions, source_hash
from areal_lite.record import length_bias, worker_warnings
from areal_lite.record.lanes import (
    GAP,
    PAUSE_PARTS,
    LaneClocks,
    Reading,
    Slicer,
    Stretch,
    lane_of,
    sample_lengths,
)
from areal_lite.record.metrics import METRICS, OFFLINE_METRICS, Metric
from areal_lite.record.run_files import number, numbers, table
from areal_lite.record.run_folder import RunFolder
from areal_lite.record.trackers import PrometheusPage, Tracker, open_trackers
from areal_lite.types import Group, Sample

logger = logging.getLogger(__name__)


_RECENT = max(length_bias.STEPS, worker_warnings.STEPS)
"""Last rows that are kept, as many as a warning looks at; the others are in the file alone."""


class Recorder:
    """What every kind of run writes."""

    def __init__(self, folder: RunFolder, metrics: Iterable[Metric], run: RunConfig) -> None:
        self._folder, self._metrics = folder, metrics
        self._trackers: list[Tracker] = []
        self._failing = set[int]()
        if (port := run.prometheus_port) is not None:
            self._trackers.append(PrometheusPage(metrics, address=local_address(run.network), port=port))
        # Now, as files may change later.
        self._place = {"commit": commit_of_code(), "source": source_hash(), "machine": machine_in_words()}
        self.recent = deque(folder.iterate("metrics.jsonl"), maxlen=_RECENT)
        """The last rows of `metrics.jsonl`, those of earlier starts included."""
        self.stopped_by = ""
        """What asked the run to stop early: Ctrl-C, a signal, ...; the status names an error."""
        last = self.recent[-1] if self.recent else {"step": 0}
        self._started = time.monotonic() - (number(last.get("time_s")) or 0.0)
        self.evaluations: dict[int, dict[str, Any]] = {}
        """Figures over the held-out rows, by completed steps."""
        self._read_earlier_events()
        self._trackers += open_trackers(run.trackers, folder.path, next_step=int(last["step"]) + 1)

    def _read_earlier_events(self) -> None:
        """Read the log of a resumed run once, and mark in it that the run did not live from its last event to now."""
        last = None
        for event in self._folder.iterate("events.jsonl"):
            last = event["time"] if last is None else max(last, event["time"])
            self._add_earlier(event)
        if last is not None:
            gap = {"time": last, "lane": "controller", "kind": GAP}
            self._folder.append("events.jsonl", [gap])
            self._add_earlier(gap)

    def _add_earlier(self, event: Event) -> None:
        if event["kind"] == "eval":
            kept = {key: event[key] for key in OF_EVALUATIONS if key in event}
            self.evaluations[event["step"]] = table(event.get("figures")) or kept

    def feed(self, events: Sequence[Event]) -> None:
        """Write events."""
        self._folder.append("events.jsonl", events)

    def write(self, step: int, **figures: Any) -> dict[str, Any]:
        """Write and return the row of a completed step; trackers show its figures."""
        times = {"step": step, "version": step, "time_s": time.monotonic() - self._started}
        row = {name: _finite(value) for name, value in (times | figures).items()}
        self.recent.append(row)
        self._folder.append("metrics.jsonl", [row])
        shown = [(metric.tag, metric.parts(row)) for metric in self._metrics if metric.board]
        figures = {f"{tag}/{part}" if part else tag: value for tag, parts in shown for part, value in parts.items()}
        self._track(lambda tracker: tracker.show(row, figures))
        return row

    def _track(self, show: Callable[[Tracker], None]) -> None:
        for tracker in self._trackers:
            try:
                show(tracker)
                self._failing.discard(id(tracker))
            except Exception as error:  # of packages that know networks and servers
                if id(tracker) not in self._failing:  # once, not at every step of a full disk
                    logger.warning("%s is not written for now: %s", type(tracker).__name__.strip("_"), error)
                self._failing.add(id(tracker))

    def sum_up(self, status: str, figures: Mapping[str, Any]) -> dict[str, Any]:
        """Write `summary.json` and `trace.json.gz`, and return the summary."""
        content = {
            "status": status,
            "stopped_by": self.stopped_by or None,
            "version": self.recent[-1]["step"] if self.recent else 0,
            "wall_s": time.monotonic() - self._started,
            **figures,
            "versions": package_versions(),
            **self._place,
        }
        with _never_fatal():
            self._folder.write_json("summary.json", content)
        with _never_fatal():
            self._folder.write_trace()
        self.close()
        return content

    def close(self) -> None:
        """Close the trackers."""
        self._track(lambda tracker: tracker.close())


OF_EVALUATIONS = ("accuracy", "called", "by_source", "parts", "metrics", "rewards", "watched")
"""What is kept of an evaluation's event, also over a resume."""
_PARITY = ("mean", "p99", "max")
"""Of |engine - trainer| log-probabilities."""
_RATES = ("samples_per_s", "gen_tokens_per_s", "rollout_occupancy")
"""Keys of a row that are means over its time."""


class OnlineRecorder(Recorder):
    """Everything that is written about one run of `train`."""

    def __init__(self, config: Config, folder: RunFolder) -> None:
        self._config, self._totals = config, _EventTotals()
        self._origin_clocks, self._origin_time = LaneClocks(), None
        super().__init__(folder, METRICS, config.run)
        if self.recent:
            self._totals.ends.add(self.recent[-1]["step"])
        self._last = _Moment(time.monotonic(), tokens=0.0, lanes=self._totals.clocks.read(now()))
        self._origin: Reading | None = None
        """The clocks at the run's first step."""
        if self._origin_time is not None:
            self._origin = self._origin_clocks.read(self._origin_time)
        self._pending: dict[str, Any] = {}

    def feed(self, events: Sequence[Event]) -> None:
        """Write events, each lane's in order of time."""
        super().feed(events)
        for event in events:
            self._totals.add(event)

    def _read_earlier_events(self) -> None:
        published = (event["time"] for event in self._folder.iterate("events.jsonl") if event["kind"] == "published")
        self._origin_time = next(published, None)
        super()._read_earlier_events()

    def _add_earlier(self, event: Event) -> None:
        super()._add_earlier(event)
        self._totals.add(event)
        if self._origin_time is not None and event["time"] <= self._origin_time:
            self._origin_clocks.feed([event])

    def evaluation(self, step: int, accuracy: float, **figures: Any) -> None:
        """Record a held-out mean reward, for the next row and the summary.

        Args:
            **figures: The same `by_source`, what it is `called`, the means of the scores' `parts` and `metrics`, and
                single `rewards`, also those of `watched` verifiers.
        """
        self.evaluations[step] = {"accuracy": accuracy, **figures}
        self._pending |= {"eval_reward": accuracy, "eval_step": step, "eval_by_source": figures["by_source"]}
        watched = {name: statistics.fmean(rewards.values()) for name, rewards in figures.get("watched", {}).items()}
        self._pending |= {"eval_watched": watched} if watched else {}

    def parity(self, **nats: float) -> None:
        """Record `mean`, `p99` and `max` of |engine - trainer|, for the next row and the summary."""
        # The arguments of `min` are in this order so that NaN, too, becomes the largest float.
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
            tokens_generated: By all engines since the start or restart of the run.
            ledger: Groups by state when the row is written, which may be when the next batch is taken.
            **timings: `trainer_wait_s`, `train_s`, `publish_s`.
        """
        lanes, before = self._totals.clocks.read(now()), self._last
        self._last = _Moment(time.monotonic(), tokens_generated, lanes)
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
        return self.write(step, **{**stats, **measured})

    def samples(self, step: int, groups: Iterable[Group]) -> None:
        """Write some groups of a batch in readable form."""
        rows = [_readable(step, group) for group in groups]
        self._folder.append("samples.jsonl", rows)
        lines = [
            (step, row["prompt"], row["answer"], sample["text"], sample["reward"])
            for row in rows
            for sample in row["samples"]
        ]
        if lines:
            self._track(lambda tracker: tracker.show_samples(lines))

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
        rows = self._folder.read("metrics.jsonl")
        figures = {
            "steps": len(rows),
            **self._speeds(rows),
            **mean_of_ends(rows, "reward_mean", "reward"),
            **self._evaluation_figures(),
            **_age_figures(rows),
            "length_histogram": _in_order(self._totals.lengths),
            "max_staleness": self._config.queue.max_staleness,
            "ledger": dict(ledger),
            **self.shares(),
            "warnings": self._totals.warnings,
            "publish_s_median": statistics.median(_known(rows, "publish_s") or [0.0]),
            "pause_s_median": statistics.median(self._totals.pauses or [0.0]),
            **_parity_figures([*rows, self._pending]),
        }
        return self.sum_up(status, figures)

    def _speeds(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, float | None]:
        """Return the speeds over all steps but the first after each start, whose time is mostly that of the start."""
        seconds, done = 0.0, dict.fromkeys((*_RATES, "trained_tokens_per_s"), 0.0)
        for before, row in itertools.pairwise(rows):
            if before["step"] in self._totals.ends:
                continue
            step_s = (number(row.get("time_s")) or 0.0) - (number(before.get("time_s")) or 0.0)
            seconds += step_s
            done["trained_tokens_per_s"] += number(row.get("tokens_trained")) or 0.0
            for name in _RATES:
                done[name] += (number(row.get(name)) or 0.0) * step_s
        return {name: total / seconds if seconds > 0 else None for name, total in done.items()}

    def _evaluation_figures(self) -> dict[str, Any]:
        evaluations = sorted(self.evaluations.items())
        found = {step: figures for step, figures in evaluations if number(figures.get("accuracy")) is not None}
        last = list(found.values())[-1] if found else None
        parts = {
            f"eval_{name}": {str(step): figures[name] for step, figures in found.items() if figures.get(name)}
            for name in ("by_source", "parts", "metrics")
        }
        return {
            "eval_called": last.get("called", "accuracy") if last else None,
            "eval": {str(step): figures["accuracy"] for step, figures in found.items()},
            "eval_best_step": max(found, key=lambda step: found[step]["accuracy"], default=None),
            **parts,
        }

    def _rates(self, since: "_Moment") -> dict[str, float]:
        """Return the work per second, and the share of slots in use, from an earlier moment to the last."""
        seconds = max(self._last.time - since.time, 1e-9)
        lanes = Stretch(since.lanes, self._last.lanes)
        worker_s = sum(sum(lanes.seconds(name).values()) for name in lanes.workers)
        return {
            "samples_per_s": self._config.samples_per_step / seconds,
            "gen_tokens_per_s": (self._last.tokens - since.tokens) / seconds,
            "rollout_occupancy": lanes.spent("slot_seconds") / max(worker_s * self._config.rollout.slots, 1e-9),
        }


class _EventTotals:
    """What the summary needs of the event log; events are added in the order of the log."""

    def __init__(self) -> None:
        self.clocks = LaneClocks()
        self.lengths, self.warnings = Counter[int](), list[str]()
        """Completions by tokens, rounded down to a multiple of 16; and warnings with their steps."""
        self.pauses = list[float]()
        """Seconds of each pause of a rollout worker."""
        self.ends = set[int]()
        """The steps after which the run did not live for a while."""
        self._slicers, self._version = defaultdict[str, Slicer](Slicer), 0

    def add(self, event: Event) -> None:
        """Add one event."""
        self.clocks.feed([event])
        lane, kind = lane_of(event), event["kind"]
        if kind == "published":
            self._version = event.get("version") or 0
        elif kind == GAP:
            self.ends.add(self._version)
        elif kind == "warning":
            self.warnings.append(f"step {event.get('step')}: {event.get('text')}")
        self.lengths.update(length // 16 * 16 for length in sample_lengths([event]))
        if lane.startswith("rollout/") and (found := self._slicers[lane].feed(event)):
            self.pauses.append(found.end - found.start)


class _Moment(NamedTuple):
    """What was known when a row was written."""

    time: float
    tokens: float
    lanes: Reading


def _in_order(counts: Mapping[Any, int]) -> dict[str, int]:
    known = [value for value in counts if str(value).isdecimal()]
    return {str(value): counts[value] for value in sorted(known, key=int)}


def _age_figures(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    tokens = Counter[str]()
    for row in rows:
        tokens.update({age: int(count) for age, count in numbers(row.get("age_histogram")).items()})
    return {"age_histogram": _in_order(tokens), "age_max_trained": int(max(_known(rows, "age_max"), default=0))}


def _parity_figures(rows: Sequence[Mapping[str, Any]]) -> dict[str, float | None]:
    """Return the worst of all rows, also where it is infinite."""
    names = [f"parity_{kind}_abs_logprob_diff" for kind in _PARITY]
    known = {name: [row[name] for row in rows if isinstance(row.get(name), float)] for name in names}
    return {name: max(values, default=None) for name, values in known.items()}


def _known(rows: Iterable[Mapping[str, Any]], key: str) -> list[float]:
    """Return the figures of the rows that have one."""
    return [value for row in rows if (value := number(row.get(key))) is not None]


def _readable(step: int, group: Group) -> dict[str, Any]:
    """Return a group as a row of `samples.jsonl`, of the step that trained it."""
    prompt, samples = group.prompt, [_readable_sample(sample) for sample in group.samples]
    known = {"step": step, "group": group.group_id, "prompt": prompt.text, "answer": prompt.answer}
    return known | ({"row": dict(prompt.row)} if prompt.row else {}) | {"samples": samples}


def _readable_sample(sample: Sample) -> dict[str, Any]:
    branches = [_readable_sample(branch) for branch in sample.branches]
    further: dict[str, Any] = {"messages": list(sample.messages), "branches": branches}
    if (score := sample.score) is not None:
        further["step_rewards"] = [[step.token, step.value] for step in score.step_rewards]
        further |= {"parts": dict(score.parts), "metrics": dict(score.metrics), "feedback": score.feedback}
    return {
        "text": sample.text,
        "reward": sample.total_reward,
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
        rows = self._folder.read("metrics.jsonl")
        tokens, seconds = (sum(_known(rows, key)) for key in ("tokens", "train_s"))
        figures = {
            "steps": len(rows),
            "command": self._command,
            "trained_tokens": tokens,
            "trained_tokens_per_s": tokens / seconds if seconds else 0.0,
            **mean_of_ends(rows, "loss", "loss"),
            "eval": {str(step): found for step, found in sorted(self.evaluations.items())},
        }
        return self.sum_up(status, figures)


def mean_of_ends(rows: Sequence[Mapping[str, Any]], key: str, name: str) -> dict[str, float | None]:
    """Return the means of a figure over the first and the last tenth of the rows, as `<name>_first`, `<name>_last`.

    Each part has 1 to 10 rows: they overlap only in a run of one row. None if no row has the figure.
    """
    known = _known(rows, key)
    size = min(max(len(known) // 10, 1), 10)
    return {
        f"{name}_{end}": statistics.fmean(part) if part else None
        for end, part in (("first", known[:size]), ("last", known[-size:]))
    }


@contextlib.contextmanager
def _never_fatal() -> Iterator[None]:
    """Log an error of what only people read, such as a chart or the trace: no run ends because of it."""
    try:
        yield
    except Exception as error:
        logger.warning("the run continues without what could not be written: %r", error)


def _finite(value: Any) -> Any:
    """Return what JSON can hold: null for NaN, the largest float for infinity."""
    if isinstance(value, Mapping):
        return {key: _finite(one) for key, one in value.items()}
    if not isinstance(value, float) or math.isfinite(value):
        return value
    return None if math.isnan(value) else math.copysign(sys.float_info.max, value)


def commit_of_code() -> str | None:
    """Return AREAL_LITE_COMMIT, else the commit of the checkout that this code runs from, marked if it was edited."""
    if named := os.environ.get("AREAL_LITE_COMMIT"):
        return named
    root = Path(__file__).parents[2]  # never that of a user's repository around an environment
    command = ["git", f"--git-dir={root}/.git", f"--work-tree={root}", "describe", "--always", "--dirty", "--exclude=*"]
    try:
        return subprocess.run(command, capture_output=True, text=True).stdout.strip() or None
    except OSError:  # there is no git
        return None
