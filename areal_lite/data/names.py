"""The columns `verifier` and `workflow` of a row: filled from the recipe, and checked before anything starts.

Called by `source.py`. Data must not choose code: a row may only name what the recipe or an installed package offers.
"""

from collections.abc import Sequence
from dataclasses import replace

from areal_lite.config.plugins import known_names
from areal_lite.config.recipe import Config, suggestion
from areal_lite.config.sections import SourceConfig
from areal_lite.data.prompts import Task
from areal_lite.errors import DataError
from areal_lite.verify.names import known_verifier_names

__all__ = ["with_names"]


def with_names(tasks: Sequence[Task], *, source: SourceConfig, config: Config) -> list[Task]:
    """Return the tasks with the source's verifier and workflow where their rows name none.

    Raises:
        DataError: A row names something else than a known verifier or workflow.
    """
    defaults = {"verifier": source.verifier, "workflow": source.workflow}
    fill = {column: name for column, name in defaults.items() if name is not None}
    named = [replace(task, row={**fill, **task.row}) for task in tasks] if fill else list(tasks)
    known = {
        "verifier": known_verifier_names(config.verifier),
        "workflow": {*config.rollout.workflows, *known_names("workflow")},
    }
    for kind, names in known.items():
        first = {repr(task.row[kind]): task for task in reversed(named) if kind in task.row}
        for task in first.values():
            _check(task, kind=kind, known=sorted(names))
    return named


def _check(task: Task, *, kind: str, known: list[str]) -> None:
    name = task.row[kind]
    if name in known:
        return
    option = {"verifier": "verifier.named", "workflow": "rollout.workflows"}[kind]
    if isinstance(name, str) and ":" in name:
        raise DataError(
            f"the column {kind} must hold a known name, got {name!r} at {task.origin}: data must not choose code; give "
            f"the function a name in {option}, and write that"
        )
    raise DataError(
        f"the column {kind} must hold one of {', '.join(known)}, got {name!r} at {task.origin}"
        + (suggestion(name, known) if isinstance(name, str) else "")
        + f": correct it, or add it to {option}"
    )
