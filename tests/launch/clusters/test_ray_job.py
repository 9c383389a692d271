"""Kind ray by `ray.jobs`: Ray's real job server on a cluster of two nodes, and a laptop that reaches it by HTTP."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml
from loop_builders import loop_config
from namespaces import Node, make_nodes

from areal_lite.record.run_folder import RunFolder

pytestmark = [pytest.mark.jobs, pytest.mark.loop, pytest.mark.cluster]
_DEADLINE_S = 300.0
_ENV = {
    "RAY_AUTH_MODE": "disabled",
    "RAY_health_check_failure_threshold": "3",  # a node is dead after 39 s; Ray's 5 are 65 s
    "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
}
_VERIFIER = """
import os


def verify(prompt, completion, answer, **_):
    assert os.environ["TOKEN"] == "val 7", "the profile's env has not arrived"
    return float(answer in completion)
"""


def wait_until(condition: Callable[[], object], process: "subprocess.Popen[str] | None" = None) -> None:
    deadline = time.monotonic() + _DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline
        assert process is None or process.poll() is None
        time.sleep(0.2)


def start_ray(node: Node, *words: str) -> None:
    """Start Ray on a node, where it ends with the node."""
    own = [f"--node-ip-address={node.address}", "--num-cpus=1", "--block", "--disable-usage-stats"]
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", *own, *words]
    ray = node.popen(command, env=_ENV, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert ray.stdout is not None
    assert any("Ray runtime started" in line for line in ray.stdout)


class Cluster(NamedTuple):
    laptop: Node
    head: Node
    second: Node
    shared: Path
    """Seen by all nodes."""

    @property
    def folder(self) -> Path:
        """The laptop's own /tmp, as seen from here."""
        return Path("/proc", str(self.laptop.pid), "root", "tmp")

    def join(self) -> None:
        start_ray(self.second, f"--address={self.head.address}:6379")

    def launch(self, name: str, *words: str, **profile: Any) -> "subprocess.Popen[str]":
        """Type `areal-lite launch` on the laptop."""
        own = {"nodes": 2, "env": {"TOKEN": "val 7"}, "shared": str(self.shared)}
        profile = own | {"ray": {"jobs": f"http://{self.head.address}:8265"}} | profile
        (self.folder / "cluster.yaml").write_text(yaml.safe_dump(profile))
        command = [sys.executable, "-m", "areal_lite.launch.commands.main", "launch", "--on", "ray"]
        command += ["--profile", "cluster.yaml", "--name", name, "train", "tiny.yaml", *words]
        pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        return self.laptop.popen(command, cwd="/tmp", env=_ENV, **pipes)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    shared = tmp_path_factory.mktemp("shared")
    with make_nodes(["laptop", "jhead", "jsecond"], shared=[shared]) as nodes:
        made = Cluster(*nodes, shared)
        config = loop_config(shared, run={"log_samples": 0, "checkpoint_every": 1})
        raw = config.model_dump(exclude_unset=True) | {"verifier": {"function": "own.py:verify"}}
        (made.folder / "own.py").write_text(_VERIFIER)
        (made.folder / "tiny.yaml").write_text(yaml.safe_dump(raw))
        start_ray(made.head, "--head", "--port=6379", "--include-dashboard=true", "--dashboard-host=0.0.0.0")
        made.join()
        yield made


def test_a_run_on_two_nodes_of_which_one_dies_is_resumed_and_stopped(cluster: Cluster) -> None:
    """Seen failing with a second attempt that counts the dead node, which Ray lists as alive for half a minute."""
    settings = ["trainer.ranks=2", "run.steps=1000", "run.stall_timeout_s=15", "weights.timeout_s=10"]
    job = cluster.launch("pair", *settings, "launch.max_attempts=2", "launch.pause_s=1")
    there = cluster.shared / "pair"
    folder, record = RunFolder(there / "runs/pair"), there / "runs/jobs/pair/attempts.json"

    def steps() -> list[int]:
        return [row["step"] for row in folder.read("metrics.jsonl")] if folder.path.exists() else []

    wait_until(lambda: len(steps()) > 1, job)
    cluster.second.kill()
    wait_until(lambda: "the next one in" in record.read_text(), job)
    reached = steps()[-1]
    cluster.second.boot()
    cluster.join()
    wait_until(lambda: steps()[-1] > reached + 1, job)
    os.killpg(job.pid, signal.SIGINT)  # ends nsenter too, so that the code is in the output alone
    output, _ = job.communicate(timeout=_DEADLINE_S)
    print(output)
    assert "STOPPED, exit code 130" in output
    first, second = json.loads(record.read_text())["attempts"]
    assert (first["code"], second["code"]) == (1, 130)
    assert (
        "jsecond (10.77.0.3) is unreachable from jhead (10.77.0.2): it, its link or its Ray is down" in first["cause"]
    )
    assert output.count("\njsecond (10.77.0.3): trainer/1\n") == 2
    assert output.count(f"stopped at step {second['step']}") == 1
    assert steps() == list(range(1, second["step"] + 1))
    assert (folder.path / f"checkpoints/step-{second['step']:06d}/meta.json").exists()
    assert (record.parent / "env.sh").stat().st_mode & 0o777 == 0o600
    assert not (cluster.folder / "runs/pair").exists()


def test_failures_name_the_node_and_what_to_type(cluster: Cluster) -> None:
    """Seen failing with a log of 40 lines, printed twice."""
    (cluster.shared / "python").symlink_to(Path(sys.base_prefix, "bin/python3"))
    missing = cluster.launch("missing", enter=f"export PATH={cluster.shared}:$PATH")
    output, _ = missing.communicate(timeout=_DEADLINE_S)
    assert missing.returncode == 1
    assert f"on jhead, got none in {cluster.shared}/python. Fix: activate its environment with enter" in output
    assert len(output.splitlines()) < 12, output
    address = f"http://{cluster.second.address}:8265"
    refused = cluster.launch("refused", ray={"jobs": address})
    output, _ = refused.communicate(timeout=_DEADLINE_S)
    assert refused.returncode == 1
    assert f"a job server at ray.jobs={address}, got Failed to connect" in output
    assert "open a tunnel, `ssh -NL 8265:localhost:8265 HEAD`" in output
