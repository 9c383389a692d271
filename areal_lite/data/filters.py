"""Which tasks of a source are used: `filter.ranges` before tokenising, `filter.max_prompt_tokens` after it.

Called by `source.py`. What is left out is counted and logged; nothing left at all is an error.
"""

import difflib
import logging
from collections.abc import Mapping, Sequence
from typing import Any

from areal_lite.data.prompts import Task
from areal_lite.errors import DataError

__all__ = ["in_ranges", "report_left_out"]

_log = logging.getLogger(__name__)


def in_ranges(tasks: Sequence[Task], ranges: Mapping[str, tuple[float, float]], *, where: str) -> list[Task]:
    """Return the tasks whose columns lie in all ranges; a cell that is empty or no number lies in none.

    Args:
        tasks: Of one split.
        ranges: Lowest and highest value by column.
        where: The recipe's section, for messages.

    Raises:
        DataError: No task has such a column, or none lies in the ranges.
    """
    if not tasks:  # nothing is held out: no column can be missing
        return []
    known = sorted({name for task in tasks for name in task.row})
    for column in ranges:
        if column not in known:
            near = difflib.get_close_matches(column, known, n=1, cutoff=0.0)
            raise DataError(
                f"{where}.filter.ranges names the column {column!r}, which no row has"
                + (f": did you mean {near[0]!r}?" if near else ": there are no further columns")
            )
    kept = list(tasks)
    for column, (low, high) in ranges.items():
        num_before = len(kept)
        kept = [task for task in kept if _lies_between(task.row.get(column), low, high)]
        report_left_out(
            num_before - len(kept), num_rows=num_before, option=f"{where}.filter.ranges.{column}=[{low:g}, {high:g}]"
        )
    return kept


def report_left_out(num_left_out: int, *, num_rows: int, option: str) -> None:
    """Log how many rows a filter left out.

    Raises:
        DataError: All of them.
    """
    if not num_left_out:
        return
    if num_left_out == num_rows:
        raise DataError(f"{option} leaves out all {num_rows} rows: widen it")
    _log.info("%s leaves out %d of %d rows", option, num_left_out, num_rows)


def _lies_between(value: Any, low: float, high: float) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and low <= value <= high
