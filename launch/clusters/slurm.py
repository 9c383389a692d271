"""Kind slurm: one batch script. The supervisor runs in it, on the first node; Ray's nodes are steps of the job.

Shortly before the time limit Slurm signals the script: the run saves, the job requeues itself, and resumes from its
checkpoint there. So it does after `scontrol requeue`, or when Slurm requeues it because a node failed.
"""

import os
import shutil
from collections.abc import Mapping, Sequence

from pydantic import Field

from areal_lite.config.section import Section
from areal_lite.errors import ConfigError
from areal_lite.launch.clusters.attempts import Attempts
from areal_lite.launch.clusters.job import Job, Kind, Status
from areal_lite.launch.clusters.remote import ask, output_of, python_of, render

_SCRIPT = "job.sbatch"
_RUNNING = ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING", "REQUEUED", "REQUEUE_HOLD", "RESIZING", "SIGNALING",
            "STAGE_OUT", "STOPPED", "SUSPENDED")  # fmt: skip


class SlurmSettings(Section):
    """A batch system."""

    partition: str | None = None
    """partition; null = the cluster's default"""
    account: str | None = None
    """account; null = your default"""
    time: str | None = None
    """time limit, such as 4:00:00; a number alone is minutes; null = the partition's"""
    signal_s: int = Field(300, ge=10)
    """seconds before the time limit at which the run starts to save and stop"""
    requeue: bool = True
    """requeue the job after the time limit or a failed node, and resume"""
    options: list[str] = []
    """further options of sbatch, such as --constraint=h200"""
    srun_options: list[str] = []
    """further options of each step, which has one node, such as --container-image=IMAGE (pyxis)"""


class Slurm(Kind):
    """A batch system; the job's id is the batch job's, and stays the same when it is requeued."""

    Settings = SlurmSettings

    def artefacts(self, job: Job) -> Mapping[str, str]:
        """Return the batch script."""
        return {_SCRIPT: render(_SCRIPT, job=job, slurm=self.settings(job), python=python_of(job))}

    def check(self, job: Job) -> Sequence[str]:
        """Have Slurm try the script, where a controller answers."""
        if not shutil.which("sbatch") or ask("scontrol", "ping").returncode:
            return ()
        tried = ask("sbatch", "--test-only", text=self.artefacts(job)[_SCRIPT])
        fix = "see nodes, gpus_per_node and slurm in the profile"
        problem = f"sbatch --test-only must accept the script, got {tried.stderr.strip()}: {fix}"
        return [problem] if tried.returncode else ()

    def submit(self, job: Job) -> str:
        """Hand the script to sbatch."""
        fix = "type launch on a login node of the cluster, and see slurm in the profile"
        output = output_of("sbatch", "--parsable", str(job.files / _SCRIPT), fix=fix)
        return output.strip().partition(";")[0]  # after it, the cluster's name where there are several

    def status(self, job: Job) -> Status:
        """Ask the controller (`ConfigError` if it is silent); once it has forgotten the job, read the job's record."""
        shown = ask("scontrol", "show", "job", job.id, "--oneliner")
        if shown.returncode == 0:
            return _status(dict(word.partition("=")[::2] for word in shown.stdout.split()), job.id)
        if "Invalid job id" not in shown.stderr:
            raise ConfigError(f"Slurm must answer, got {shown.stderr.strip()}: try again later")
        recorded = Attempts.read(job).status()
        ended = 1 if recorded.code is None else recorded.code
        return Status(f"Slurm no longer knows job {job.id}; its record: {recorded.words}", code=ended)

    def stop(self, job: Job) -> None:
        """Interrupt the run through the script, so that it saves; a job that does not run yet leaves the queue."""
        ask("scancel", "--state=PENDING", job.id)
        ask("scancel", "--batch", "--signal=INT", "--state=RUNNING", job.id)

    def nodes(self, job: Job) -> Mapping[str, Sequence[str]]:
        """Return a step of the job for each node of the allocation, this one first; outside one, with made-up names.

        One node without options needs no step. Steps overlap, so that each has all of its node. A step waits for a
        node that is down; the profile's start_timeout_s ends that.
        """
        options = self.settings(job).srun_options
        if job.profile.nodes == 1 and not options:
            return {}
        hosts = [f"NODE-{number}" for number in range(1, job.profile.nodes + 1)]
        if names := os.environ.get("SLURM_JOB_NODELIST"):
            fix = "see whether Slurm's controller is up"
            hosts = output_of("scontrol", "show", "hostnames", names, fix=fix).split()
        step = ("srun", "--overlap", "--nodes=1", "--ntasks=1", "--mpi=none", "--cpu-bind=none", *options)
        return {host: (*step, f"--nodelist={host}") for host in hosts}


def _status(facts: Mapping[str, str], job_id: str) -> Status:
    """Translate Slurm's facts, such as JobState=FAILED and ExitCode=3:0 (exit code and signal)."""
    state, start = facts["JobState"], int(facts.get("Restarts", 0)) + 1
    nodes = facts.get("NodeList", "(null)").replace("(null)", "")
    where = f"on {nodes}" if nodes else f"without nodes ({facts.get('Reason', 'no reason given')})"
    words = f"{state.lower()}: job {job_id} {where}, start {start}"
    if state in _RUNNING:
        return Status(words)
    code, number = map(int, facts["ExitCode"].split(":"))
    ended = code or (128 + number if number else int(state != "COMPLETED"))
    return Status(f"{words}, exit code {ended}", code=ended)
