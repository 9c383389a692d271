"""What is different about a Ray that is started here."""

import json
import os
import sys
from typing import Any

import pytest
import ray

from areal_lite.config.recipe import parse_config
from areal_lite.launch.run import setup_worker
from areal_lite.launch.run.places import actor_options

KINDS = ("queue", "rollout", "verifier", "trainer")
RAY_S, OPTIONS = "/ray/workers/default_worker.py", ["--node-ip-address=127.0.0.1", "--startup-token=3"]


def command_for(environment: dict[str, str], **context: Any) -> list[str]:
    written = json.dumps({"env_vars": {"A": "1"}, "py_executable": sys.executable, "java_jars": [], **context})
    words = [RAY_S, *OPTIONS, "--language=PYTHON", f"--serialized-runtime-env-context={written}"]
    return setup_worker.command(words, environment)


def test_a_worker_gets_its_variables_and_nothing_that_it_does_not_know() -> None:
    """Ray's own script imports Ray to do the same. Seen failing with Ray's two options passed on."""
    environment = {"A": "0", "B": "2"}
    assert command_for(environment) == [sys.executable, RAY_S, *OPTIONS]
    assert environment == {"A": "1", "B": "2"}


@pytest.mark.parametrize(
    "context",
    [{"py_executable": "nsys python"}, {"command_prefix": ["cd /"]}, {"env_vars": {"PATH": "/bin:${PATH}"}}],
    ids=["another python", "prefix", "variables of variables"],
)
def test_all_but_variables_is_left_to_ray(context: dict[str, Any]) -> None:
    """Seen failing with each of them taken for none."""
    environment: dict[str, str] = {}
    _, script, *words = command_for(environment, **context)
    assert script == "/ray/workers/setup_worker.py"
    assert (words[0], words[-1].partition("=")[0]) == (RAY_S, "--serialized-runtime-env-context")
    assert environment == {}


@pytest.mark.loop
@pytest.mark.usefixtures("ray_cluster")
@pytest.mark.parametrize(("more", "seen"), [({"A": "1" * 100_000}, ("1" * 100_000, False)), ({}, (None, True))])
def test_the_tests_own_workers_are_copies_unless_they_have_variables_of_their_own(
    more: dict[str, str], seen: tuple[str | None, bool]
) -> None:
    """How workers of runs start, and that nothing runs that no run uses: `test_faults.py`, `test_ray_start.py`.

    Seen failing with what was asked read in one piece, which ended the process that is copied.
    """

    class Look:
        def look(self) -> tuple[str | None, bool]:
            return os.environ.get("A"), "vllm" in sys.modules

    variables = {kind: actor_options(parse_config({}), kind)["runtime_env"]["env_vars"] for kind in KINDS}
    for kind in KINDS:
        actor = ray.remote(Look).options(runtime_env={"env_vars": variables[kind] | more}).remote()
        assert ray.get(actor.look.remote(), timeout=120) == seen, kind
        ray.kill(actor)
