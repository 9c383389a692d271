"""The sources of tasks, by the kind that a recipe names: one function each.

Called by `source.py` and the supervised warm start.
"""

from collections.abc import Callable
from typing import Literal

from areal_lite.config.sections import SourceConfig
from areal_lite.data.arith import arith_problems
from areal_lite.data.files import file_tasks
from areal_lite.data.games import gridworld_tasks, guess_number_tasks
from areal_lite.data.gym import gym_tasks
from areal_lite.data.prompts import Task

__all__ = ["FILE_SOURCES", "load_tasks"]

FILE_SOURCES = ("jsonl", "parquet", "dataset")
"""Kinds that read rows from files; the others make their tasks, and show how they are done."""

Split = Literal["train", "eval"]


def load_tasks(source: SourceConfig, split: Split, *, where: str) -> list[Task]:
    """Make or read the tasks of a split, the same ones for the same settings.

    Args:
        source: Of any kind.
        split: No task of `eval` is in `train` where the source is built in.
        where: The recipe's section, for messages: `data` or `data.mix.<name>`.

    Raises:
        DataError: A file is missing, empty or too broken, or lacks a column.
        ConfigError: A built-in source cannot make what is asked for.
    """
    if source.source in FILE_SOURCES:
        return file_tasks(source, split, where=where)
    return _BUILT_IN[source.source](source, split, where)


def _arith_tasks(source: SourceConfig, split: Split, where: str) -> list[Task]:
    return [
        Task(origin=f"{where}.arith {split} problem {index}", prompt=problem.prompt, answer=problem.answer)
        for index, problem in enumerate(arith_problems(source.arith, split))
    ]


_BUILT_IN: dict[str, Callable[[SourceConfig, Split, str], list[Task]]] = {
    "arith": _arith_tasks,
    "reasoning_gym": lambda source, split, where: gym_tasks(source.reasoning_gym, split, where=where),
    "guess_number": lambda source, split, where: guess_number_tasks(source.guess_number, split),
    "gridworld": lambda source, split, where: gridworld_tasks(source.gridworld, split),
}
