"""Raw rows: a JSONL or Parquet file, a folder of the `datasets` library, or one of its hub ids.

Nothing is cached but what `datasets` fetched from the hub, in its own cache.
"""

import json
import logging
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from areal_lite.config.data import FILE_SOURCES, RowsConfig, SourceConfig, Split, is_hub_id
from areal_lite.config.suggestion import suggestion
from areal_lite.errors import ArealLiteError, DataError

_log = logging.getLogger(__name__)
_SHOWN = 10
"""Broken rows that are logged one by one."""
EVAL_SIZE = 256
"""Held-out rows of files that are used at most, where the recipe has no `data.eval_size`."""

T = TypeVar("T")

Rows = list[tuple[int, dict[str, Any]]]
"""Each row with its line number (from 1) in a file, or its row number (from 0) in a dataset."""
Problems = list[tuple[int, str]]
"""What is wrong with the rows that cannot be read, by the same numbers."""

_HELD_OUT_SPLITS = ("validation", "eval", "test")


class RowReader:
    """Reads what a section of a recipe names; a dataset is loaded once, however often it is asked for."""

    def __init__(self, data: RowsConfig) -> None:
        self._data, self._splits = data, cache(_load_dataset)

    def read(self, split: Split) -> tuple[Path, Rows, Problems] | None:
        """Return where the rows of a split are, and the rows; None where nothing is held out.

        Held-out rows are in `eval_path`, or in the first of a dataset's splits validation, eval and test.

        Raises:
            DataError: There is no such file, folder or dataset, it holds nothing, or lacks the split.
        """
        data = self._data
        is_shared = split == "eval" and data.eval_path is None
        path = Path(str(data.path if split == "train" or is_shared else data.eval_path))
        if data.source != "dataset":
            if split == "train" and data.path == data.eval_path:
                _log.warning("data.eval_path is data.path, %s: the rows that evaluate the model train it", path)
            if is_shared:
                return None
            return (path, *read_jsonl(path)) if data.source == "jsonl" else (path, read_parquet(path), [])
        splits = self._splits(path, isinstance(data, SourceConfig))
        is_only = len(splits) == 1 and split == "eval" and not is_shared
        wanted = ("train",) if split == "train" else tuple(splits) if is_only else _HELD_OUT_SPLITS
        found = next((name for name in wanted if name in splits), None)
        if found is None and is_shared:
            return None
        if found is None:
            raise DataError(f"{path} must have a split named {' or '.join(wanted)}, got {', '.join(splits)}")
        if not (rows := splits[found].to_list()):
            raise DataError(f"the split {found} of {path} holds no rows")
        return path, list(enumerate(rows)), []


def read_jsonl(path: Path) -> tuple[Rows, Problems]:
    """Split a file into rows and problems, each with its line number (from 1); a `DataError` where nothing is there."""
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
                row = json.loads(raw)
                if not isinstance(row, dict):
                    raise ValueError(f"a row must be a JSON object, got {type(row).__name__}")
                rows.append((line, row))
            except (ValueError, RecursionError) as error:
                problems.append((line, str(error)))
    if not rows and not problems:
        raise DataError(f"{path} holds no rows: a JSONL file has one JSON object a line")
    return rows, problems


def read_parquet(path: Path) -> Rows:
    """Read a Parquet file; a `DataError` where there is none, or it holds nothing."""
    from pyarrow.parquet import ParquetFile

    if not path.is_file():
        raise DataError(
            f"data.source=parquet needs a Parquet file, there is none at {path.absolute()}: correct data.path or "
            "data.eval_path, or set data.source=dataset for a folder"
        )
    try:
        rows = ParquetFile(path).read().to_pylist()
    except Exception as error:  # pyarrow's own, and what Python's dates and time zones cannot be
        raise DataError(f"{path} is not readable as Parquet: {error}") from error
    if not rows:
        raise DataError(f"{path} holds no rows")
    return list(enumerate(rows))


def _load_dataset(path: Path, may_be_hub_id: bool) -> dict[str, Any]:
    """Return the splits of a folder or hub id by name; a single dataset counts as `train`."""
    import datasets

    is_hub = may_be_hub_id and is_hub_id(str(path))
    if not is_hub and not path.is_dir():
        raise DataError(
            f"data.source=dataset needs a folder, there is none at {path.absolute()}: correct data.path or "
            "data.eval_path, or set data.source=jsonl for a file"
        )
    try:
        if is_hub:
            name, _, configuration = str(path).partition(":")
            return dict(datasets.load_dataset(name, configuration or None))
        datasets.disable_progress_bars()
        if (path / "dataset_dict.json").is_file() or (path / "state.json").is_file():
            loaded = datasets.load_from_disk(str(path), keep_in_memory=True)
        else:
            with tempfile.TemporaryDirectory() as folder:
                loaded = datasets.load_dataset(str(path), cache_dir=folder, keep_in_memory=True)
    except Exception as error:  # connection errors of several libraries, and whatever a broken folder gives rise to
        what = "is no folder, and cannot be loaded as a dataset of the hub" if is_hub else "is no readable dataset"
        raise DataError(
            f"{path} {what} ({type(error).__name__}: {error}): correct data.path, or give the folder of a dataset that "
            "was downloaded"
        ) from error
    return dict(loaded) if isinstance(loaded, dict) else {"train": loaded}


def check_columns(path: Path | str, rows: Sequence[tuple[int, dict[str, Any]]], *, columns: Mapping[str, str]) -> None:
    """Tell a wrong column name, which no row has, from a broken row."""
    known = sorted({str(name) for _, row in rows for name in row})
    for option, column in columns.items():
        if known and column not in known:
            there = {*known} | {
                f"{name}.{key}" for _, row in rows for name in row if isinstance(row[name], dict) for key in row[name]
            }
            raise DataError(
                f"{path} has no column {column!r} in any row, only {', '.join(sorted(there))}: set {option}"
                + suggestion(column, there - {*columns.values()})
            )


def make_each(
    rows: Rows,
    make: Callable[[int, dict[str, Any]], T],
    *,
    problems: Problems,
    name: Path | str,
    data: RowsConfig,
    where: str = "data",
) -> list[T]:
    """Make something of each row, and log the broken ones.

    Args:
        make: From a row's number and columns; raises `ValueError` where the row is broken.
        problems: Of rows that could not be read.
        data: The section that names them; its place is `where`.

    Raises:
        DataError: The share of broken rows is above `max_bad_fraction`.
    """
    made, broken = [], list(problems)
    for number, row in rows:
        try:
            made.append(make(number, row))
        except ArealLiteError:
            raise
        except ValueError as error:
            broken.append((number, str(error)))
    broken.sort()
    for number, problem in broken[:_SHOWN]:
        _log.warning("%s:%d is left out: %s", name, number, problem)
    if broken:
        num_rows = len(made) + len(broken)
        summary = f"{len(broken)} of {num_rows} rows of {name} are broken"
        _log.warning("%s", summary)
        if not made or len(broken) > data.max_bad_fraction * num_rows:
            number, problem = broken[0]
            to_do = "Repair them" + f", or raise {where}.max_bad_fraction" * (data.max_bad_fraction > 0)
            raise DataError(
                f"{summary}, more than {where}.max_bad_fraction={data.max_bad_fraction} allows; the first is "
                f"{'line' if data.source == 'jsonl' else 'row'} {number}: {problem}. {to_do}"
            )
    return made


def used_to_evaluate(held_out: list[T], data: RowsConfig, *, where: str = "data") -> list[T]:
    """Return at most `eval_size` of the held-out rows, evenly spaced: a file may be sorted, by subject for example."""
    limit = data.eval_size or (EVAL_SIZE if data.source in FILE_SOURCES else len(held_out))
    if len(held_out) <= limit:
        return held_out
    _log.info("%s.eval_size: %d of %d held-out rows are used, evenly spaced", where, limit, len(held_out))
    return [held_out[index * len(held_out) // limit] for index in range(limit)]
