"""Runs a plan: one run after the other, each in a folder of its own, going on where an earlier call stopped.

Called by the commands. What is done stays done, a run that was cut off goes on
from its checkpoint, and one that fails does not keep the others from running.
"""

import json
import logging
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from areal_lite.config.recipe import Config, parse_config
from areal_lite.errors import ArealLiteError, CheckpointError, ConfigError
from areal_lite.launch.bench.plan import PlannedRun
from areal_lite.record.paths import with_absolute_paths
from areal_lite.record.run_folder import RunFolder

if TYPE_CHECKING:
    from rich.console import Console


__all__ = ["RunState", "Stopped", "run_all", "run_state", "summary", "training"]

logger = logging.getLogger(__name__)


class Stopped(Exception):
    """The user stopped a run, and it was saved."""


class RunState(Enum):
    """How far a planned run is."""

    NEW = "nothing of it exists, or nothing that could go on"
    BEGUN = "it has a checkpoint to go on from"
    DONE = "it has its last step and its summary"


def run_state(run: PlannedRun, folder: Path) -> RunState:
    """Look into a run's folder.

    Raises:
        ConfigError: The folder holds a run of other settings.
    """
    if not (folder / "config.json").is_file():
        return RunState.NEW
    saved = _settings(parse_config(json.loads((folder / "config.json").read_text())))
    planned = _settings(with_absolute_paths(run.config))
    if changed := sorted(key for key in {**saved, **planned} if saved.get(key) != planned.get(key)):
        differences = "; ".join(f"{key} was {saved.get(key)!r}, is {planned.get(key)!r}" for key in changed)
        raise ConfigError(
            f"{folder} must hold a run of the plan's settings, got another: {differences}: choose another --out, or "
            "delete the folder to run it anew"
        )
    if summary(folder).get("status") == "done":
        return RunState.DONE
    try:
        RunFolder(folder).newest_checkpoint()
    except CheckpointError:
        return RunState.NEW
    return RunState.BEGUN


def run_all(
    runs: Sequence[PlannedRun],
    *,
    out: Path,
    train: Callable[[Config], object],
    say: Callable[[str], None],
    after_each: Callable[[], object],
) -> dict[str, str]:
    """Run what is not done yet.

    Args:
        runs: In the order in which they are run.
        out: Every run gets a folder below.
        train: Trains one recipe, into `run.dir` or going on in `run.resume`.
        say: Shows a line.
        after_each: Called after each run, failed ones included.

    Returns:
        Why each failed run failed, by name.

    Raises:
        ConfigError: Before anything starts: some folder holds a run of other settings.
        Stopped: By the user.
    """
    states = {run.name: run_state(run, out / run.name) for run in runs}
    waiting = [run for run in runs if states[run.name] is not RunState.DONE]
    if len(waiting) < len(runs):
        say(f"{len(runs) - len(waiting)} of {len(runs)} runs are done already")
    failures: dict[str, str] = {}
    pace = _Pace()
    for number, run in enumerate(waiting):
        left = pace.left([other.config.run.steps for other in waiting[number:]])
        say(f"run {len(runs) - len(waiting) + number + 1} of {len(runs)}: {run.name}{left}")
        try:
            train(_prepared(run, out / run.name, states[run.name]))
        except Stopped:
            raise
        except Exception as error:
            failures[run.name] = f"{type(error).__name__}: {error}"
            say(f"run {run.name} failed: {failures[run.name]}")
            if not isinstance(error, ArealLiteError):
                logger.exception("run %s failed", run.name)
        else:
            pace.note(run.config.run.steps)
        after_each()
    return failures


def summary(folder: Path) -> dict[str, Any]:
    """Return a run's summary, empty when there is none."""
    path = folder / "summary.json"
    content: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {}
    return content


def training(console: "Console") -> Callable[[Config], object]:
    """Return what trains one recipe, which raises `Stopped` after a Ctrl-C."""
    from areal_lite.launch.run.controller import Interrupted
    from areal_lite.launch.run.train import train

    def train_one(config: Config) -> object:
        try:
            return train(config, recipe_name="bench", console=console)
        except Interrupted as stop:
            raise Stopped from stop

    return train_one


def _prepared(run: PlannedRun, folder: Path, state: RunState) -> Config:
    """Return the recipe with its folder; a run in it that cannot go on is deleted."""
    if state is RunState.BEGUN:
        place = {"resume": str(folder)}
    else:
        if (folder / "config.json").is_file():
            shutil.rmtree(folder)
        place = {"dir": str(folder)}
    return run.config.model_copy(update={"run": run.config.run.model_copy(update=place)})


def _settings(config: Config) -> dict[str, Any]:
    """All settings, flat, but for where the run is."""
    flat = dict(_flat(config.model_dump()))
    return {key: value for key, value in flat.items() if key not in ("run.dir", "run.resume")}


def _flat(settings: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    pairs = []
    for key, value in settings.items():
        is_section = isinstance(value, Mapping) and bool(value)
        pairs += _flat(value, f"{prefix}{key}.") if is_section else [(f"{prefix}{key}", value)]
    return pairs


class _Pace:
    """Guesses the time left from the steps and seconds of the runs of this call."""

    def __init__(self) -> None:
        self._since = time.monotonic()
        self._steps = 0

    def note(self, steps: int) -> None:
        self._steps += steps

    def left(self, steps: Sequence[int]) -> str:
        if self._steps == 0:
            return ""
        seconds = (time.monotonic() - self._since) / self._steps * sum(steps)
        return f" (about {seconds / 60:.0f} min left for this and the rest)"
