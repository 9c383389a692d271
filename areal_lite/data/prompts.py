"""Tasks before they are tokenised, and the rows of files that they are made of.

Called by the sources, `rows.py` and `offline.py`. Knows nothing of tokenizers or templates; a broken row is counted,
named by file and number, and tolerated up to a share.
"""

import difflib
import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgpack

from areal_lite.config.data import RESERVED_COLUMNS
from areal_lite.errors import DataError, WireError
from areal_lite.wire import encode

__all__ = ["Task", "check_columns", "make_task", "read_jsonl", "report_problems"]

_log = logging.getLogger(__name__)
_OPTIONAL_COLUMNS = ("verifier", "workflow", "max_new_tokens")
"""Columns with a meaning of their own; an empty cell, such as tables have, is no word at all."""
_SHOWN = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One prompt before it is tokenised.

    Example: `Task(origin="train.jsonl:17", prompt="7+25=?", answer="32", row={"level": 2})`
    """

    origin: str
    """Where it came from, for messages."""
    prompt: str
    """Text of the prompt column; empty where it holds messages."""
    answer: str
    """Text of the answer column."""
    messages: tuple[Mapping[str, Any], ...] = ()
    """A chat that the model is to continue, in place of a text."""
    row: Mapping[str, Any] = field(default_factory=dict)
    """The other columns."""
    demonstration: tuple[Mapping[str, str], ...] | str | None = None
    """A worked completion; or the turns of an episode as `{"role": "assistant" or "environment", "content": ...}`."""


def read_jsonl(path: Path) -> tuple[list[tuple[int, dict[str, Any]]], list[tuple[int, str]]]:
    """Split a file into rows and problems, each with its line number (from 1).

    Raises:
        DataError: There is no file, or nothing in it.
    """
    if not path.is_file():
        raise DataError(
            f"a JSONL file is needed, there is none at {path.absolute()}: correct data.path or data.eval_path"
        )
    rows, problems = [], []
    with path.open("rb") as file:
        for line, raw in enumerate(file, start=1):
            if not raw.strip():
                continue
            try:
                rows.append((line, _parse_line(raw)))
            except (ValueError, OverflowError, RecursionError) as error:
                problems.append((line, f"{error}"))
    if not rows and not problems:
        raise DataError(f"{path} holds no rows: a JSONL file has one JSON object a line")
    return rows, problems


def _parse_line(raw: bytes) -> dict[str, Any]:
    row = json.loads(raw)
    if not isinstance(row, dict):
        raise ValueError(f"a row must be a JSON object, got {type(row).__name__}")
    msgpack.packb(row)  # lone surrogates and numbers beyond 64 bit would fail much later, on the wire
    return row


def check_columns(path: Path, rows: Sequence[tuple[int, dict[str, Any]]], *, columns: Mapping[str, str]) -> None:
    """Tell a wrong column name, which no row has, from a broken row."""
    known = sorted({name for _, row in rows for name in row})
    for option, column in columns.items():
        if known and column not in known:
            near = difflib.get_close_matches(column, known, n=1, cutoff=0.5)
            raise DataError(
                f"{path} has no column {column!r} in any row, only {', '.join(known)}: set {option}"
                + (f" (nearest: {near[0]!r})" if near else "")
            )


def make_task(row: Mapping[str, Any], *, origin: str, prompt_column: str, answer_column: str) -> Task:
    """Take a row of a file apart.

    Args:
        row: Columns by name.
        origin: Names the row in messages.
        prompt_column: Column with the prompt, a non-empty text or a list of chat messages.
        answer_column: Column with the reference answer, a text or a number.

    Raises:
        ValueError: The row is none of the kind, or holds what cannot travel between processes.
    """
    prompt, answer = (row.get(column) for column in (prompt_column, answer_column))
    messages = _chat_of(prompt)
    text = "" if messages else prompt
    if not isinstance(text, str) or not (messages or text.strip()):
        raise ValueError(
            f"column {prompt_column!r} must hold a non-empty text, or chat messages with role and content, got "
            f"{prompt!r:.60}"
        )
    if not isinstance(answer, str | int | float):
        raise ValueError(f"column {answer_column!r} must hold a text or a number, got {answer!r:.60}")
    others = {
        name: value
        for name, value in row.items()
        if name not in (prompt_column, answer_column) and not (value is None and name in _OPTIONAL_COLUMNS)
    }
    clash = [name for name in RESERVED_COLUMNS if name in others]
    if clash:
        raise ValueError(
            f"column {clash[0]!r} has the name of a verifier argument: rename it with data.columns, or make it "
            "data.prompt_column or data.answer_column"
        )
    _check_columns_travel({"prompt": prompt, "answer": answer, **others})
    return Task(origin=origin, prompt=text, messages=messages, answer=str(answer), row=others)


def _chat_of(prompt: Any) -> tuple[Mapping[str, Any], ...]:
    """Return a prompt's chat messages; none where it is something else."""
    is_chat = isinstance(prompt, list) and all(
        isinstance(message, dict) and {"role", "content"} <= message.keys() for message in prompt
    )
    return tuple(prompt) if is_chat else ()


def _check_columns_travel(columns: Mapping[str, Any]) -> None:
    """Now better than much later, in the middle of a run."""
    for name, value in columns.items():
        try:
            encode(value)
        except WireError as error:
            raise ValueError(
                f"column {name!r} holds what cannot travel between processes, {value!r:.60} "
                f"({error.__cause__ or error}): make it text, numbers, or lists and mappings of them, or remove it"
            ) from error


def report_problems(
    path: Path,
    problems: Sequence[tuple[int, str]],
    *,
    num_rows: int,
    max_bad_fraction: float,
    unit: str = "line",
    where: str = "data",
) -> None:
    """Log the broken rows, given as (number, what is wrong); `where` is the recipe's section.

    Raises:
        DataError: There are too many.
    """
    for number, problem in problems[:_SHOWN]:
        _log.warning("%s:%d is left out: %s", path, number, problem)
    if not problems:
        return
    summary = f"{len(problems)} of {num_rows} rows of {path} are broken"
    _log.warning("%s", summary)
    if len(problems) == num_rows or len(problems) > max_bad_fraction * num_rows:
        number, problem = problems[0]
        raise DataError(
            f"{summary}, more than {where}.max_bad_fraction={max_bad_fraction} allows; the first is {unit} {number}: "
            f"{problem}. Repair the file, or raise {where}.max_bad_fraction"
        )
