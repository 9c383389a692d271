"""What a run folder holds, as far as it can be read; a run that is still active can be read at any moment."""

import math
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import accumulate
from pathlib import Path

from areal_lite.errors import DataError
from areal_lite.events import Event
from areal_lite.record.lanes import GAP, between_publications
from areal_lite.record.report.charts import MAX_POINTS
from areal_lite.record.run_files import Row, iterate_rows, missing_steps, number, read_json, table
from areal_lite.record.run_folder import flattened

_MAX_GROUPS = 800
"""Of `samples.jsonl` in memory."""
_SAMPLED = ("group", "verify")
_RARE = ("published", GAP, "eval", "settings", "warning", "lost", "restarted", "checkpoint", "parity")
_FILES = ("config.json", "metrics.jsonl", "events.jsonl")


class RunFiles:
    """The files of one run; a missing one is empty."""

    def __init__(self, path: Path, *, name: str = "", max_log_bytes: int = 20_000_000) -> None:
        """Read a run folder.

        Args:
            path: The folder.
            name: For titles and legends, by default the folder's.
            max_log_bytes: Of a longer event log the timeline shows the end, and charts are of some groups; in memory
                so many bytes take eight times as much.

        Raises:
            DataError: It holds nothing of a run.
        """
        if not any((path / name).is_file() for name in _FILES):
            what = "no such folder" if not path.is_dir() else f"a folder with none of {', '.join(_FILES)}"
            raise DataError(f"expected a run folder, got {path}, {what}. Fix: name one that areal-lite train printed")
        self.name = name or path.resolve().name
        self.notes: list[str] = []
        """One sentence for each file that is missing or broken."""
        self.config = read_json(path / "config.json", self.notes)
        self.command = str(self.config.get("command", "train"))
        """The command that made it: train, sft, reward_model or dpo."""
        # Offline runs have no samples.
        self.samples = _thinned(self._rows(path / "samples.jsonl")) if self.command == "train" else []
        """Groups that are evenly spread over the run."""
        self.metrics = list(self._rows(path / "metrics.jsonl"))
        if missing := missing_steps(row["step"] for row in self.metrics):
            self.notes.append(f"metrics.jsonl has no row of step {missing}: figures and curves leave them out")
        self.last = self.metrics[-1] if self.metrics else {}
        """The newest row of metrics."""
        self.events: list[Event] = []
        """All that are rare, and of a log that is not too long all groups and verifications."""
        self.published = between_publications(self._events(path / "events.jsonl", max_log_bytes))
        self.recent = list(iterate_rows(path / "events.jsonl", last_bytes=max_log_bytes))
        """The end of the log, whole."""
        self.summary = read_json(path / "summary.json", self.notes)

    def _rows(self, path: Path) -> Iterator[Row]:
        """Yield the rows of a `.jsonl` file; note if it is missing, or how many lines are broken."""
        broken: list[int] = []
        yield from iterate_rows(path, broken)
        if not path.is_file():
            self.notes.append(f"{path.name} is missing")
        if broken:
            self.notes.append(f"{path.name}: {len(broken)} line(s) cut off or broken, left out")

    def _events(self, path: Path, max_bytes: int) -> Iterator[Event]:
        """Yield the event log, and keep of it what charts need."""
        stride, seen = 1 + (path.stat().st_size // max_bytes if path.is_file() else 0), Counter[str]()
        if stride > 1:
            last = f"the timeline shows its last {max_bytes / 1e6:.0f} MB"
            self.notes.append(f"{path.name} is long: {last}, lengths and rewards are those of one group in {stride}")
        for event in self._rows(path):
            yield event
            seen[kind := event["kind"]] += 1
            if kind in _RARE or (kind in _SAMPLED and seen[kind] % stride == 0):
                self.events.append(event)

    @property
    def changed_settings(self) -> dict[str, str]:
        """Return the settings that a resume changed: `"0.0001 until step 4, then 0.0002"` by `section.field`."""
        now, texts = flattened(self.config), dict[str, str]()
        for event in self.events:
            for key, was in table(event.get("was")).items() if event["kind"] == "settings" else ():
                texts[key] = f"{texts.get(key, '')}{was} until step {event['step']}, "
        return {key: f"{text}then {now.get(key)}" for key, text in texts.items()}

    @property
    def axes(self) -> dict[str, list[float | None]]:
        """Return what an axis of steps can be switched to, from step 0 on: samples and tokens trained, hours."""
        queue, trainer = (table(self.config.get(section)) for section in ("queue", "trainer"))
        group = [number(queue.get(name)) or 0.0 for name in ("groups_per_step", "samples_per_group")]
        per_step = math.prod(group) or number(trainer.get("batch_size")) or 0.0
        stride = 1 + len(self.metrics) // MAX_POINTS
        steps = [0.0, *(float(row["step"]) for row in self.metrics)]
        trained = [number(row.get("tokens_trained", row.get("tokens"))) or 0.0 for row in self.metrics]
        seconds = [0.0, *(number(row.get("time_s")) for row in self.metrics)]
        axes: dict[str, list[float | None]] = {
            "steps": list(steps),
            "samples": [per_step * step for step in steps],
            "tokens": list(accumulate(trained, initial=0.0)),
            "hours": [one and one / 3600 for one in seconds],
        }
        return {name: values[:-1:stride] + values[-1:] for name, values in axes.items()}  # the page interpolates

    @property
    def evaluations(self) -> list[Row]:
        """Return the held-out figures in order of steps: `accuracy`, other figures, `step`."""
        found = {event["step"]: event for event in self.events if event["kind"] == "eval"}
        return [event | table(event.get("figures")) for _, event in sorted(found.items())]

    @property
    def accuracy_is_called(self) -> str:
        """Return the name of the held-out figure: a mean reward if one of the rewards was neither 0 nor 1."""
        is_mean = any(row.get("called") == "mean reward" for row in self.evaluations)
        return "mean reward" if is_mean else "accuracy"


def _thinned(rows: Iterable[Row]) -> list[Row]:
    """Return every row in so many, so that there are at most `_MAX_GROUPS`."""
    kept, stride = list[Row](), 1
    for place, row in enumerate(rows):
        if place % stride == 0:
            kept.append(row)
        if len(kept) > _MAX_GROUPS:
            kept, stride = kept[::2], 2 * stride
    return kept
