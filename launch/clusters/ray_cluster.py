"""Kind ray: a Ray cluster that runs already, joined by address from one of its nodes, or given a Ray job."""

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from areal_lite.config.section import Section
from areal_lite.errors import ConfigError
from areal_lite.launch.clusters.attempts import INTERRUPTED
from areal_lite.launch.clusters.fit import shipped
from areal_lite.launch.clusters.job import Job, Status
from areal_lite.launch.clusters.supervised import Supervised

_SAVE_TIMEOUT_S = 900


class RaySettings(Section):
    """A Ray cluster that runs already."""

    address: str | None = None
    """host:port of its head; the command then runs on this machine, which is one of its nodes"""
    jobs: str | None = None
    """http://host:8265 in place of address: a Ray job, which ships the recipe and plug-in files"""

    def _problems(self) -> Iterable[str]:
        if self.address and self.jobs:
            yield (
                f"ray takes an address or a jobs URL, got {self.address} and {self.jobs}: leave out address to ship "
                "the recipe as a Ray job"
            )


class RayCluster(Supervised):
    """By address a command of this machine, with a supervisor here; by a jobs URL a Ray job, with one on the head."""

    Settings = RaySettings

    def ships(self, job: Job) -> bool:
        """Return whether it is a Ray job."""
        return self.settings(job).jobs is not None

    def joined(self, job: Job) -> Mapping[str, str]:
        """Return the cluster's address; a Ray job has it already."""
        address = self.settings(job).address
        return {"RAY_ADDRESS": address} if address else {}

    def artefacts(self, job: Job) -> Mapping[str, str]:
        """Return a Ray job's entry point, and the files that are shipped."""
        if not job.ships:
            return {}
        # Ray gives a job three seconds to end, and a run needs time to save.
        env = {"RAY_JOB_STOP_WAIT_TIME_S": str(_SAVE_TIMEOUT_S)}
        request = {"entrypoint": "bash ./start.sh", "submission_id": job.name, "runtime_env": {"env_vars": env}}
        return {"job.json": json.dumps(request, indent=2) + "\n", **shipped(job, ".")[1]}

    def check(self, job: Job) -> Sequence[str]:
        """Check that a cluster is named; it is not asked."""
        ray = self.settings(job)
        if not (ray.address or ray.jobs):
            return [
                "ray needs the address of a cluster's head, or its jobs URL, got neither: set ray.address or ray.jobs"
            ]
        return ()

    def submit(self, job: Job) -> str:
        """Start the supervisor here, or as a Ray job."""
        if not job.ships:
            return super().submit(job)
        settings = json.loads(self.artefacts(job)["job.json"])
        settings["runtime_env"]["working_dir"] = str(job.files)
        return str(_call(job, "submit_job", **settings))

    def status(self, job: Job) -> Status:
        """Ask the supervisor's record, or Ray."""
        if not job.ships:
            return super().status(job)
        info = _call(job, "get_job_info", job.id)
        if not info.status.is_terminal():
            return Status(str(info.status))
        stopped = INTERRUPTED if info.status == "STOPPED" else 1
        code = 0 if info.status == "SUCCEEDED" else info.driver_exit_code or stopped
        # Of a job that failed, the message holds the whole log, whose last line is the supervisor's.
        line = (info.message or "").strip().rpartition("\n")[2]
        words = line.removeprefix("areal-lite launch: ")
        return Status(words if words != line else f"{info.status}, exit code {code}: {line}", code=code)

    def logs(self, job: Job) -> str:
        """Return the log here, or Ray's of the job."""
        return str(_call(job, "get_job_logs", job.id)) if job.ships else super().logs(job)

    def stop(self, job: Job) -> None:
        """Interrupt it."""
        if job.ships:
            _call(job, "stop_job", job.id)
        else:
            super().stop(job)


def _call(job: Job, method: str, *words: str, **settings: Any) -> Any:
    server = RayCluster().settings(job).jobs
    try:
        from ray.job_submission import JobSubmissionClient

        return getattr(JobSubmissionClient(server), method)(*words, **settings)
    except (ImportError, RuntimeError, OSError) as error:  # also errors of the HTTP library below it
        raise ConfigError(
            f"{method} for {job.name} failed: expected a job server at ray.jobs={server}, got {str(error).rstrip('.')}."
            " Fix: correct it, or open a tunnel, `ssh -NL 8265:localhost:8265 HEAD`; Ray jobs need `pip install "
            "'ray[default]==2.60.*'` here and on the cluster, ray.address on one of its nodes does not"
        ) from error
