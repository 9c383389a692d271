"""Kind slurm: one batch script. The supervisor runs in it, on the first node; Ray's nodes are steps of the job.

Shortly before the time limit Slurm signals the script: the run saves, the job is put back into the queue, and goes on
from its checkpoint there. So it does after `scontrol requeue`, or when Slurm requeues it because a node failed.
"""

import os
import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence

from areal_lite.errors import ConfigError, StallError
from areal_lite.launch.clusters.attempts import Attempts
from areal_lite.launch.clusters.job import Job, Kind, Status
from areal_lite.launch.clusters.remote import ask
from areal_lite.launch.clusters.supervised import bash_problems

_SCRIPT = "job.sbatch"
_UNDER_WAY = ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING", "REQUEUED", "REQUEUE_HOLD", "RESIZING", "SIGNALING",
              "STAGE_OUT", "STOPPED", "SUSPENDED")  # fmt: skip


class Slurm(Kind):
    """A batch system; the job's id is the batch job's, and stays the same when it is requeued."""

    def artefacts(self, job: Job) -> Mapping[str, str]:
        """Return the batch script."""
        return {_SCRIPT: _batch_script(job)}

    def check(self, job: Job) -> Sequence[str]:
        """Have bash read the script, and Slurm too where a controller answers."""
        artefacts = self.artefacts(job)
        problems = bash_problems(artefacts)
        if not problems and shutil.which("sbatch") and ask("scontrol", "ping").returncode == 0:
            tried = ask("sbatch", "--test-only", text=artefacts[_SCRIPT])
            if tried.returncode:
                problems.append(
                    f"sbatch --test-only must accept the script, got {tried.stderr.strip()}: see nodes, gpus_per_node "
                    "and slurm in the profile"
                )
        return problems

    def submit(self, job: Job) -> str:
        """Write the script and hand it to sbatch."""
        script = job.files / _SCRIPT
        script.write_text(self.artefacts(job)[_SCRIPT])
        if shutil.which("sbatch") is None:
            raise ConfigError(
                "--on slurm needs the command sbatch, got none: type launch on a login node of the cluster"
            )
        done = ask("sbatch", "--parsable", str(script))
        if done.returncode:
            raise ConfigError(f"sbatch must take {script}, got {done.stderr.strip()}: see slurm in the profile")
        return done.stdout.strip().partition(";")[0]  # behind it, the cluster's name where there are several

    def status(self, job: Job) -> Status:
        """Ask the controller (`ConfigError` if it is silent); of a job it has forgotten accounts, then the record."""
        shown = ask("scontrol", "show", "job", job.id, "--oneliner")
        if shown.returncode == 0:
            facts = dict(word.partition("=")[::2] for word in shown.stdout.split())
            attempt = int(facts.get("Restarts", 0)) + 1
            nodes = facts.get("NodeList", "(null)").replace("(null)", "")
            where = f"on {nodes}" if nodes else f"without nodes ({facts.get('Reason', 'no reason given')})"
            return read_state(facts["JobState"], facts["ExitCode"], f"job {job.id} {where}, start {attempt}")
        if "Invalid job id" not in shown.stderr:
            raise ConfigError(f"Slurm must answer, got {shown.stderr.strip()}: ask again later")
        kept = ask("sacct", "--noheader", "--parsable2", "--allocations", "--format=State,ExitCode", f"--jobs={job.id}")
        if kept.returncode == 0 and kept.stdout.strip():
            state, _, code = kept.stdout.split("\n")[0].partition("|")
            return read_state(state.split()[0], code, f"job {job.id}")
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
        asked = ask("scontrol", "show", "hostnames", os.environ["SLURM_JOB_NODELIST"])
        if asked.returncode:
            raise StallError(
                f"scontrol must name the job's nodes, got {asked.stderr.strip()}: is Slurm's controller up?"
            )
        return {host: (*step, f"--nodelist={host}") for host in asked.stdout.split()}


def read_state(state: str, exit_code: str, words: str) -> Status:
    """Turn Slurm's words, such as FAILED and 3:0 (exit code and signal), into ours."""
    if state in _UNDER_WAY:
        return Status(f"{state.lower()}: {words}")
    code, _, number = exit_code.partition(":")
    ended = int(code) or (128 + int(number) if int(number or 0) else int(state != "COMPLETED"))
    return Status(f"{state.lower()}: {words}, exit code {ended}", code=ended)


def _batch_script(job: Job) -> str:
    profile, slurm = job.profile, job.profile.slurm
    options = {
        "job-name": job.name,
        "chdir": job.folder,
        "output": str(job.log),
        "open-mode": "append",
        "nodes": profile.nodes,
        "ntasks-per-node": 1,
        "gpus-per-node": profile.gpus_per_node or None,
        "partition": slurm.partition,
        "account": slurm.account,
        "time": slurm.time,
        "signal": f"B:USR1@{slurm.signal_s}",
    }
    lines = [f"--{name}={shlex.quote(str(value))}" for name, value in options.items() if value is not None]
    lines += ["--exclusive", "--mem=0", "--requeue" if slurm.requeue else "--no-requeue", *slurm.options]
    checkpoints = f"{shlex.quote(str(job.run_folder))}/checkpoints/step-*/meta.json" if job.run_folder else ""
    again = slurm.requeue and checkpoints
    python = "python" if profile.enter else shlex.quote(sys.executable)
    header = "\n".join(f"#SBATCH {line}" for line in lines)
    body = _BODY.format(
        enter=profile.enter or ":",
        supervisor=f"{python} -m areal_lite.launch.clusters.attempts {shlex.quote(str(job.record))}",
        again=_AGAIN.format(checkpoints=checkpoints) if again else "",
    )
    return f"#!/bin/bash\n{header}\n{body}"


_BODY = """
{enter}
echo "job $SLURM_JOB_ID on $SLURM_JOB_NODELIST, start $(( ${{SLURM_RESTART_COUNT:-0}} + 1 ))"
told=no started=$(date +%s)
trap '[ $told = stop ] || told=end; kill -TERM "$supervisor"' USR1 # the time limit is near, or a preemption
trap 'told=stop; kill -TERM "$supervisor"' INT                     # asked to stop
trap 'told=${{told/no/stop}}; kill -TERM "$supervisor"' TERM         # cancelled, or requeued
{supervisor} &
supervisor=$!
# A signal ends a wait, not the supervisor.
while wait "$supervisor"; code=$?; kill -0 "$supervisor" 2>/dev/null; do :; done
wait "$supervisor"; code=$?
{again}exit "$code"
"""
_AGAIN = """\
# Where a preemption leaves time, the steps alone are told, and the run saves and ends by itself: by what it has saved.
if [ "$told" != stop ] && [ "$code" = 130 ]; then
    [ "$told" = end ] && started=0
    if [ -n "$(find {checkpoints} -newermt "@$started" 2>/dev/null)" ]; then
        echo "Slurm wants the nodes: back into the queue, to go on from the newest checkpoint"
        scontrol requeue "$SLURM_JOB_ID"
    else
        echo "Slurm wanted the nodes before a step was saved: ask for more time (slurm.time in the profile)"
    fi
fi
"""
