"""Kind slurm: one batch script. The supervisor runs in it, on the first node; Ray's nodes are steps of the job.

Shortly before the time limit Slurm signals the script: the run saves, the job is put back into the queue, and goes on
from its checkpoint there. So it does after `scontrol requeue`, or when Slurm requeues it because a node failed.
"""

import os
import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence

from pydantic import Field

from areal_lite.config.section import Section
from areal_lite.errors import ConfigError
from areal_lite.launch.clusters.attempts import Attempts
from areal_lite.launch.clusters.job import Job, Kind, Status
from areal_lite.launch.clusters.remote import ask, render, told_by

_SCRIPT = "job.sbatch"
_UNDER_WAY = ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING", "REQUEUED", "REQUEUE_HOLD", "RESIZING", "SIGNALING",
              "STAGE_OUT", "STOPPED", "SUSPENDED")  # fmt: skip


class SlurmSettings(Section):
    """A batch system."""

    partition: str | None = None
    """null = the cluster's default"""
    account: str | None = None
    """null = yours"""
    time: str | None = None
    """time limit, such as 4:00:00; null = the partition's"""
    signal_s: int = Field(300, ge=10)
    """seconds before the time limit at which the run is asked to save and stop"""
    requeue: bool = True
    """go on in another job after the time limit, or when a node failed"""
    options: list[str] = []
    """further options of sbatch, such as --constraint=h200"""


class Slurm(Kind):
    """A batch system; the job's id is the batch job's, and stays the same when it is requeued."""

    Settings = SlurmSettings

    def artefacts(self, job: Job) -> Mapping[str, str]:
        """Return the batch script."""
        python = "python" if job.profile.enter else shlex.quote(sys.executable)
        return {_SCRIPT: render(_SCRIPT, job=job, slurm=self.settings(job), python=python)}

    def check(self, job: Job) -> Sequence[str]:
        """Have bash read the script, and Slurm too where a controller answers."""
        if (problems := super().check(job)) or not shutil.which("sbatch") or ask("scontrol", "ping").returncode:
            return problems
        tried = ask("sbatch", "--test-only", text=self.artefacts(job)[_SCRIPT])
        to_do = "see nodes, gpus_per_node and slurm in the profile"
        said = f"sbatch --test-only must accept the script, got {tried.stderr.strip()}: {to_do}"
        return [said] if tried.returncode else []

    def submit(self, job: Job) -> str:
        """Hand the script to sbatch."""
        to_do = "type launch on a login node of the cluster, and see slurm in the profile"
        said = told_by("sbatch", "--parsable", str(job.files / _SCRIPT), to_do=to_do)
        return said.strip().partition(";")[0]  # behind it, the cluster's name where there are several

    def status(self, job: Job) -> Status:
        """Ask the controller (`ConfigError` if it is silent); of a job it has forgotten accounts, then the record."""
        shown = ask("scontrol", "show", "job", job.id, "--oneliner")
        if shown.returncode == 0:
            facts = dict(word.partition("=")[::2] for word in shown.stdout.split())
            attempt = int(facts.get("Restarts", 0)) + 1
            nodes = facts.get("NodeList", "(null)").replace("(null)", "")
            where = f"on {nodes}" if nodes else f"without nodes ({facts.get('Reason', 'no reason given')})"
            return _status(facts["JobState"], facts["ExitCode"], f"job {job.id} {where}, start {attempt}")
        if "Invalid job id" not in shown.stderr:
            raise ConfigError(f"Slurm must answer, got {shown.stderr.strip()}: ask again later")
        kept = ask("sacct", "--noheader", "--parsable2", "--allocations", "--format=State,ExitCode", f"--jobs={job.id}")
        if kept.returncode == 0 and kept.stdout.strip():
            state, _, code = kept.stdout.split("\n")[0].partition("|")
            return _status(state.split()[0], code, f"job {job.id}")
        recorded = Attempts.read(job).status()
        ended = 1 if recorded.code is None else recorded.code
        return Status(f"Slurm has forgotten job {job.id}; its record says: {recorded.words}", code=ended)

    def stop(self, job: Job) -> None:
        """Have the script interrupt the run, which saves; a job that does not run yet is taken out of the queue."""
        ask("scancel", "--state=PENDING", job.id)
        ask("scancel", "--batch", "--signal=INT", "--state=RUNNING", job.id)

    def nodes(self, job: Job) -> Mapping[str, Sequence[str]]:
        """Return a step of the job for each node of the allocation, this one first; one node needs no step.

        Steps overlap, so that each has all of its node. A step waits for a node that is down for as long as it is let,
        which is start_timeout_s of the profile.
        """
        if job.profile.nodes == 1:
            return {}
        step = ("srun", "--overlap", "--nodes=1", "--ntasks=1", "--mpi=none", "--cpu-bind=none")
        names = os.environ["SLURM_JOB_NODELIST"]
        hosts = told_by("scontrol", "show", "hostnames", names, to_do="see whether Slurm's controller is up").split()
        return {host: (*step, f"--nodelist={host}") for host in hosts}


def _status(state: str, exit_code: str, words: str) -> Status:
    """Turn Slurm's words, such as FAILED and 3:0 (exit code and signal), into ours."""
    if state in _UNDER_WAY:
        return Status(f"{state.lower()}: {words}")
    code, number = map(int, exit_code.split(":"))
    ended = code or (128 + number if number else int(state != "COMPLETED"))
    return Status(f"{state.lower()}: {words}, exit code {ended}", code=ended)
