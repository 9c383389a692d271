"""What is different about a Ray that is started here."""

import contextlib
import json
import os
import sys
from typing import Any

import psutil
import pytest
import ray

from areal_lite.launch.run import setup_worker

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
def test_ray_starts_actors_that_way() -> None:
    """Seen failing with Ray's script. That nothing runs that no run uses: `test_faults.py`, `test_ray_start.py`."""

    class Actor:
        def look(self) -> str | None:
            return os.environ.get("A")

    actor = ray.remote(Actor).options(runtime_env={"env_vars": {"A": "1"}}).remote()
    assert ray.get(actor.look.remote(), timeout=120) == "1"
    commands = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):  # or one that has ended
            commands.append(process.cmdline())
    ray.kill(actor)
    assert any(setup_worker.__file__ in word for command in commands if "raylet" in command[0] for word in command)
