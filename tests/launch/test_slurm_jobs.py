"""`areal-lite launch --on slurm` as one types it: jobs on two nodes of a real Slurm, namespaces of this machine."""

import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from loop_builders import GROUPS, check_books, loop_config, saved_step, write_recipe
from namespaces import NETWORK
from places import SUPPORT
from slurm_daemons import Slurm, make_slurm

from areal_lite.record.run_folder import RunFolder

pytestmark = [pytest.mark.slurm, pytest.mark.cluster, pytest.mark.loop]

ENDED = ("COMPLETED", "FAILED", "TIMEOUT", "CANCELLED")
_DEADLINE_S = 600.0


@dataclass
class User:
    """Somebody at the cluster's login node."""

    slurm: Slurm
    folder: Path

    def types(self, *words: str) -> "subprocess.CompletedProcess[str]":
        """Type an `areal-lite` command, and wait for its end."""
        command = self.slurm.command([sys.executable, "-m", "areal_lite.launch.commands.main", *words], cwd=self.folder)
        return subprocess.run(command, capture_output=True, text=True, timeout=_DEADLINE_S, check=False)

    def profile(self, **settings: Any) -> str:
        """Write a profile of two nodes, and return its file's name.

        They share the machine's cores: one each is what Ray is told, so that it spreads the processes.
        """
        network = {"network": str(NETWORK), "ports": "10000-32767", "env": {"RAY_OVERRIDE_RESOURCES": '{"CPU": 1}'}}
        profile = {"nodes": 2, "shared": str(self.folder), **network, **settings}
        (self.folder / "profile.yaml").write_text(yaml.safe_dump(profile))
        return "profile.yaml"

    def recipe(self, name: str, **run: Any) -> str:
        """Write a recipe of the tiny model, and return its file's name."""
        shutil.copy(SUPPORT / "loop_verifiers.py", self.folder)  # every node must see it
        verifier = {"function": f"{self.folder}/loop_verifiers.py:takes_its_time", "processes": 2}
        config = loop_config(self.folder, run={"log_samples": GROUPS, **run}, verifier=verifier)
        return write_recipe(self.folder / f"{name}.yaml", config).name

    def facts(self, job: str) -> dict[str, str]:
        """Ask Slurm how a job stands."""
        return dict(word.partition("=")[::2] for word in self.slurm.ask("scontrol", "show", "job", job, "-o").split())

    def wait_until(self, condition: Callable[[], object], job: str, what: str) -> None:
        deadline = time.monotonic() + _DEADLINE_S
        while not condition():
            facts = self.facts(job)
            log = Path(facts["StdOut"])
            said = log.read_text() if log.exists() else ""
            # Between the two looks the job may have come to its end, as one did once in a whole suite.
            assert facts["JobState"] not in ENDED or condition(), f"no {what}:\n{facts}\n{said}"
            assert time.monotonic() < deadline, f"no {what} yet:\n{facts}\n{said}"
            time.sleep(0.5)


@pytest.fixture(scope="module")
def user(loop_folder: Path) -> Iterator[User]:
    with make_slurm(2, shared=[loop_folder]) as slurm:
        yield User(slurm, loop_folder)


def submitted(done: "subprocess.CompletedProcess[str]") -> str:
    """Return the batch job's id."""
    found = re.search(r"is slurm (\d+);", done.stdout)
    assert found is not None, done.stdout + done.stderr
    return found[1]


def test_a_dry_run_asks_slurm(user: User) -> None:
    """The script is tried by sbatch where a controller answers: it knows which partitions there are."""
    recipe = user.recipe("dry", steps=1)
    dry = ["launch", "--on", "slurm", "--dry-run", "--profile"]
    good = user.types(*dry, user.profile(), "train", recipe)
    assert good.returncode == 0, good.stdout + good.stderr
    assert "#SBATCH --nodes=2" in good.stdout
    assert "srun --overlap --nodes=1 --ntasks=1 --mpi=none --cpu-bind=none --nodelist=NODE-2 'bash -s'" in good.stdout
    bad = user.types(*dry, user.profile(slurm={"partition": "nowhere"}), "train", recipe)
    assert bad.returncode == 1
    assert "invalid partition" in bad.stderr


@pytest.mark.usefixtures("copied")
def test_a_run_goes_on_after_its_time_limit_and_a_requeue_until_it_is_stopped(user: User) -> None:
    """One job, three starts: the time limit, `scontrol requeue`, `launch --stop`. Steps once, books right.

    A trainer rank on each node. A requeue tells all processes at once to end, as `scancel` and a preemption do.

    Seen failing with a `ray start` that hears SIGTERM.
    """
    recipe = user.recipe("goes_on", steps=1000, checkpoint_every=2)
    profile = user.profile(slurm={"time": "30", "signal_s": 90})
    launch = ["launch", "--on", "slurm", "--profile", profile, "--name", "goes-on", "--detach"]
    more = ["trainer.ranks=2", "run.preflight=false"]  # test_ssh_nodes.py and test_preflight_nodes.py have it
    job = submitted(user.types(*launch, "train", recipe, *more))
    folder = RunFolder(user.folder / "runs" / "goes-on")

    user.wait_until(lambda: len(folder.read("metrics.jsonl")) >= 3, job, "steps of the first start")
    minutes = [int(part) for part in user.facts(job)["RunTime"].split(":")][1] + 2
    user.slurm.ask("scontrol", "update", f"jobid={job}", f"timelimit={minutes}")  # so that it is near
    user.wait_until(lambda: user.facts(job)["Restarts"] == "1", job, "second start")
    user.slurm.ask("scontrol", "update", f"jobid={job}", "timelimit=30")
    saved = saved_step(folder)
    assert saved == len(folder.read("metrics.jsonl"))  # the run stopped where it was saved

    user.wait_until(lambda: len(folder.read("metrics.jsonl")) >= saved + 3, job, "steps of the second start")
    user.slurm.ask("scontrol", "requeue", job)
    user.wait_until(lambda: user.facts(job)["Restarts"] == "2", job, "third start")
    again = saved_step(folder)
    user.wait_until(lambda: len(folder.read("metrics.jsonl")) >= again + 3, job, "steps of the third start")
    assert user.types("launch", "--stop", "goes-on").returncode == 0
    user.wait_until(lambda: user.facts(job)["JobState"] in ENDED, job, "end")
    for node in user.slurm.nodes:
        left = subprocess.run(node.command(["ps", "-eo", "args"]), capture_output=True, text=True, check=True).stdout
        assert "raylet" not in left
        assert "areal_lite" not in left

    check_books(folder, total=saved_step(folder))
    assert "130" in user.types("launch", "--status", "goes-on").stdout
    log = user.types("launch", "--logs", "goes-on").stdout
    places = dict(re.findall(r"^(slurm\d) \(10\.77\.0\.\d\): (.+)$", log, flags=re.MULTILINE))
    assert "trainer/0" in places["slurm0"]
    assert "trainer/1" in places["slurm1"]
    assert re.search(r"saved step-\d+ after SIGTERM", log)  # for the requeue
