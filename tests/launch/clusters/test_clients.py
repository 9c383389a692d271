"""What is said to kubectl and to Ray's job server, with stand-ins for both that answer from a script.

No Kubernetes cluster and no job server were there: that they answer so is from their documentation.
"""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from launch_builders import make_job

from areal_lite.errors import ConfigError
from areal_lite.launch.clusters.job import Job, Status
from areal_lite.launch.clusters.kubernetes import Kubernetes
from areal_lite.launch.clusters.ray_cluster import RayCluster
from areal_lite.launch.commands.launch import run_job

KUBECTL = """#!/bin/sh
echo "$*" >> {folder}/calls
case "$*" in
*" apply "*) cp "$4" {folder}/applied ;;
*" get rayjob "*) cat {folder}/state ;;
*" get pods "*) echo pod/head-1 ;;
*" logs "*) echo step 1 ;;
esac
"""


@pytest.fixture
def kubectl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Put a stand-in for kubectl on the path; returns its folder."""
    command = tmp_path / "kubectl"
    command.write_text(KUBECTL.format(folder=tmp_path))
    command.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    return tmp_path


def calls(kubectl: Path) -> list[str]:
    return (kubectl / "calls").read_text().splitlines()


def state(kubectl: Path, **status: str) -> None:
    (kubectl / "state").write_text(json.dumps({"status": {"rayClusterName": "run-1-x", **status}}))


def test_kubernetes_is_given_the_manifest_and_asked_about_it(kubectl: Path) -> None:
    job, kind = make_job("kubernetes", folder=str(kubectl)), Kubernetes()
    assert run_job(job, detach=True) == 0
    assert "default/run-1" in job.record.read_text()
    assert [call.split("/")[-1] for call in calls(kubectl)] == ["secret.yaml", "rayjob.yaml"]
    config_map, rayjob = yaml.safe_load_all((kubectl / "applied").read_text())
    assert (config_map["kind"], rayjob["kind"]) == ("ConfigMap", "RayJob")
    assert rayjob["spec"]["rayClusterSpec"]["workerGroupSpecs"][0]["replicas"] == 3
    state(kubectl)
    kind.stop(job)
    assert calls(kubectl)[-1] == (
        "--namespace=default exec pod/head-1 -- sh -c kill -TERM $(cat /shared/run-1/runs/jobs/run-1/pid)"
    )
    assert "ray.io/cluster=run-1-x,ray.io/node-type=head" in calls(kubectl)[-2]
    assert kind.logs(job) == "step 1\n"


@pytest.mark.parametrize(
    ("said", "code"),
    [
        ({}, None),
        ({"jobDeploymentStatus": "Running", "jobStatus": "RUNNING"}, None),
        ({"jobDeploymentStatus": "Complete", "jobStatus": "SUCCEEDED"}, 0),
        ({"jobDeploymentStatus": "Failed", "jobStatus": "FAILED", "message": "failed with exit code 130, last"}, 130),
        ({"jobDeploymentStatus": "Failed", "message": "deadline exceeded"}, 1),
    ],
)
def test_the_exit_code_of_a_rayjob(said: dict[str, str], code: int | None, kubectl: Path) -> None:
    state(kubectl, **said)
    assert Kubernetes().status(make_job("kubernetes")).code == code


def test_a_kubectl_that_is_missing_or_refuses_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match="got: kubectl must be there"):
        Kubernetes().status(make_job("kubernetes"))
    (tmp_path / "kubectl").write_text("#!/bin/sh\necho forbidden >&2\nexit 1\n")
    (tmp_path / "kubectl").chmod(0o755)
    with pytest.raises(ConfigError, match="get rayjob run-1 -o json` must work, got: forbidden"):
        Kubernetes().status(make_job("kubernetes"))


class JobServer:
    """In the place of Ray's JobSubmissionClient."""

    def __init__(self) -> None:
        self.stopped: list[str] = []
        self.message: str | None = None
        self.status, self.driver_exit_code = "RUNNING", None

    def submit_job(self, *, runtime_env: dict[str, Any], submission_id: str, entrypoint: str) -> str:
        folder = Path(runtime_env["working_dir"])
        self.shipped = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
        self.env, self.entrypoint = runtime_env["env_vars"], entrypoint
        return submission_id

    def get_job_info(self, name: str) -> Any:
        is_terminal = self.status != "RUNNING"
        status = type("JobStatus", (str,), {"is_terminal": lambda self: is_terminal})(self.status)
        return SimpleNamespace(status=status, driver_exit_code=self.driver_exit_code, message=self.message)

    def stop_job(self, name: str) -> None:
        self.stopped.append(name)


def test_a_ray_job_ships_the_recipe_and_its_plug_ins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen failing with the plug-in of an override left out, and with the whole log as its status."""
    server = JobServer()
    monkeypatch.setattr("ray.job_submission.JobSubmissionClient", lambda url: server)
    monkeypatch.chdir(tmp_path)
    Path("mine.yaml").write_text("run: {steps: 3}\n")
    Path("v.py").write_text("def f(): ...\n")
    kind: RayCluster = RayCluster()
    job: Job = make_job("ray", "train mine.yaml verifier.function=v.py:f", folder=str(tmp_path), id="run-1")
    assert run_job(job, detach=True) == 0
    secret = "runs/jobs/run-1/env.sh"
    assert server.shipped == {"job.json", "mine.yaml", "v.py", "start.sh", "runs/jobs/run-1.json", secret}
    assert server.env.keys() == {"RAY_JOB_STOP_WAIT_TIME_S"}
    assert kind.status(job).code is None
    server.status, server.driver_exit_code = "FAILED", 130
    server.message = "Job failed, last logs:\nareal-lite launch: attempt 1\nno python\n"
    assert kind.status(job) == Status("FAILED, exit code 130: no python", code=130)
    server.message = server.message.replace("no python", "areal-lite launch: stopped at step 7")
    assert kind.status(job) == Status("stopped at step 7", code=130)
    server.status, server.driver_exit_code = "STOPPED", None
    assert kind.status(job).code == 130
    kind.stop(job)
    assert server.stopped == ["run-1"]
