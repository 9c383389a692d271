"""Kind local: this machine, with the attempts and the record of a job."""

from collections.abc import Sequence

from areal_lite.launch.clusters.job import Job
from areal_lite.launch.clusters.supervised import Supervised


class Local(Supervised):
    """The command as it is typed; the run starts its own Ray."""

    def check(self, job: Job) -> Sequence[str]:
        """Have bash read the script; there is one machine."""
        if job.profile.nodes > 1:
            return [f"--on local is one machine, got nodes={job.profile.nodes}: choose another kind, or set nodes: 1"]
        return super().check(job)
