"""Raw rows: a JSONL file, Parquet files, a folder of the `datasets` library, or one of its hub ids.

Nothing is cached but what `datasets` fetched from the hub, in its own cache.
"""

import json
import logging
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, Literal, TypeVar

from areal_lite.config.data import SourceConfig, Split, is_hub_id
from areal_lite.config.offline import OfflineDataConfig
from areal_lite.config.suggestion import suggestion
from areal_lite.errors import ArealLiteError, DataError

_log = logging.getLogger(__name__)
_SHOWN = 10
"""Broken rows that are logged one by one."""

T = TypeVar("T")

Rows = list[tuple[int, dict[str, Any]]]
"""Each row with its line number (from 1) in a file, or its row number (from 0) in a dataset."""

_HELD_OUT_SPLITS = ("validation", "eval", "test")


class RowReader:
    """Reads rows; a dataset is loaded once, however often it is asked for."""

    def __init__(self, source: Literal["jsonl", "parquet", "dataset"], *, allow_hub: bool = False) -> None:
        """Prepare to read one kind.

        Args:
            source: `jsonl` = files; `parquet` = files, or folders of them; `dataset` = folders that `save_to_disk`
                wrote, or with data files (parquet, json, csv) in them.
            allow_hub: Whether the path of a `dataset` may be a hub id.
        """
        self._source, self._allow_hub = source, allow_hub
        self._datasets: dict[Path, dict[str, Any]] = {}

    def read(self, path: Path, *, split: Split, limit: int | None = None) -> tuple[Rows, list[tuple[int, str]]]:
        """Read all rows of a file, folder or hub id, and what is wrong with those that cannot be read.

        Args:
            split: Which of a folder's splits: `train`; or the first of validation, eval and test, or the only one.
            limit: Of files, only so many lines or rows from the start.

        Raises:
            DataError: There is no such file, folder or dataset, it holds nothing, or lacks the split.
        """
        if self._source == "jsonl":
            return read_jsonl(path, limit=limit)
        if self._source == "parquet":
            return _read_parquet(path, limit=limit), []
        splits = self._splits(path)
        wanted = ("train",) if split == "train" else tuple(splits) if len(splits) == 1 else _HELD_OUT_SPLITS
        found = next((name for name in wanted if name in splits), None)
        if found is None:
            raise DataError(f"{path} must have a split named {' or '.join(wanted)}, got {', '.join(splits)}")
        rows = list(enumerate(splits[found].to_list()))
        if not rows:
            raise DataError(f"the split {found} of {path} holds no rows")
        return rows, []

    def has_held_out_split(self, path: Path) -> bool:
        """Whether a dataset brings a split to evaluate on; other files do not."""
        return self._source == "dataset" and any(name in self._splits(path) for name in _HELD_OUT_SPLITS)

    def _splits(self, path: Path) -> dict[str, Any]:
        if path not in self._datasets:
            from_hub = self._allow_hub and is_hub_id(str(path))
            self._datasets[path] = _load_from_hub(str(path)) if from_hub else _load_folder(path)
        return self._datasets[path]


def read_jsonl(
    path: Path, *, limit: int | None = None
) -> tuple[list[tuple[int, dict[str, Any]]], list[tuple[int, str]]]:
    """Split a file into rows and problems, each with its line number (from 1); a `DataError` where nothing is there."""
    if not path.is_file():
        raise DataError(
            f"a JSONL file is needed, there is none at {path.absolute()}: correct data.path or data.eval_path"
        )
    rows, problems = [], []
    with path.open("rb") as file:
        for line, raw in enumerate(islice(file, limit), start=1):
            if not raw.strip():
                continue
            try:
                rows.append((line, _parse_line(raw)))
            except (ValueError, RecursionError) as error:
                problems.append((line, f"{error}"))
    if not rows and not problems:
        raise DataError(f"{path} holds no rows: a JSONL file has one JSON object a line")
    return rows, problems


def _parse_line(raw: bytes) -> dict[str, Any]:
    row = json.loads(raw)
    if not isinstance(row, dict):
        raise ValueError(f"a row must be a JSON object, got {type(row).__name__}")
    return row


def _read_parquet(path: Path, *, limit: int | None = None) -> Rows:
    """Read a file, or all files below a folder in the order of their names; rows are numbered through."""
    import pyarrow.parquet

    files = sorted(path.rglob("*.parquet")) if path.is_dir() else [path]
    if not files or not files[0].is_file():
        raise DataError(
            f"data.source=parquet needs a Parquet file, or a folder of *.parquet files, there is none at "
            f"{path.absolute()}: correct data.path or data.eval_path"
        )
    rows: list[dict[str, Any]] = []
    for file in files if limit is None else files[:1]:
        try:
            if limit is None:
                rows += pyarrow.parquet.read_table(file).to_pylist()
                continue
            for batch in islice(pyarrow.parquet.ParquetFile(file).iter_batches(limit), 1):
                rows += batch.to_pylist()
        except (OSError, ValueError) as error:  # what pyarrow raises inherits one of them
            raise DataError(f"{file} is not readable as Parquet: {error}") from error
    if not rows:
        raise DataError(f"{path} holds no rows")
    return list(enumerate(rows))


def _load_from_hub(path: str) -> dict[str, Any]:
    import datasets

    name, _, configuration = path.partition(":")
    try:
        loaded = datasets.load_dataset(name, configuration or None)
    except Exception as error:  # connection errors of several libraries, and the library's own
        raise DataError(
            f"{path} is no folder, and cannot be loaded as a dataset of the hub ({type(error).__name__}: {error}): "
            "correct data.path, or download the dataset and give its folder"
        ) from error
    return dict(loaded)


def _load_folder(path: Path) -> dict[str, Any]:
    """Return the folder's splits by name; a single dataset counts as `train`."""
    import datasets

    if not path.is_dir():
        raise DataError(
            f"data.source=dataset needs a folder, there is none at {path.absolute()}: correct data.path or "
            "data.eval_path, or set data.source=jsonl for a file"
        )
    datasets.disable_progress_bars()
    try:
        if (path / "dataset_dict.json").is_file() or (path / "state.json").is_file():
            loaded = datasets.load_from_disk(str(path), keep_in_memory=True)
        else:
            with tempfile.TemporaryDirectory() as cache:
                loaded = datasets.load_dataset(str(path), cache_dir=cache, keep_in_memory=True)
    except Exception as error:  # the library has no error of its own for a broken folder
        raise DataError(f"{path} is not readable as a datasets folder: {type(error).__name__}: {error}") from error
    return dict(loaded) if isinstance(loaded, dict) else {"train": loaded}


def check_columns(path: Path | str, rows: Sequence[tuple[int, dict[str, Any]]], *, columns: Mapping[str, str]) -> None:
    """Tell a wrong column name, which no row has, from a broken row."""
    known = sorted({name for _, row in rows for name in row})
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
    problems: Iterable[tuple[int, str]],
    name: Path | str,
    data: SourceConfig | OfflineDataConfig,
    where: str = "data",
) -> list[tuple[int, T]]:
    """Make something of each row, and log the broken ones.

    Args:
        make: From a row's number and columns; raises `ValueError` where the row is broken.
        problems: Rows that could not be read, as (number, what is wrong).
        data: The section that names them; its place is `where`.

    Returns:
        What was made, with the rows' numbers.

    Raises:
        DataError: The share of broken rows is above `max_bad_fraction`.
    """
    made, broken = [], list(problems)
    for number, row in rows:
        try:
            made.append((number, make(number, row)))
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
            raise DataError(
                f"{summary}, more than {where}.max_bad_fraction={data.max_bad_fraction} allows; the first is "
                f"{'line' if data.source == 'jsonl' else 'row'} {number}: {problem}. Repair the file, or raise "
                f"{where}.max_bad_fraction"
            )
    return made
