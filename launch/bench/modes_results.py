"""Reads the run folders of `bench modes` and writes `results.json`: runs, modes, words, and where it was measured."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from areal_lite.launch.bench.measures import measure, measured_steps, reward_at
from areal_lite.launch.bench.modes import MAX_STALENESS, MODES, ModeRun, Threads, thread_settings
from areal_lite.launch.bench.modes_compare import best_setting, best_synchronous, compare, findings
from areal_lite.launch.bench.results import surroundings, write_results
from areal_lite.launch.bench.runner import summary
from areal_lite.record.run_folder import RunFolder

__all__ = ["chosen_threads", "collect_modes", "run_entry"]


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
    first, last = measured_steps(config.run.steps, max_staleness=MAX_STALENESS)
    figures = measure(
        rows,
        events,
        first=first,
        last=last,
        samples_per_step=config.samples_per_step,
        slots=config.rollout.slots,
    )
    return {
        **entry,
        "commit": found.get("commit"),
        "versions": found["versions"],
        "measured_steps": [first, last],
        **figures,
        "reward_equal_steps": reward_at(rows, events),
        "accuracy_end": found["eval"].get(str(config.run.steps)),
    }


def chosen_threads(runs: Sequence[ModeRun], *, out: Path, cores: int) -> dict[str, Threads]:
    """Return each mode's fastest thread setting; the first one where no search run is done.

    Args:
        runs: The search runs.
        out: Holds their folders.
        cores: Of the machine.
    """
    entries = [run_entry(run, out / run.planned.name) for run in runs]
    chosen = {}
    for mode in dict.fromkeys(run.mode for run in runs):
        settings = thread_settings(MODES[mode], cores=cores)
        best = best_setting(entry for entry in entries if entry["mode"] == mode)
        chosen[mode] = next((threads for threads in settings if str(threads) == best), settings[0])
    return chosen


def collect_modes(
    recipe: str, *, search: Sequence[ModeRun], measured: Sequence[ModeRun], words: Sequence[str], out: Path
) -> dict[str, Any]:
    """Read all run folders, write `results.json`, and return its content.

    Args:
        recipe: Path or name.
        search: The runs that chose the threads.
        measured: The runs that figures are taken from.
        words: `section.field=value` words of the command line.
        out: Holds the run folders; gets the file.
    """
    entries = [run_entry(run, out / run.planned.name) for run in measured]
    done = [(run, entry) for run, entry in zip(measured, entries, strict=True) if "seconds" in entry]
    shortest = min((entry["seconds"] for _, entry in done), default=0.0)
    for run, entry in done:
        folder = RunFolder(out / run.planned.name)
        entry["reward_equal_time"] = reward_at(
            folder.read("metrics.jsonl"), folder.read("events.jsonl"), seconds=shortest
        )
    best, lines = best_synchronous(entries), compare(entries)
    content = {
        "benchmark": "modes",
        "recipe": recipe,
        "overrides": list(words),
        **surroundings(),
        "versions": next((entry["versions"] for _, entry in done), {}),
        "seeds": sorted({entry["seed"] for entry in entries}),
        "measured_steps": next((entry["measured_steps"] for _, entry in done), None),
        "equal_time_s": shortest,
        "best_synchronous": best,
        "modes": lines,
        "findings": findings(lines, best=best),
        "search": [run_entry(run, out / run.planned.name) for run in search],
        "runs": entries,
        "config": {run.mode: run.planned.config.model_dump() for run in measured if run.repeat == 0},
    }
    write_results(content, out=out)
    return content
