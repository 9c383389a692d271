"""A program that imports areal-lite, and calls `areal_lite.run`, stays as it was."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from loop_builders import loop_config
from places import SUPPORT

pytestmark = pytest.mark.loop


def test_a_program_that_runs_a_recipe_is_left_as_it_was(loop_folder: Path) -> None:
    """Its own `ray.init` afterwards starts everything that Ray starts, the dashboard included.

    Catches replaced methods of Ray, and a threshold of the garbage collector that an import sets.
    """
    config = loop_config(loop_folder, run={"steps": 1, "dir": str(loop_folder / "host"), "eval_every": 0})
    recipe = loop_folder / "host.json"
    recipe.write_text(config.model_dump_json())
    command = [sys.executable, str(SUPPORT / "host_program.py"), str(recipe)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=600, cwd=loop_folder)
    assert ended.returncode == 0, ended.stderr
    seen = json.loads(ended.stdout.splitlines()[-1])
    started = set(seen.pop("started"))
    assert seen == {"status": "done", "changed by imports": [], "changed by the run": [], "patched": [], "prints": True}
    assert {"dashboard", "log_monitor", "monitor", "raylet", "gcs_server"} <= started
