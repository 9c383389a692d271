"""A run on three nodes of this machine that loses a link: two attempts, one conserved run.

That a node may die is shown by `test_ray_job.py`.
"""

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import psutil
import pytest
from loop_builders import PARITY, check_books, loop_config, write_recipe
from places import SUPPORT

from areal_lite.launch.clusters.attempts import Attempt, Attempts
from areal_lite.launch.clusters.job import Job
from areal_lite.record.run_files import read_summary
from areal_lite.record.run_folder import RunFolder

pytestmark = [pytest.mark.cluster, pytest.mark.loop]

STEPS, CUT_AFTER = 5, 2
DEADLINE_S = 880


@dataclass
class OnNodes:
    code: int
    output: str
    job: Job
    left: dict[str, str]
    """What ran on each node after the failed attempt."""

    @property
    def folder(self) -> RunFolder:
        assert self.job.run_folder is not None
        return RunFolder(self.job.run_folder)


def begun(job: Job) -> list[Attempt]:
    """Attempts in which Ray started: a busy machine may be over its limit, 30 s, which nobody can change."""
    return [attempt for attempt in Attempts.read(job).attempts if "timed out during startup" not in attempt.cause]


def processes(job: Job, node: str) -> str:
    shell = str(job.files / f"shell-of-{node}")
    return subprocess.run([shell, "ps", "-eo", "args"], capture_output=True, text=True, timeout=120, check=False).stdout


def is_broken(output: str) -> bool:
    """Whether the rig has broken a node, and not repaired it yet."""
    return output.count(" lost its ") > output.count(" is whole again")


@contextmanager
def suspended(job: Job) -> Iterator[None]:
    """Stop a job's supervisor for a while."""
    supervisor = psutil.Process(int(job.id.partition("@")[0]))
    supervisor.suspend()
    try:
        yield
    finally:
        supervisor.resume()


@pytest.fixture(scope="module")
def job_on_nodes(tmp_path_factory: pytest.TempPathFactory, warm_variables: Mapping[str, str]) -> OnNodes:
    """The rig as one types it, in a folder of /tmp, with a link cut."""
    folder = tmp_path_factory.mktemp("nodes")
    write_recipe(folder / "tiny.yaml", loop_config(folder, run={"steps": STEPS, "log_samples": 4}))
    words = ["--cut-link", CUT_AFTER, "tiny.yaml", f"run.steps={STEPS}"]
    words += ["run.stall_timeout_s=15", "weights.timeout_s=10", "launch.pause_s=5", "run.checkpoint_every=1"]
    words += ["launch.max_attempts=5"]
    words += ["run.preflight=false"]  # test_ssh_nodes.py and test_preflight_nodes.py have it
    with (folder / "output").open("w") as output:
        command = [sys.executable, SUPPORT / "rigs/nodes.py", *map(str, words)]
        process = subprocess.Popen(command, cwd=folder, stdout=output, stderr=output, env=os.environ | warm_variables)
        left: dict[str, str] = {}
        try:
            until = time.monotonic() + DEADLINE_S
            while process.poll() is None and time.monotonic() < until:
                time.sleep(0.2)
                for record in folder.glob("runs/jobs/*.json"):
                    job = Job.model_validate_json(record.read_text())
                    ended = [attempt for attempt in begun(job) if attempt.code]
                    if ended and not left:
                        with suspended(job):  # the next attempt begins once all has been looked at, and is whole
                            hosts = job.profile.sections["ssh"]["hosts"]
                            left = {host: processes(job, host) for host in hosts}
                            while is_broken((folder / "output").read_text()) and time.monotonic() < until:
                                time.sleep(0.1)
            code = process.wait(timeout=1)
        finally:
            process.kill()
            process.wait()
    return OnNodes(code, (folder / "output").read_text(), job, left)


def test_the_job_ends_well_in_its_second_attempt_and_conserves_the_groups(job_on_nodes: OnNodes) -> None:
    assert job_on_nodes.code == 0, job_on_nodes.output
    assert [attempt.code for attempt in begun(job_on_nodes.job)] == [1, 0], job_on_nodes.output
    check_books(job_on_nodes.folder, total=STEPS)
    summary = read_summary(job_on_nodes.folder.path)
    attempts = Attempts.read(job_on_nodes.job).attempts
    assert (summary["attempts"], summary["ledger"]["outstanding"]) == (len(attempts), 0)


def test_engines_and_ranks_are_on_different_nodes_and_agree(job_on_nodes: OnNodes) -> None:
    """Parity over the network is that of one machine."""
    places = dict(re.findall(r"^(node-\d) \(10\.77\.0\.\d\): (.+)$", job_on_nodes.output, flags=re.MULTILINE))
    assert {name: [lane for lane in lanes.split(", ") if "verifier" not in lane] for name, lanes in places.items()} == {
        "node-1": ["queue", "trainer/0"],
        "node-2": ["trainer/1"],
        "node-3": ["rollout/0"],
    }
    assert all(row["parity_max_abs_logprob_diff"] < PARITY for row in job_on_nodes.folder.read("metrics.jsonl"))


def test_a_lost_link_ends_the_attempt_everywhere_by_name(job_on_nodes: OnNodes) -> None:
    (cause,) = [attempt.cause for attempt in begun(job_on_nodes.job) if attempt.code]
    assert "trainer/1" in cause
    assert "node-2 (10.77.0.2) is unreachable from node-1 (10.77.0.1)" in cause
    assert job_on_nodes.left.keys() == {"node-1", "node-2", "node-3"}
    for text in job_on_nodes.left.values():
        # The agents of a Ray node end by themselves, once they miss it; what workers are copied from stays.
        left = re.sub(
            r"ray::(DashboardAgent|RuntimeEnvAgent)|.*/ray/.*/agent.py.*|.*/warm_workers.py --serve.*", "", text
        )
        assert not re.search(r"ray|areal", left), text
