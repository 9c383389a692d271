"""Makes docs/demo.json and docs/demo.md from the run folders of the demo, one per seed.

for seed in 0 1 2; do .venv/bin/areal-lite train arith_cpu run.seed=$seed run.dir=runs/seed-$seed; done
.venv/bin/python docs/demo_table.py runs/seed-0 runs/seed-1 runs/seed-2

Without an argument it makes the page anew from docs/demo.json.
"""

import json
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import page

KEYS = ("eval", "steps", "wall_s", "samples_per_s", "gen_tokens_per_s", "trained_tokens_per_s", "age_histogram",
        "age_max_trained", "max_staleness", "rollout_idle_fraction", "trainer_idle_fraction", "rollout_occupancy",
        "paused_fraction", "paused_fraction_pausing", "paused_fraction_transferring", "paused_fraction_reloading",
        "paused_fraction_stamping",
        "pause_s_median", "publish_s_median", "parity_max_abs_logprob_diff", "versions")  # fmt: skip


def read(folder: Path) -> dict[str, Any]:
    """Return what the table needs of one run."""
    summary = json.loads((folder / "summary.json").read_text())
    config = json.loads((folder / "config.json").read_text())
    return {"seed": config["run"]["seed"], **{key: summary[key] for key in KEYS}}


def table(runs: list[dict[str, Any]]) -> str:
    """Render accuracy, throughput and shares of time, a line per seed."""
    steps = sorted({int(step) for run in runs for step in run["eval"]})
    lines = ["| seed | " + " | ".join(f"step {step}" for step in steps) + " | rise | seconds |"]
    lines.append("|---" * (len(steps) + 3) + "|")
    for run in runs:
        curve = [run["eval"].get(str(step)) for step in steps]
        known = [value for value in curve if value is not None]
        cells = ["-" if value is None else f"{value:.3f}" for value in curve]
        rise = known[-1] - known[0]
        lines.append(f"| {run['seed']} | " + " | ".join(cells) + f" | {rise:+.3f} | {run['wall_s']:.0f} |")
    lines += ["", "| seed | samples/s | generators idle | trainer idle | paused | = pausing + transferring + reloading "
              "+ stamping | median pause | oldest token trained | parity |", "|---" * 9 + "|"]  # fmt: skip
    for run in runs:
        parts = " + ".join(f"{run[f'paused_fraction_{part}']:.1%}" for part in
                           ("pausing", "transferring", "reloading", "stamping"))  # fmt: skip
        lines.append(
            f"| {run['seed']} | {run['samples_per_s']:.0f} | {run['rollout_idle_fraction']:.1%} | "
            f"{run['trainer_idle_fraction']:.1%} | {run['paused_fraction']:.1%} | {parts} | "
            f"{run['pause_s_median'] * 1e3:.0f} ms | {run['age_max_trained']} of {run['max_staleness']} | "
            f"{run['parity_max_abs_logprob_diff']:.1e} |"
        )
    return "\n".join(lines)


def parts(content: dict[str, Any]) -> dict[str, str]:
    """Return what goes into the template."""
    return {"where": page.where(content), "table": table(content["runs"])}


def main() -> None:
    """Take over the run folders named on the command line, if any, and make the page."""
    if folders := sys.argv[1:]:
        command = ["git", "rev-parse", "--short", "HEAD"]
        commit = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
        where = {"commit": commit, "cores": os.cpu_count(), "machine": platform.machine()}
        page.save("demo", {**where, "runs": [read(Path(folder)) for folder in folders]})
    page.write_page("demo", parts(page.load("demo")))


if __name__ == "__main__":
    main()
