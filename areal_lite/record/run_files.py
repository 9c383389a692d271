"""Reads and writes single files of a run folder; every reader of a run comes here.

Reading never fails on content. A flipped bit, a line cut off by a kill, a value of another kind, a file of an older
version: the row or file that does not have the expected shape is left out and named, and the rest counts.
"""

import contextlib
import json
import os
import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any, get_args

import msgspec

Row = dict[str, Any]
_UNREADABLE = (msgspec.MsgspecError, ValueError, OverflowError, RecursionError)


def shape(**fields: Any) -> Any:
    """Declare what `has_shape` expects of a JSON object.

    Args:
        fields: Types by key, where `float` is any number. A key that may hold null may be missing. Further keys may
            be there, and hold anything.
    """
    optional = {key for key, kind in fields.items() if type(None) in get_args(kind)}
    pairs = [(key, kind, None) if key in optional else (key, kind) for key, kind in fields.items()]
    return msgspec.defstruct("Shape", pairs, kw_only=True)


_Span = tuple[int, int, int]
_Figures = dict[str, float | None]


class _Message(msgspec.Struct):
    """A turn of a chat."""

    role: str
    content: str


class _Branch(msgspec.Struct, kw_only=True):
    """A completion in `samples.jsonl`."""

    text: str
    spans: list[_Span]
    tokens: int | None = None
    reward: float | None = None
    failure: str | None = None
    messages: list[_Message] | None = None
    parts: _Figures | None = None
    metrics: _Figures | None = None
    feedback: str | None = None
    step_rewards: list[tuple[int, float]] | None = None


class _Sampled(_Branch, kw_only=True):
    """A completion with its further branches."""

    branches: list[_Branch] | None = None


class _Generated(msgspec.Struct):
    """A sample in an event `group`."""

    end: float
    tokens: int
    spans: list[_Span]


_SHAPES = {
    "metrics": shape(step=int, time_s=float | None),
    "events": shape(time=float, lane=str, kind=str),
    "samples": shape(step=int, group=str, prompt=str | None, answer=str | None, row=Row | None, samples=list[_Sampled]),
}
"""What a row must have, by the file's name."""

_EVENT_SHAPES = {
    "group": shape(start=float, group=str, samples=list[_Generated]),
    "verify": shape(
        start=float, end=float, group_id=str, rewards=list[float | None] | None, scored_by_workflow=list[int] | None
    ),
    "running": shape(n=int),
    "stamped": shape(version=int),
    "published": shape(version=int | None),
    "lost": shape(worker=str),
    "rejoined": shape(worker=str),
    "scaled": shape(dismissed=list[str]),
    "eval": shape(step=int, start=float | None, rewards=_Figures | None),
    "checkpoint": shape(start=float | None),
    "settings": shape(step=int, was=Row),
}
"""The same of an event, by its kind, in addition to `_SHAPES`."""


def number(value: Any) -> float | None:
    """Return a finite number, or None in place of anything else, such as the largest float: it stands for infinity."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return float(value) if abs(value) < sys.float_info.max else None


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
    wanted, by_kind = _SHAPES.get(name, Row), _EVENT_SHAPES if name == "events" else {}
    for place, line in enumerate(_lines(path, last_bytes), start=1):
        row = load_line(line)
        if has_shape(row, wanted) and (not by_kind or has_shape(row, by_kind.get(row["kind"], Row))):
            yield row
        elif broken is not None and line.strip(b"\n"):
            broken.append(place)


def iterate_lines(lines: Iterable[bytes], key: str, broken: list[int]) -> Iterator[tuple[float, bytes]]:
    """Yield the lines of objects that have a number by this key, with the number, and little else of them read."""
    decoder = msgspec.json.Decoder(shape(**{key: float}))
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
    """Write a file whole or not at all; a link keeps pointing to it, and a pipe or device gets the content."""
    data = content.encode(errors="replace") if isinstance(content, str) else content
    if path.exists() and not path.is_file():
        path.write_bytes(data)
        return
    path = Path(os.path.realpath(path))
    temporary = path.with_name(f".{path.name}.tmp")
    remove(temporary)
    temporary.write_bytes(data)
    os.replace(temporary, path)


def remove(path: Path) -> None:
    """Delete a file or a whole folder, where there is one."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
