"""What every kind of run writes: rows with trackers beside them, events, and the summary."""

import contextlib
import logging
import math
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from areal_lite.config.offline import OfflineConfig
from areal_lite.config.sections import RunConfig
from areal_lite.events import Event
from areal_lite.network import local_address
from areal_lite.node import package_versions
from areal_lite.record.lanes import GAP
from areal_lite.record.metrics import OFFLINE_METRICS, Metric
from areal_lite.record.run_folder import RunFolder
from areal_lite.record.trackers import PrometheusPage, Tracker, open_trackers

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
    """Return the means of a figure over the first and the last ten rows, as `<name>_first` and `<name>_last`."""
    means = {}
    for end, part in (("first", rows[:10]), ("last", rows[-10:])):
        known = [row[key] for row in part if row[key] is not None]
        means[f"{name}_{end}"] = sum(known) / len(known) if known else None
    return means


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
    """Return the commit of the checkout this code runs from, marked where files differ from it; None outside of one."""
    command, here = ["git", "describe", "--always", "--dirty", "--exclude=*"], Path(__file__).parent
    try:
        return subprocess.run(command, cwd=here, capture_output=True, text=True).stdout.strip() or None
    except OSError:  # there is no git
        return None
