"""The sources that read rows from files: JSONL, Parquet, and what the library `datasets` loads.

Called by `sources.py`. A column keeps its name unless the recipe gives it another one; what no row has is named with
the option that asked for it.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, cast

from areal_lite.config.sections import SourceConfig
from areal_lite.data.prompts import Task, check_columns, make_task, report_problems
from areal_lite.data.rows import RowReader

__all__ = ["file_tasks"]


def file_tasks(source: SourceConfig, split: Literal["train", "eval"], *, where: str) -> list[Task]:
    """Read the tasks of a split.

    Args:
        source: Of kind jsonl, parquet or dataset.
        split: `eval` without an `eval_path` is a dataset's own held-out split, or empty.
        where: The recipe's section, for messages.

    Raises:
        DataError: A file is missing or empty, a column is in no row, two columns get one name, or too many rows are
            broken.
    """
    kind = cast(Literal["jsonl", "parquet", "dataset"], source.source)
    reader = RowReader(kind, allow_hub=True)
    path = _path(source, split, reader)
    if path is None:
        return []
    rows, problems = reader.read(path, split=split)
    wanted = (source.prompt_column, source.answer_column, *source.columns.values())
    rows = [(number, _with_inner(row, wanted)) for number, row in rows]
    check_columns(path, rows, columns=_columns(source, where))
    tasks = []
    for number, row in rows:
        try:
            tasks.append(
                make_task(
                    _renamed(row, source.columns),
                    origin=f"{path}:{number}",
                    prompt_column=source.prompt_column,
                    answer_column=source.answer_column,
                )
            )
        except ValueError as error:
            problems.append((number, str(error)))
    report_problems(
        path,
        sorted(problems),
        num_rows=len(tasks) + len(problems),
        max_bad_fraction=source.max_bad_fraction,
        unit="line" if kind == "jsonl" else "row",
        where=where,
    )
    return tasks


def _path(source: SourceConfig, split: Literal["train", "eval"], reader: RowReader) -> Path | None:
    train = Path(str(source.path))  # a recipe without one is refused before
    if split == "train":
        return train
    if source.eval_path is not None:
        return Path(source.eval_path)
    return train if reader.has_held_out_split(train) else None


def _columns(source: SourceConfig, where: str) -> dict[str, str]:
    """Return the columns that some row must have, by the option that names them."""
    return {
        f"{where}.prompt_column": source.prompt_column,
        f"{where}.answer_column": source.answer_column,
        **{f"{where}.columns.{new}": old for new, old in source.columns.items()},
    }


def _with_inner(row: dict[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """Add what a name with dots reaches inside a column: `reward_model.ground_truth`."""
    found = {}
    for name in names:
        value: Any = row
        for part in name.split(".") if name not in row else ():
            value = value.get(part) if isinstance(value, Mapping) else None
        if value is not None and value is not row:
            found[name] = value
    return row | found


def _renamed(row: Mapping[str, Any], columns: Mapping[str, str]) -> dict[str, Any]:
    old_names = {old: new for new, old in columns.items()}
    clash = [new for old, new in old_names.items() if old in row and new in row and new not in old_names]
    if clash:
        raise ValueError(f"there is a column {clash[0]!r} already, which data.columns gives to another: choose another")
    return {old_names.get(name, name): value for name, value in row.items()}
