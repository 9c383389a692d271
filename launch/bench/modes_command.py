"""`areal-lite bench modes`: one recipe, synchronous and asynchronous, on the same machine."""

import argparse
import os
import shlex
from collections.abc import Callable, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from rich.console import Console

from areal_lite.config.suggestion import suggestion
from areal_lite.errors import ConfigError
from areal_lite.launch.bench.modes import MODES, ModeRun, Threads, measured_runs, search_runs, thread_settings

__all__ = ["add_modes"]


def add_modes(kinds: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the command's parser."""
    modes = kinds.add_parser(
        "modes",
        help="a recipe in synchronous and asynchronous modes, and what asynchrony gains",
        description=f"Run a recipe in the modes {', '.join(MODES)}: a short search over the split of threads, then "
        "every mode in turn, several times. Writes results.json, modes.md and modes.svg. Called again, it goes on "
        "where it stopped.",
    )
    modes.add_argument("recipe", metavar="RECIPE", help="path of a YAML file, or a shipped recipe's name")
    modes.add_argument(
        "overrides", nargs="*", metavar="section.field=value", help="settings of all runs, e.g. run.steps=30"
    )
    modes.add_argument("--repeats", metavar="N", type=int, default=3, help="measured runs of each mode; default 3")
    modes.add_argument("--only", metavar="MODE", action="append", default=[], help="a mode's name, or a pattern")
    modes.add_argument("--out", metavar="DIR", type=Path, help="folder of all files; default runs/modes-<recipe>")
    modes.set_defaults(command=_modes)


def _modes(words: argparse.Namespace) -> int:
    if words.repeats < 1:
        raise ConfigError(f"--repeats must be at least 1, got {words.repeats}")
    cores = len(os.sched_getaffinity(0))
    modes = _chosen_modes(words.only)
    search = search_runs(words.recipe, modes, cores=cores, extra=words.overrides)
    # Heavy, and not needed to find a mistake in the recipe.
    from areal_lite.launch.bench.runner import Stopped

    console = Console()
    out = (words.out or Path("runs") / f"modes-{Path(words.recipe).stem}").resolve()
    measured: list[ModeRun] = []

    def say(text: str) -> None:
        console.print(text, style="bold", highlight=False, markup=False, soft_wrap=True)

    def collect() -> dict[str, Any]:
        from areal_lite.launch.bench.modes_results import collect_modes

        return collect_modes(words.recipe, search=search, measured=measured, words=words.overrides, out=out)

    def plan_measured(chosen: dict[str, Threads]) -> Sequence[ModeRun]:
        measured.extend(measured_runs(words.recipe, chosen, repeats=words.repeats, extra=words.overrides))
        return measured

    _say_search(search, cores=cores, say=say)
    try:
        failures = _run(search, plan_measured, out=out, cores=cores, console=console, say=say, collect=collect)
    except (Stopped, KeyboardInterrupt):
        collect()
        say("stopped. To go on:")
        console.print(f"  {_command(words)}", highlight=False, markup=False, soft_wrap=True)
        return 130
    _show(collect(), out=out, console=console, say=say)
    if failures:
        say(f"failed: {', '.join(failures)}; the same command tries them again:")
        console.print(f"  {_command(words)}", highlight=False, markup=False, soft_wrap=True)
    return 1 if failures else 0


def _run(
    search: Sequence[ModeRun],
    plan_measured: Callable[[dict[str, Threads]], Sequence[ModeRun]],
    *,
    out: Path,
    cores: int,
    console: Console,
    say: Callable[[str], None],
    collect: Callable[[], object],
) -> dict[str, str]:
    """Search, choose, measure. Returns why runs failed, by name."""
    from areal_lite.launch.bench.modes_results import chosen_threads
    from areal_lite.launch.bench.runner import run_all, training
    from areal_lite.launch.run.train import ray_session

    with ray_session():

        def run(runs: Sequence[ModeRun]) -> dict[str, str]:
            train, planned = training(console), [run.planned for run in runs]
            return run_all(planned, out=out, train=train, say=say, after_each=collect)

        failures = run(search)
        chosen = chosen_threads(search, out=out, cores=cores)
        say("measuring with the fastest threads: " + ", ".join(f"{mode} {threads}" for mode, threads in chosen.items()))
        return failures | run(plan_measured(chosen))


def _say_search(search: Sequence[ModeRun], *, cores: int, say: Callable[[str], None]) -> None:
    tried = {run.mode: thread_settings(MODES[run.mode], cores=cores) for run in search}
    listed = ", ".join(f"{mode} {' or '.join(map(str, settings))}" for mode, settings in tried.items())
    say(f"searching {len(search)} splits of {cores} cores, threads of generation + training: {listed}")


def _show(content: dict[str, Any], *, out: Path, console: Console, say: Callable[[str], None]) -> None:
    from areal_lite.launch.bench.modes_view import draw_modes, modes_markdown, modes_tables

    if content["modes"]:
        console.print(*modes_tables(content), sep="\n")
        draw_modes(content, out / "modes.svg")
        (out / "modes.md").write_text(modes_markdown(content))
    for text in content["findings"]:
        console.print(f"- {text}", highlight=False, markup=False)
    say(f"results.json, modes.md and modes.svg are in {out}")


def _chosen_modes(only: Sequence[str]) -> list[str]:
    for pattern in only:
        if not any(fnmatch(mode, pattern) for mode in MODES):
            raise ConfigError(
                f"no mode is called {pattern!r}: there are {', '.join(MODES)}" + suggestion(pattern, list(MODES))
            )
    return [mode for mode in MODES if not only or any(fnmatch(mode, pattern) for pattern in only)]


def _command(words: argparse.Namespace) -> str:
    """Return what was typed."""
    out = [] if words.out is None else ["--out", str(words.out)]
    only = [word for name in words.only for word in ("--only", name)]
    repeats = ["--repeats", str(words.repeats)]
    return shlex.join(["areal-lite", "bench", "modes", words.recipe, *words.overrides, *out, *only, *repeats])
