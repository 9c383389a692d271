"""Recipes of sources, and files with rows, for the tests of the data."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from areal_lite.config.recipe import Config, parse_config
from areal_lite.data.demonstrations import PRINTABLE
from areal_lite.data.prompts import load_sources
from areal_lite.data.tokenizer import build_char_tokenizer
from areal_lite.types import Prompt

ROWS = [
    {"question": "1+1=?", "answer": "2", "level": 1, "tag": "a"},
    {"question": "2+2=?", "answer": "4", "level": 2, "tag": "b"},
    {"question": "13+29=?", "answer": "42", "level": 3, "tag": "a"},
]


def recipe(**sections: Any) -> Config:
    return parse_config(sections)


def source_of(path: Path, **settings: Any) -> dict[str, Any]:
    """The section of a folder or file, by its kind."""
    kind = {".jsonl": "jsonl", ".parquet": "parquet"}.get(path.suffix, "dataset")
    return {"source": kind, "path": str(path), **settings}


def make_prompts(count: int, *, name: str = "train") -> list[Prompt]:
    return [Prompt(prompt_id=f"{name}/0/{i}", text=f"{name} {i}", token_ids=(i,), answer=str(i)) for i in range(count)]


def write_jsonl(path: Path, rows: Sequence[Mapping[str, Any]] = ROWS) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def write_parquet(path: Path, rows: Sequence[Mapping[str, Any]] = ROWS) -> Path:
    import pyarrow
    import pyarrow.parquet

    path.parent.mkdir(parents=True, exist_ok=True)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(list(rows)), path)
    return path


def load(config: Config, split: Any = "train") -> dict[str, list[Prompt]]:
    """The prompts of each source, for a model that knows printable ASCII."""
    return load_sources(config, build_char_tokenizer(PRINTABLE), split)


def load_one(data: Mapping[str, Any], split: Any = "train", **sections: Any) -> list[Prompt]:
    """The prompts of a recipe's only source."""
    (prompts,) = load(recipe(data=data, **sections), split).values()
    return prompts
