"""Reads and writes single files of a run folder; every reader of a run comes here.

Reading never fails on content. A flipped bit, a line cut off by a kill, a value of another kind, a file of an older
version: the row or file that does not have the expected shape is left out and named, and the rest counts.
"""

import contextlib
import json
import math
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

Row = dict[str, Any]
_UNREADABLE = (msgspec.MsgspecError, ValueError, OverflowError, RecursionError)


class Maybe(NamedTuple):
    """A shape that may be missing or null."""

    shape: Any


def shape(wanted: Any) -> Any:
    """Return the type of values read from JSON that `has_shape` compares with.

    Args:
        wanted: A type, where `float` is any number; keys with shapes, or `...` for any key, further keys may hold
            anything; `[shape of every entry]`; `(shape, shape)` for a list of that length; or a `Maybe`.
    """
    if isinstance(wanted, Maybe):
        return shape(wanted.shape) | None
    if isinstance(wanted, list):
        return list[shape(wanted[0])]  # type: ignore[misc]
    if isinstance(wanted, tuple):
        return tuple[tuple(map(shape, wanted))]  # type: ignore[misc]
    if not isinstance(wanted, dict):
        return wanted
    if not wanted or ... in wanted:
        return dict[str, shape(wanted.get(..., Any))]  # type: ignore[misc]
    fields = ((key, shape(one), None) if isinstance(one, Maybe) else (key, shape(one)) for key, one in wanted.items())
    return msgspec.defstruct("Shape", fields, kw_only=True)


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
"""What a row must have, by the file's name."""

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

_SHAPES = {name: shape(wanted) for name, wanted in _ROWS.items()}
_EVENT_SHAPES = {kind: shape(wanted) for kind, wanted in _EVENTS.items()}
_ANY = shape({})


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


def iterate_rows(path: Path, broken: list[int] | None = None, *, last_bytes: int = 0) -> Iterator[Row]:
    """Yield the rows of a `.jsonl` file that have what readers need, one after another; NaN and infinity are None.

    Args:
        broken: Gets the numbers of the lines that are left out.
        last_bytes: Of a longer file only so many are read, from the end; 0 = all.
    """
    name = path.name.partition(".")[0]
    wanted, by_kind = _SHAPES.get(name, _ANY), _EVENT_SHAPES if name == "events" else {}
    for place, line in enumerate(_lines(path, last_bytes), start=1):
        row = load_line(line)
        if has_shape(row, wanted) and (not by_kind or has_shape(row, by_kind.get(row["kind"], _ANY))):
            yield row
        elif broken is not None and line.strip(b"\n"):
            broken.append(place)


def iterate_lines(lines: Iterable[bytes], key: str, broken: list[int]) -> Iterator[tuple[float, bytes]]:
    """Yield the lines of objects that have a number by this key, with the number, and little else of them read."""
    decoder = msgspec.json.Decoder(shape({key: float}))
    for place, line in enumerate(lines, start=1):
        try:
            yield getattr(decoder.decode(line), key), line
        except _UNREADABLE:
            if (found := number(table(load_line(line)).get(key))) is not None:
                yield found, line
            elif line.strip(b"\n"):
                broken.append(place)


def _lines(path: Path, last_bytes: int) -> Iterator[bytes]:
    if path.is_file():
        with path.open("rb") as file:
            if 0 < last_bytes < path.stat().st_size:
                file.seek(-last_bytes, os.SEEK_END)
                file.readline()  # the end of one
            yield from file


def load_line(line: bytes) -> Any:
    """Read a line, None for one that is no JSON; msgspec is fast, and json reads what msgspec is too strict for."""
    try:
        return msgspec.json.decode(line)
    except _UNREADABLE:
        with contextlib.suppress(ValueError, RecursionError):
            text = line.decode(errors="replace")
            return json.loads(text, parse_constant=lambda _: None, parse_float=lambda text: number(float(text)))
    return None


def has_shape(value: Any, wanted: Any) -> bool:
    """Compare a value read from JSON with what `shape` returned."""
    try:
        msgspec.convert(value, wanted)
    except _UNREADABLE:
        return False
    return True


def missing_steps(steps: Iterable[int]) -> str:
    """Name the steps up to the last of some steps that are not among them.

    >>> missing_steps([2, 3, 5, 9])
    '1, 4, 6-8'
    """
    known = sorted({0, *steps})
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
