"""A program that imports areal-lite, and calls `areal_lite.run`, stays as it was; the tests' own Ray starts quickly."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import ray
from loop_builders import loop_config
from places import SUPPORT

from areal_lite.config.recipe import parse_config
from areal_lite.launch.run.places import actor_options

pytestmark = pytest.mark.loop

KINDS = ("queue", "rollout", "verifier", "trainer")


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
    assert seen == {
        "status": "done",
        "changed by imports": [],
        "changed by the run": [],
        "patched": [],
        "prints": True,
    }
    assert {"dashboard", "log_monitor", "monitor", "raylet", "gcs_server"} <= started


@pytest.mark.usefixtures("ray_cluster")
@pytest.mark.parametrize(("more", "seen"), [({"A": "1" * 100_000}, ("1" * 100_000, False)), ({}, (None, True))])
def test_the_tests_own_workers_are_copies_unless_they_have_variables_of_their_own(
    more: dict[str, str], seen: tuple[str | None, bool]
) -> None:
    """Seen failing with a request read in one piece, which ended the process that is copied."""

    class Look:
        def look(self) -> tuple[str | None, bool]:
            return os.environ.get("A"), "vllm" in sys.modules

    variables = {kind: actor_options(parse_config({}), kind)["runtime_env"]["env_vars"] for kind in KINDS}
    for kind in KINDS:
        actor = ray.remote(Look).options(runtime_env={"env_vars": variables[kind] | more}).remote()
        assert ray.get(actor.look.remote(), timeout=120) == seen, kind
        ray.kill(actor)
