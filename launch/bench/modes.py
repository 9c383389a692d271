"""`areal-lite bench modes`: one recipe, synchronous and asynchronous, on the same machine.

A short search chooses the threads of each mode, then all modes take turns, several times.
"""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from areal_lite.launch.bench import modes_figures as figures
from areal_lite.launch.bench.harness import run_to_the_end, say, summary, surroundings, write_results
from areal_lite.launch.bench.modes_runs import (
    MAX_STALENESS,
    MODES,
    ModeRun,
    Threads,
    measured_runs,
    search_runs,
    thread_settings,
)
from areal_lite.launch.bench.modes_view import draw_modes, modes_markdown, modes_tables
from areal_lite.launch.bench.plan import choose
from areal_lite.record.run_folder import RunFolder

__all__ = ["bench", "collect_modes", "run_entry"]


def bench(recipe: str, overrides: Sequence[str], *, repeats: int, only: Sequence[str], out: Path | None) -> int:
    """Search, choose, measure."""
    cores, console = len(os.sched_getaffinity(0)), Console()
    search = search_runs(recipe, choose(list(MODES), only, what="mode"), cores=cores, extra=overrides)
    out = (out or Path("runs") / f"modes-{Path(recipe).stem}").resolve()
    measured: list[ModeRun] = []

    def work(run: Any) -> None:
        tried = {one.mode: " or ".join(map(str, thread_settings(MODES[one.mode], cores=cores))) for one in search}
        listed = ", ".join(f"{mode} {settings}" for mode, settings in tried.items())
        say(console, f"searching {len(search)} splits of {cores} cores, threads of generation + training: {listed}")
        run([one.planned for one in search])
        chosen = _chosen_threads(search, out=out, cores=cores)
        listed = ", ".join(f"{mode} {threads}" for mode, threads in chosen.items())
        say(console, f"measuring with the fastest threads: {listed}")
        measured.extend(measured_runs(recipe, chosen, repeats=repeats, extra=overrides))
        run([one.planned for one in measured])

    def show(content: dict[str, Any]) -> None:
        if content["modes"]:
            console.print(*modes_tables(content), sep="\n")
            draw_modes(content, out / "modes.svg")
            (out / "modes.md").write_text(modes_markdown(content))
        for text in content["findings"]:
            console.print(f"- {text}", highlight=False, markup=False)
        say(console, f"results.json, modes.md and modes.svg are in {out}")

    def collect() -> dict[str, Any]:
        return collect_modes(recipe, search=search, measured=measured, overrides=overrides, out=out)

    return run_to_the_end(work, out=out, collect=collect, show=show, console=console)


def _chosen_threads(search: Sequence[ModeRun], *, out: Path, cores: int) -> dict[str, Threads]:
    """Return each mode's fastest thread setting; the first one where no search run is done."""
    entries = [run_entry(run, out / run.planned.name) for run in search]
    chosen = {}
    for mode in dict.fromkeys(run.mode for run in search):
        settings = thread_settings(MODES[mode], cores=cores)
        best = figures.best_setting(entry for entry in entries if entry["mode"] == mode)
        chosen[mode] = next((threads for threads in settings if str(threads) == best), settings[0])
    return chosen


def run_entry(run: ModeRun, folder: Path) -> dict[str, Any]:
    """Return what is known of one run; its figures only when it is done."""
    found, config = summary(folder), run.planned.config
    entry: dict[str, Any] = {
        "name": run.planned.name,
        "mode": run.mode,
        "threads": str(run.threads),
        "repeat": run.repeat,
        "seed": config.run.seed,
        "status": found.get("status", "not run"),
    }
    if entry["status"] != "done":
        return entry
    rows, events = RunFolder(folder).read("metrics.jsonl"), RunFolder(folder).read("events.jsonl")
    steps = figures.measured_steps(config.run.steps, max_staleness=MAX_STALENESS)
    slots, samples = config.rollout.slots, config.samples_per_step
    return {
        **entry,
        "commit": found.get("commit"),
        "versions": found["versions"],
        "measured_steps": list(steps),
        **figures.measure(rows, events, first=steps[0], last=steps[1], samples_per_step=samples, slots=slots),
        "reward_equal_steps": figures.reward_at(rows, events),
        "accuracy_end": found["eval"].get(str(config.run.steps)),
    }


def collect_modes(
    recipe: str, *, search: Sequence[ModeRun], measured: Sequence[ModeRun], overrides: Sequence[str], out: Path
) -> dict[str, Any]:
    """Read all run folders, write `results.json`, and return its content."""
    entries = [run_entry(run, out / run.planned.name) for run in measured]
    done = [entry for entry in entries if "seconds" in entry]
    shortest = min((entry["seconds"] for entry in done), default=0.0)
    for entry in done:
        folder = RunFolder(out / entry["name"])
        rows, events = folder.read("metrics.jsonl"), folder.read("events.jsonl")
        entry["reward_equal_time"] = figures.reward_at(rows, events, seconds=shortest)
    best, lines = figures.best_synchronous(entries), figures.compare(entries)
    content = {
        "benchmark": "modes",
        "recipe": recipe,
        "overrides": list(overrides),
        **surroundings(),
        "versions": done[0]["versions"] if done else {},
        "seeds": sorted({entry["seed"] for entry in entries}),
        "measured_steps": done[0]["measured_steps"] if done else None,
        "equal_time_s": shortest,
        "best_synchronous": best,
        "modes": lines,
        "findings": figures.findings(lines, best=best),
        "search": [run_entry(run, out / run.planned.name) for run in search],
        "runs": entries,
        "config": {run.mode: run.planned.config.model_dump() for run in measured if run.repeat == 0},
    }
    write_results(content, out=out)
    return content
