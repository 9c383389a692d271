"""Kind ray by `ray.jobs`, with Ray's real job server on this machine: a run as a Ray job, and one that is stopped."""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from launch_builders import make_job
from loop_builders import loop_config

from areal_lite.launch.clusters.job import find_kind
from areal_lite.launch.clusters.profile import Profile
from areal_lite.launch.commands.launch import run_job
from areal_lite.network import listen

pytestmark = [pytest.mark.jobs, pytest.mark.loop]
_DEADLINE_S = 300.0
_VERIFIER = """
import os


def verify(prompt, completion, answer, **_):
    assert os.environ["TOKEN"] == "val 7", "the profile's env has not arrived"
    return float(answer in completion)
"""


def wait_for_agent(address: str) -> None:
    """Wait until a job is accepted: the server answers before the agent that starts jobs has registered."""
    from ray.job_submission import JobSubmissionClient

    ends_at = time.monotonic() + 120
    while True:
        try:
            JobSubmissionClient(address).submit_job(entrypoint="true")
        except RuntimeError as error:
            if "No available agent" not in str(error) or time.monotonic() > ends_at:
                raise
            time.sleep(0.5)
        else:
            return


@pytest.fixture(scope="module")
def job_server() -> Iterator[str]:
    """Start a Ray of its own with a dashboard; yields the job server's address.

    Its folder has a short name: below pytest's, the dashboard's sockets can exceed the 107 bytes of a socket's path.
    """
    ports = [listen("127.0.0.1", range(21000, 22000)) for _ in range(3)]
    gcs, dashboard, clients = (probe.getsockname()[1] for probe in ports)
    for probe in ports:
        probe.close()
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    environment |= {"RAY_AUTH_MODE": "disabled", "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp", ignore_cleanup_errors=True) as folder:
        words = ["start", "--head", "--block", f"--port={gcs}", "--disable-usage-stats", f"--temp-dir={folder}"]
        words += [
            "--include-dashboard=true",
            f"--dashboard-port={dashboard}",
            f"--ray-client-server-port={clients}",
            "--num-cpus=4",
        ]
        with subprocess.Popen(
            [sys.executable, "-m", "ray.scripts.scripts", *words], env=environment, stdout=subprocess.PIPE, text=True
        ) as ray:
            try:
                assert ray.stdout is not None
                assert any("Ray runtime started" in line for line in ray.stdout)
                address = f"http://127.0.0.1:{dashboard}"
                wait_for_agent(address)
                yield address
            finally:
                ray.terminate()  # also where SIGINT is ignored, as in a background job
                ray.wait(60)


def recipe(folder: Path, **run: object) -> str:
    """Write a recipe whose verifier needs the profile's environment; the plug-in lies beside it."""
    config = loop_config(folder, run={"log_samples": 0, "checkpoint_every": 1, **run})
    raw = config.model_dump(exclude_unset=True) | {"verifier": {"function": "own.py:verify"}}
    (folder / "own.py").write_text(_VERIFIER)
    (folder / "tiny.yaml").write_text(yaml.safe_dump(raw))
    return "tiny.yaml"


@pytest.mark.parametrize("stopped", [False, True])
def test_a_run_as_a_ray_job(
    stopped: bool, job_server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Seen failing with `FileNotFoundError: <shared>/<job>/runs/jobs/<job>/pid`, before anything was run."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    shared = tmp_path / "shared"
    settings = {"shared": str(shared), "env": {"TOKEN": "val 7"}, "ray": {"jobs": job_server}}
    name = f"job-{'stopped' if stopped else 'whole'}"
    words = f"train {recipe(tmp_path, steps=1000 if stopped else 2)} launch.max_attempts=1"
    job = make_job("ray", words, name=name, folder=str(tmp_path), profile=Profile.model_validate(settings))
    assert run_job(job, detach=True) == 0
    job = job.model_copy(update={"id": name})
    kind, rows = find_kind("ray"), shared / name / "runs" / name / "metrics.jsonl"
    deadline, asked = time.monotonic() + _DEADLINE_S, False
    while (status := kind.status(job)).code is None:
        assert time.monotonic() < deadline, kind.logs(job)
        if stopped and not asked and rows.exists() and rows.read_text():
            kind.stop(job)
            asked = True
        time.sleep(0.5)
    assert status.code == (130 if stopped else 0), kind.logs(job)
    steps = [json.loads(line)["step"] for line in rows.read_text().splitlines()]
    saved = rows.with_name("checkpoints") / f"step-{steps[-1]:06d}" / "meta.json"
    assert saved.exists() == stopped or not stopped
    assert steps == list(range(1, len(steps) + 1))
    assert stopped or len(steps) == 2
    assert (shared / name / "runs/jobs" / name / "env.sh").stat().st_mode & 0o777 == 0o600
