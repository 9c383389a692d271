"""Reads and writes single files of a run folder; every reader of a run comes here.

Reading never fails on content. A flipped bit, a line cut off by a kill, a value of another kind, a file of an older
version: the row or file that does not have the expected shape is left out and named, and the rest counts.
"""

import json
import math
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

Row = dict[str, Any]


class Maybe(NamedTuple):
    """A shape that may be missing or null."""

    shape: Any


_SPAN = (int, int, int)
_MESSAGE = {"role": str, "content": str}
_SAMPLE = {
    "text": str,
    "tokens": Maybe(int),
    "reward": Maybe(float),
    "failure": Maybe(str),
    "spans": [_SPAN],
    "messages": Maybe([_MESSAGE]),
    "parts": Maybe({...: Maybe(float)}),
    "metrics": Maybe({...: Maybe(float)}),
    "feedback": Maybe(str),
    "step_rewards": Maybe([(int, float)]),
}
_ROWS: dict[str, Any] = {
    "metrics": {"step": int, "time_s": Maybe(float)},
    "events": {"time": float, "lane": str, "kind": str},
    "samples": {
        "step": int,
        "group": str,
        "prompt": Maybe(str),
        "answer": Maybe(str),
        "row": Maybe({}),
        "samples": [_SAMPLE | {"branches": Maybe([_SAMPLE])}],
    },
}
"""What a row must have, by the file's name: a type; keys with shapes, `...` for all other keys; `[shape of every
entry]`; `(shape, shape)` for a list of that length. Further keys may hold anything."""

_EVENTS: dict[str, Any] = {
    "group": {"start": float, "group": str, "samples": [{"end": float, "tokens": int, "spans": [_SPAN]}]},
    "verify": {"start": float, "end": float, "group_id": str, "rewards": Maybe([Maybe(float)])},
    "running": {"n": int},
    "stamped": {"version": int},
    "published": {"version": Maybe(int)},
    "lost": {"worker": str},
    "rejoined": {"worker": str},
    "eval": {"step": int, "start": Maybe(float), "rewards": Maybe({...: Maybe(float)})},
    "checkpoint": {"start": Maybe(float)},
    "settings": {"step": int, "was": {}},
}
"""The same of an event, by its kind, in addition to `_ROWS`."""


def number(value: Any) -> float | None:
    """Return a finite number, or None in place of anything else."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:
        return None


def numbers(values: Any) -> dict[str, float]:
    """Return the finite numbers of a mapping; nothing in place of anything else."""
    return {str(name): known for name, value in table(values).items() if (known := number(value)) is not None}


def table(value: Any) -> Row:
    """Return a mapping, or an empty one in place of anything else."""
    return dict(value) if isinstance(value, Mapping) else {}


def read_json(path: Path, notes: list[str] | None = None) -> Row:
    """Read a JSON object; a missing or broken one is empty, and noted. NaN and infinity become None."""
    notes = [] if notes is None else notes
    try:
        content = json.loads(path.read_text(errors="replace"), parse_constant=lambda _: None)
    except FileNotFoundError:
        notes.append(f"{path.name} is missing")
    except (OSError, ValueError, RecursionError) as error:
        notes.append(f"{path.name} cannot be read: {error}")
    else:
        if isinstance(content, dict):
            return content
        notes.append(f"{path.name} cannot be read: expected a JSON object, got {type(content).__name__}")
    return {}


def read_summary(folder: Path) -> Row:
    """Return a run's summary; empty where there is none that can be read: the run's next end writes another."""
    return read_json(folder / "summary.json")


def read_rows(path: Path) -> tuple[list[Row], list[int]]:
    """Return the rows of a `.jsonl` file, none where there is no file, and the numbers of the lines left out."""
    broken: list[int] = []
    return list(iterate_rows(path, broken)), broken


def iterate_rows(path: Path, broken: list[int] | None = None, *, shape: Any = None) -> Iterator[Row]:
    """Yield the rows of a `.jsonl` file, one after another: a long event log never has to fit into memory.

    Args:
        broken: Gets the numbers of the lines that are left out.
        shape: What a row must have, in the form of `_ROWS`; by default what readers of such a file need.
    """
    if path.is_file():
        with path.open(errors="replace", newline="\n") as file:
            expected = _ROWS.get(path.name.partition(".")[0], {}) if shape is None else shape
            yield from parse_rows(file, broken, shape=expected)


def parse_rows(lines: Iterable[str], broken: list[int] | None = None, *, shape: Any) -> Iterator[Row]:
    """Yield the rows of such a shape; NaN and infinity, which JSON does not have, are None."""
    for place, line in enumerate(lines, start=1):
        if not line.strip("\n"):
            continue
        try:
            row = json.loads(line, parse_constant=lambda _: None)
        except (ValueError, RecursionError):
            row = None
        if has_shape(row, shape) and (shape is not _ROWS["events"] or has_shape(row, _EVENTS.get(row["kind"], {}))):
            yield row
        elif broken is not None:
            broken.append(place)


def has_shape(value: Any, shape: Any) -> bool:
    """Compare a value read from JSON with a shape, written as in `_ROWS`; `float` is any finite number."""
    if isinstance(shape, Maybe):
        return value is None or has_shape(value, shape.shape)
    if isinstance(shape, dict):
        if not isinstance(value, dict):
            return False
        rest = shape.get(...)
        if rest and not all(has_shape(one, rest) for key, one in value.items() if key not in shape):
            return False
        return all(has_shape(value.get(key), one) for key, one in shape.items() if key is not ...)
    if isinstance(shape, list):
        return isinstance(value, list) and all(has_shape(one, shape[0]) for one in value)
    if isinstance(shape, tuple):
        return isinstance(value, list) and len(value) == len(shape) and all(map(has_shape, value, shape))
    if shape is float:
        return number(value) is not None
    return isinstance(value, shape) and not isinstance(value, bool)


def missing_steps(rows: Iterable[Row]) -> str:
    """Name the steps between the first and the last of rows of metrics that no row is of.

    >>> missing_steps([{"step": step} for step in (2, 3, 5, 9)])
    '1, 4, 6-8'
    """
    known = sorted({0, *(int(row["step"]) for row in rows)})
    gaps = [(before + 1, after - 1) for before, after in pairwise(known) if after - before > 1]
    return ", ".join(f"{first}-{last}" if last > first else str(first) for first, last in gaps)


def write_whole(path: Path, content: str | bytes) -> None:
    """Write a file whole or not at all."""
    temporary = path.with_name(f".{path.name}.tmp")
    remove(temporary)
    temporary.write_bytes(content.encode(errors="replace") if isinstance(content, str) else content)
    os.replace(temporary, path)


def remove(path: Path) -> None:
    """Delete a file or a whole folder, where there is one."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
