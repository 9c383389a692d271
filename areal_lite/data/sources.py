"""The sources of tasks, by the kind that a recipe names: built in, files, or a plug-in's function."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from areal_lite.config.data import FILE_SOURCES, SourceConfig, Split
from areal_lite.config.plugins import find_function
from areal_lite.data.arith import arith_problems
from areal_lite.data.rows import Problems, RowReader, Rows, check_columns, make_each
from areal_lite.data.tasks import Task, make_task
from areal_lite.errors import ArealLiteError, PluginError


def load_tasks(source: SourceConfig, split: Split, *, where: str) -> list[Task]:
    """Make or read the tasks of a split, the same ones for the same settings.

    Args:
        split: No task of `eval` is in `train` where the source is built in; `eval` may be empty where it is not.
        where: The recipe's section, for messages: `data` or `data.mix.<name>`.

    Raises:
        DataError: A file is missing or empty, a column is in no row, two columns get one name, or too many rows are
            broken.
        PluginError: A plug-in's function is missing, or fails.
        ConfigError: A built-in source cannot make what is asked for.
    """
    if source.source in FILE_SOURCES:
        read = RowReader(source).read(split)
        return [] if read is None else _tasks(*read, source, where=where)
    if source.source == "arith":
        made = arith_problems(source.arith, split)
        return [replace(task, origin=f"{where}{task.origin.removeprefix('data')}") for task in made]
    rows = _plugin_rows(source, split, where=where)
    return _tasks(f"{source.source} {split}", list(enumerate(rows)), [], source, where=where)


def _plugin_rows(source: SourceConfig, split: Split, *, where: str) -> list[dict[str, Any]]:
    function = find_function(source.source, kind="source")
    try:
        return [dict(row) for row in function(split, **source.arguments)]
    except ArealLiteError:
        raise
    except Exception as error:  # user code
        raise PluginError(
            f"{where}.source={source.source} must return rows of the split {split!r}, called with the arguments "
            f"{source.arguments}; it raised {type(error).__name__}: {error}"
        ) from error


def _tasks(name: Path | str, rows: Rows, problems: Problems, source: SourceConfig, *, where: str) -> list[Task]:
    rows = with_columns(rows, name, source, where=where)

    def make(number: int, row: dict[str, Any]) -> Task:
        shown = None if source.source in FILE_SOURCES else row.pop("demonstration", None)
        return make_task(
            _renamed(row, source.columns),
            origin=f"{name}:{number}",
            prompt_column=source.prompt_column,
            answer_column=source.answer_column,
            demonstration=shown,
        )

    return make_each(rows, make, problems=problems, name=name, data=source, where=where)


def with_columns(rows: Rows, name: Path | str, source: SourceConfig, *, where: str) -> Rows:
    """Add the columns inside columns that a source names; a `DataError` where one that it names is in no row."""
    options = {f"{where}.prompt_column": source.prompt_column, f"{where}.answer_column": source.answer_column}
    options |= {f"{where}.columns.{new}": old for new, old in source.columns.items()}
    rows = [(number, with_inner(row, options.values())) for number, row in rows]
    check_columns(name, rows, columns=options)
    return rows


def with_inner(row: dict[str, Any], names: Iterable[str]) -> dict[str, Any]:
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
    if clash := [new for old, new in old_names.items() if old in row and new in row and new not in old_names]:
        raise ValueError(f"there is a column {clash[0]!r} already, which data.columns gives to another: choose another")
    return {old_names.get(name, name): value for name, value in row.items()}
