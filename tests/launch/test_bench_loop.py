"""A bench of many runs, as a command at a terminal: every way to end is clean."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from loop_builders import PARITY, loop_config, saved_step, write_recipe
from test_faults import steps, typed
from user_run import UserRun

pytestmark = [pytest.mark.loop, pytest.mark.usefixtures("adopted_orphans", "copied")]

BENCH_STEPS = 16
"""Of the run that Ctrl-C stops."""


def test_ctrl_c_in_a_bench_and_the_printed_command(loop_folder: Path) -> None:
    """A run that fails does not stop the next; Ctrl-C saves; the printed command finishes what is left."""
    config = loop_config(loop_folder, run={}, weights={"timeout_s": 15})
    recipe = write_recipe(loop_folder / "bench-recipe.yaml", config)
    runs: dict[str, dict[str, Any]] = {
        "broken": {"data.path": str(loop_folder / "nowhere.jsonl")},
        "long": {"run.steps": BENCH_STEPS, "queue.max_staleness": 1},
    }
    plan, out = loop_folder / "plan.yaml", loop_folder / "bench-out"
    plan.write_text(yaml.safe_dump({"recipe": str(recipe), "runs": runs}))
    out.mkdir()
    with UserRun(["areal-lite", "bench", "plan", f"../{plan.name}", "--out", "."], run_folder=out / "long") as run:
        run.wait_for_steps(3)
        run.press_ctrl_c()
        run.ends_with(130)
    assert "Traceback" not in run.output
    assert "run broken failed: " in run.output
    assert "nowhere.jsonl" in run.output
    assert 3 <= saved_step(run.folder) == len(steps(run)) < BENCH_STEPS
    command = re.findall(r"^\s*(areal-lite bench .*)$", run.output, flags=re.MULTILINE)[-1]

    with typed(command, folder=out / "long") as again:
        again.ends_with(1)
    assert "failed: broken" in again.output
    assert steps(again) == list(range(1, BENCH_STEPS + 1))
    assert all(row["parity_max_abs_logprob_diff"] < PARITY for row in again.folder.read("metrics.jsonl"))
    results = json.loads((out / "results.json").read_text())
    assert {entry["name"]: entry["status"].partition(":")[0] for entry in results["runs"]} == {
        "broken": "not run",
        "long": "done",
    }
