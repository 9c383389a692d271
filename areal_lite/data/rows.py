"""Raw rows of the offline objectives: a JSONL file, or a folder of the `datasets` library.

Called by `offline.py`. Nothing is fetched from a network, and nothing is cached outside the folder.
"""

import tempfile
from pathlib import Path
from typing import Any, Literal

from areal_lite.data.prompts import read_jsonl
from areal_lite.errors import DataError

__all__ = ["RowReader", "Rows"]

Rows = list[tuple[int, dict[str, Any]]]
"""Each row with its line number (from 1) in a file, or its row number (from 0) in a dataset."""

_HELD_OUT_SPLITS = ("validation", "eval", "test")


class RowReader:
    """Reads rows; a datasets folder is loaded once, however often it is asked for."""

    def __init__(self, source: Literal["jsonl", "dataset"]) -> None:
        """Read JSONL files; or folders that `save_to_disk` wrote, or with data files (parquet, json, csv) in them."""
        self._source = source
        self._folders: dict[Path, dict[str, Any]] = {}

    def read(self, path: Path, *, split: Literal["train", "eval"]) -> tuple[Rows, list[tuple[int, str]]]:
        """Read all rows of a file or folder, and what is wrong with those that cannot be read.

        Args:
            path: The file or folder.
            split: Which of a folder's splits: `train`; or the first of validation, eval and test, or the only one.

        Raises:
            DataError: There is no such file or folder, it holds nothing, or lacks the split.
        """
        if self._source == "jsonl":
            return read_jsonl(path)
        splits = self._splits(path)
        wanted = ("train",) if split == "train" else tuple(splits) if len(splits) == 1 else _HELD_OUT_SPLITS
        found = next((name for name in wanted if name in splits), None)
        if found is None:
            raise DataError(f"{path} must have a split named {' or '.join(wanted)}, got {', '.join(splits)}")
        rows = list(enumerate(dict(row) for row in splits[found]))
        if not rows:
            raise DataError(f"the split {found} of {path} holds no rows")
        return rows, []

    def has_held_out_split(self, path: Path) -> bool:
        """Whether a datasets folder brings a split to evaluate on; a JSONL file does not."""
        return self._source == "dataset" and any(name in self._splits(path) for name in _HELD_OUT_SPLITS)

    def _splits(self, path: Path) -> dict[str, Any]:
        if path not in self._folders:
            self._folders[path] = _load_folder(path)
        return self._folders[path]


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
