"""What a run folder holds, as far as it can be read: a gap or a half-written line is a note, not an error.

A run that is still going can be read at any moment.
"""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from areal_lite.errors import DataError
from areal_lite.record.run_folder import flattened, read_rows

Row = dict[str, Any]

_NEEDED = {
    "group": ("start", "group", "samples"),
    "verify": ("start", "end", "group_id"),
    "running": ("n",),
    "stamped": ("version",),
    "lost": ("worker",),
    "rejoined": ("worker",),
    "eval": ("step",),
    "settings": ("step", "was"),
}
"""What an event must have to be drawn, beside time, lane and kind."""

_FILES = ("config.json", "metrics.jsonl", "events.jsonl")


class RunFiles:
    """The files of one run; what is missing is empty."""

    def __init__(self, path: Path, *, name: str = "") -> None:
        """Read a run folder, whose name in titles and legends is its own by default.

        Raises:
            DataError: It holds nothing of a run.
        """
        if not any((path / name).is_file() for name in _FILES):
            what = "no such folder" if not path.is_dir() else f"a folder with none of {', '.join(_FILES)}"
            raise DataError(
                f"expected the folder of a run, got {path}, {what}: name one that areal-lite train, sft, ... made"
            )
        self.name = name or path.resolve().name
        self.notes: list[str] = []
        """What is missing or broken, one sentence each."""
        self.config = read_json(path / "config.json", self.notes)
        self.command = str(self.config.get("command", "train"))
        """That made it: train, sft, reward_model or dpo."""
        # An offline run generates nothing, and so has no samples.
        self.samples = _rows(path / "samples.jsonl", self.notes) if self.command == "train" else []
        self.metrics = [row for row in _rows(path / "metrics.jsonl", self.notes) if isinstance(row.get("step"), int)]
        self.last = self.metrics[-1] if self.metrics else {}
        """The newest row of metrics."""
        self.events = list(filter(_is_event, _rows(path / "events.jsonl", self.notes)))
        self.summary = read_json(path / "summary.json", self.notes)

    @property
    def changed_settings(self) -> dict[str, str]:
        """Settings that a resume changed, by `section.field`: what they were until which step, and are now."""
        now, texts = flattened(self.config), dict[str, str]()
        for event in self.events:
            for key, was in table(event.get("was")).items() if event["kind"] == "settings" else ():
                texts[key] = f"{texts.get(key, '')}{was} until step {event['step']}, "
        return {key: f"{text}then {now.get(key)}" for key, text in texts.items()}

    @property
    def evaluations(self) -> list[Row]:
        """Figures over the held-out prompts, by completed steps: `accuracy`, and what else was measured; `time_s`."""
        times = {0: 0.0} | {row["step"]: row.get("time_s") for row in self.metrics}
        found = {event["step"]: event for event in self.events if event["kind"] == "eval"}
        return [
            event | table(event.get("figures")) | {"time_s": times.get(step)} for step, event in sorted(found.items())
        ]

    @property
    def accuracy_is_called(self) -> str:
        """What the held-out figure is: a mean reward where one of them was neither 0 nor 1."""
        called = {row.get("called") for row in self.evaluations}
        return "mean reward" if "mean reward" in called else "accuracy"


def read_json(path: Path, notes: list[str]) -> Row:
    """Read a JSON object; a missing or broken one is empty, and noted."""
    try:
        return dict(json.loads(path.read_text(errors="replace"), parse_constant=lambda _: None))
    except FileNotFoundError:
        notes.append(f"{path.name} is missing")
    except (OSError, ValueError, TypeError) as error:
        notes.append(f"{path.name} cannot be read: {error}")
    return {}


def table(value: Any) -> Row:
    """Return a mapping, or an empty one in place of anything else."""
    return dict(value) if isinstance(value, Mapping) else {}


def number(value: Any) -> float | None:
    """Return a finite number, or None in place of anything else."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return float(value) if is_number and math.isfinite(value) else None


def numbers(values: Any) -> dict[str, float]:
    """Return the finite numbers of a mapping; nothing in place of anything else."""
    return {str(name): known for name, value in table(values).items() if (known := number(value)) is not None}


def _is_event(row: Row) -> bool:
    is_placed = number(row.get("time")) is not None and all(isinstance(row.get(key), str) for key in ("lane", "kind"))
    return is_placed and all(row.get(key) is not None for key in _NEEDED.get(row["kind"], ()))


def _rows(path: Path, notes: list[str]) -> list[Row]:
    """Return the whole rows of a `.jsonl` file; that it is missing, or how many others there are, is noted."""
    rows, broken = read_rows(path)
    if not path.is_file():
        notes.append(f"{path.name} is missing")
    if broken:
        notes.append(f"{path.name}: {len(broken)} line(s) cut off or broken, left out")
    return rows
