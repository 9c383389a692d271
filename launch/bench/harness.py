"""Shared by benchmarks: the order of measurements, runs of many recipes, `results.json`.

A benchmark that trains passes its planned runs to `run_to_the_end`, each with a folder of its own. Finished runs are
skipped, an interrupted run resumes from its checkpoint (a timed one restarts), and a failed run does not stop the
others.
"""

import json
import logging
import os
import platform
import shlex
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from areal_lite.api import OnStep
from areal_lite.config.recipe import Config
from areal_lite.errors import ArealLiteError, ConfigError
from areal_lite.node import package_versions, processor, source_hash
from areal_lite.record.checkpoints import whole_checkpoints
from areal_lite.record.columns import Columns, Row, cells
from areal_lite.record.paths import with_absolute_paths
from areal_lite.record.recorder import commit_of_code
from areal_lite.record.run_files import read_summary, write_whole
from areal_lite.record.run_folder import RunFolder, differences
from areal_lite.record.writer import SoleWriter

logger = logging.getLogger(__name__)

Case = TypeVar("Case")

CONSOLE = Console()
"""Shows the progress of benchmarks."""


def turns(cases: Iterable[Case], repeats: int) -> list[tuple[int, Case]]:
    """Return (repeat, case) in order; every other repeat runs backwards, so that the machine's drift favours none."""
    forwards = list(cases)
    return [(repeat, case) for repeat in range(repeats) for case in forwards[:: -1 if repeat % 2 else 1]]


def ratios(values: Iterable[float], over: Iterable[float]) -> list[float]:
    """Return the ratio of each repeat, in which both sides saw the same state of the machine."""
    return [mine / theirs for mine, theirs in zip(values, over, strict=True)]


def surroundings() -> dict[str, Any]:
    """Return the commit, the hash of the package's source, and the machine."""
    return {
        "commit": commit_of_code(),
        "source": source_hash(),
        "cores": os.cpu_count(),
        "machine": platform.machine(),
        "processor": processor(),
    }


def write_results(content: Mapping[str, Any], *, out: Path) -> dict[str, Any]:
    """Write `results.json`, whole or not at all: `content`, and the `surroundings`. Return it."""
    content = {**surroundings(), **content}
    out.mkdir(parents=True, exist_ok=True)
    write_whole(out / "results.json", json.dumps(content, indent=1) + "\n")
    return content


def finish(benchmark: str, rows: Sequence[Row], *, settings: Mapping[str, Any], out: Path) -> None:
    """Write `results.json` of a benchmark that has rows, and show them."""
    figures = {"settings": dict(settings), "rows": list(rows)}
    write_results({"benchmark": benchmark, "versions": package_versions(), **figures}, out=out)
    show_table(benchmark, rows, title=benchmark)
    say(f"results: {out / 'results.json'}", style="")


def show_table(columns: str | Columns, rows: Iterable[Row], *, title: str = "", caption: str | None = None) -> None:
    """Print a table in full, even where the terminal is narrower; figures go to the right."""
    shown = Table(title=title or None, caption=caption, title_justify="left", caption_justify="left", box=SIMPLE_HEAD,
                  show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))  # fmt: skip
    titles, *lines = cells(columns, rows)
    for place, texts in enumerate(zip(titles, *lines, strict=True)):
        # In a narrow terminal lines are broken between words, never inside one.
        longest = max(map(len, " ".join(texts).split()))
        is_words = longest == max(map(len, "\n".join(texts).split("\n")))
        shown.add_column(texts[0], justify="right" if place else "left", min_width=longest, no_wrap=is_words)
    for line in lines:
        shown.add_row(*(text.replace("**", "") for text in line))
    needed = Console(width=1000).measure(shown).minimum
    Console(width=max(Console().width, needed)).print(shown, crop=False)


def say(text: str, style: str = "bold") -> None:
    """Show a line as it is."""
    CONSOLE.print(text, style=style, highlight=False, markup=False, soft_wrap=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedRun:
    """One run of a plan."""

    name: str
    """Its folder's name too."""
    config: Config
    """The whole recipe."""
    facts: dict[str, Any] = field(default_factory=dict)
    """What distinguishes it from the other runs, for `results.json`."""
    is_timed: bool = False
    """Its figures are seconds of one start: it never resumes."""


def entry_of(run: PlannedRun, out: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a run's entry in `results.json`, and its summary: empty if the folder holds other settings."""
    found: dict[str, Any] = {}
    with suppress(ArealLiteError):
        where_it_begins(run, out / run.name)
        found = read_summary(out / run.name)
    known = {"name": run.name, **run.facts, "seed": run.config.run.seed, "status": found.get("status", "not run")}
    return known, found


def where_it_begins(run: PlannedRun, folder: Path) -> str:
    """Look into a run's folder.

    Returns:
        The setting of `run` that names the folder: `dir` to start, `resume` to resume; empty if the run is done.

    Raises:
        ConfigError: It holds a run of other settings.
        CheckpointError: Its settings cannot be read.
    """
    if not (folder / "config.json").is_file():
        return "dir"
    saved = RunFolder(folder).recipe()
    changed = differences([config.model_dump() for config in (saved, with_absolute_paths(run.config))])
    # Folder and report do not make it another run.
    if others := changed.keys() - {"run.dir", "run.resume", "run.report"}:
        listed = "; ".join("{} was {!r}, is {!r}".format(key, *changed[key]) for key in sorted(others))
        raise ConfigError(
            f"{folder} must hold a run of the plan's settings, got another: {listed}. Fix: choose another --out, or "
            "delete the folder"
        )
    if read_summary(folder).get("status") == "done":
        return ""
    return "resume" if not run.is_timed and whole_checkpoints(folder / "checkpoints") else "dir"


def run_to_the_end(
    parts: Iterable[Sequence[PlannedRun]],
    *,
    out: Path,
    collect: Callable[[], dict[str, Any]],
    show: Callable[[dict[str, Any]], None],
) -> int:
    """Run a benchmark's runs one after another, each in a folder below `out`, and show the results.

    Args:
        parts: Lists of runs; a later list may depend on the results of earlier ones.
        collect: Writes the results so far and returns them; called after each run.
        show: Shows what `collect` returned, at the end.

    Returns:
        The exit code: 0; 1 if a run failed; 130 after Ctrl-C. The command that resumes the benchmark is shown.
    """
    failures: dict[str, str] = {}
    try:
        with training() as train:
            for runs in parts:
                failures |= run_all(runs, out=out, train=train, after_each=collect)
        show(collect())
        if not failures:
            return 0
        code, ending = 1, f"failed: {', '.join(failures)}; retry with the same command:"
    except KeyboardInterrupt:
        collect()
        code, ending = 130, "stopped. Resume with:"
    say(ending)
    say(f"  {shlex.join(['areal-lite', *sys.argv[1:]])}", style="")
    return code


@contextmanager
def training() -> Iterator[Callable[..., object]]:
    """Yield a function that trains a recipe, with changes of `run`; Ctrl-C saves and raises `KeyboardInterrupt`.

    It also takes `on_step`, which gets the row of each step.
    """
    from areal_lite.launch.run.controller import Interrupted
    from areal_lite.launch.run.ray_session import ray_session
    from areal_lite.launch.run.train import train

    def train_one(config: Config, *, on_step: OnStep | None = None, **changes: Any) -> object:
        # No report of each of many short runs.
        run = config.run.model_copy(update={"report": False, **changes})
        try:
            return train(config.model_copy(update={"run": run}), recipe_name="bench", console=CONSOLE, on_step=on_step)
        except Interrupted as stop:
            raise KeyboardInterrupt from stop

    with ray_session():
        yield train_one


def run_all(
    runs: Sequence[PlannedRun], *, out: Path, train: Callable[..., object], after_each: Callable[[], object]
) -> dict[str, str]:
    """Run what is not done yet, in order, each in a folder below `out`; return the error of each failed run.

    `train` takes a recipe, and a folder as `dir` or `resume`; `after_each` is called after failed runs too.

    Raises:
        ConfigError: Before anything starts, if a folder holds a run of other settings.
        KeyboardInterrupt: By the user.
    """
    begins = {run.name: where_it_begins(run, out / run.name) for run in runs}
    waiting = [run for run in runs if begins[run.name]]
    if num_done := len(runs) - len(waiting):
        say(f"{num_done} of {len(runs)} runs are already done")
    failures: dict[str, str] = {}
    began, steps_done = time.monotonic(), 0
    for number, run in enumerate(waiting):
        folder, setting = out / run.name, begins[run.name]
        if setting == "dir" and (folder / "config.json").is_file():  # of a run that cannot be resumed
            with SoleWriter(folder, say=say):
                pass  # no other command trains there
            shutil.rmtree(folder)
        steps_left = sum(other.config.run.steps for other in waiting[number:])
        left_s = (time.monotonic() - began) / steps_done * steps_left if steps_done else 0
        pace = f" (about {left_s / 60:.0f} min left for this and the rest)" if steps_done else ""
        say(f"run {num_done + number + 1} of {len(runs)}: {run.name}{pace}")
        try:
            train(run.config, **{setting: str(folder)})
        except Exception as error:
            failures[run.name] = f"{type(error).__name__}: {error}"
            say(f"run {run.name} failed: {failures[run.name]}")
            if not isinstance(error, ArealLiteError):
                logger.exception("run %s failed", run.name)
        else:
            steps_done += run.config.run.steps
            if run.config.run.checkpoint_every == 0:  # its last save served only to resume it: gigabytes a run
                shutil.rmtree(folder / "checkpoints", ignore_errors=True)
        after_each()
    return failures
