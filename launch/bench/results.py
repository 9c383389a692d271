"""What the runs of a plan show: `results.json` and a table. Reads run folders, writes one file."""

import json
import os
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from areal_lite.errors import ConfigError
from areal_lite.launch.bench.plan import Plan, PlannedRun
from areal_lite.launch.bench.runner import run_state, summary
from areal_lite.record.recorder import commit_of_code

__all__ = ["collect_results", "measured_where", "results_table", "run_result"]

Result = dict[str, Any]

_FROM_SUMMARY = {
    "seconds": "wall_s", "samples_per_s": "samples_per_s", "age_max": "age_max_trained",
    "rollout_idle": "rollout_idle_fraction", "trainer_idle": "trainer_idle_fraction", "paused": "paused_fraction",
    "reward_first": "reward_first", "reward_last": "reward_last", "parity": "parity_max_abs_logprob_diff",
}  # fmt: skip


def collect_results(plan_name: str, plan: Plan, runs: Sequence[PlannedRun], *, out: Path) -> dict[str, Any]:
    """Read all run folders and write `results.json`.

    Returns:
        Its content: where it was measured, the plan, and one entry per run, in the order of the plan.
    """
    entries = [run_result(run, out / run.name) for run in runs]
    versions: dict[str, str] = next((found["versions"] for run in runs if (found := summary(out / run.name))), {})
    content = {
        "plan": plan_name,
        **measured_where(),
        "versions": versions,
        "recipe": plan.recipe,
        "settings": plan.settings,
        "runs": entries,
    }
    write_results(content, out=out)
    return content


def surroundings() -> dict[str, Any]:
    """Return what was measured, and on what: commit and machine."""
    return {
        "commit": commit_of_code(),
        "cores": os.cpu_count(),
        "machine": platform.machine(),
        "processor": _processor(),
    }


def write_results(content: Mapping[str, Any], *, out: Path) -> None:
    """Write `results.json`, whole or not at all."""
    out.mkdir(parents=True, exist_ok=True)
    temporary = out / ".results.json.tmp"
    temporary.write_text(json.dumps(content, indent=1) + "\n")
    os.replace(temporary, out / "results.json")


def run_result(run: PlannedRun, folder: Path) -> Result:
    """Return one run's entry; without a summary, or where the folder holds other settings, only what was planned."""
    try:
        run_state(run, folder)
        found = summary(folder)
    except ConfigError:
        found = {}
    config = run.config
    entry = {
        "name": run.name,
        "overrides": run.overrides,
        "seed": config.run.seed,
        "lr": config.trainer.lr,
        "max_staleness": config.queue.max_staleness,
        "status": found.get("status", "not run"),
    }
    if not found:
        return entry
    curve = {int(step): accuracy for step, accuracy in found["eval"].items()}
    return {
        **entry,
        "steps": found["steps"],
        "curve": {str(step): curve[step] for step in sorted(curve)},
        "start": curve.get(0),
        "end": curve.get(config.run.steps),
        **{name: found[key] for name, key in _FROM_SUMMARY.items()},
        "age_mean": _mean_age(found["age_histogram"]),
    }


def results_table(runs: Sequence[Result]) -> Table:
    """Render a line per run that was begun, narrow enough for 80 columns."""
    begun = [run for run in runs if "steps" in run]
    table = Table(title="results", title_justify="left", box=SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0))
    table.caption = "age: mean (largest of allowed); gen, train: share of the time idle"
    if waiting := len(runs) - len(begun):
        table.caption += f"; {waiting} of {len(runs)} runs were not run yet"
    table.add_column("run", no_wrap=True)
    for name in ("accuracy", "rise", "steps", "s", "age", "gen", "train"):
        table.add_column(name, justify="right", no_wrap=True)
    for run in begun:
        table.add_row(run["name"], *_cells(run))
    return table


def _cells(run: Result) -> list[str]:
    start, end = run["start"], run["end"]
    is_whole = start is not None and end is not None
    age = "-" if run["age_mean"] is None else f"{run['age_mean']:.2f}"
    return [
        f"{start:.3f}→{end:.3f}" if is_whole else run["status"].partition(":")[0],
        f"{end - start:+.3f}" if is_whole else "-",
        str(run["steps"]),
        f"{run['seconds']:.0f}",
        f"{age} ({run['age_max']}/{run['max_staleness']})",
        f"{run['rollout_idle']:.0%}",
        f"{run['trainer_idle']:.0%}",
    ]


def _mean_age(histogram: Mapping[str, int]) -> float | None:
    """Mean age of the trained tokens."""
    total = sum(histogram.values())
    return sum(int(age) * count for age, count in histogram.items()) / total if total else None


def measured_where() -> Result:
    """Return the code and the machine that figures are of."""
    return {
        **surroundings(),
    }


def _processor() -> str | None:
    """Name of the processor, where the system tells."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else None
