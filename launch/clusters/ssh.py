"""Kind ssh: hosts that this machine reaches by a command. The supervisor runs here, the run on the first of them."""

import shlex
from collections.abc import Mapping, Sequence

from areal_lite.launch.clusters.attempts import driver_script
from areal_lite.launch.clusters.job import Job
from areal_lite.launch.clusters.ray_nodes import start_script
from areal_lite.launch.clusters.supervised import Supervised, bash_problems

_ENV = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "made-for-each-attempt"}


class Ssh(Supervised):
    """Ray on each host, started and ended over `ssh.shell`."""

    def artefacts(self, job: Job) -> Mapping[str, str]:
        """Return what head, workers and command are, as scripts; addresses and the token are known only then."""
        ports = job.profile.port_range[:500]
        scripts = {"head.sh": start_script(job, ports=ports, head="", peer="SECOND_HOST", env=_ENV)}
        if job.profile.nodes > 1:
            scripts["worker.sh"] = start_script(job, ports=ports, head="HEAD:20000", peer="HEAD", env=_ENV)
        shells = "\n".join(shlex.join([*words, "bash -s"]) for words in self.nodes(job).values())
        return {
            "hosts": f"{shells}\n",
            **scripts,
            "run.sh": driver_script(job, attempt=1, address="HEAD:20000", env=_ENV),
        }

    def check(self, job: Job) -> Sequence[str]:
        """Have bash read the scripts, and compare hosts with nodes."""
        if not job.profile.ssh.hosts:
            return [f"ssh.hosts must name nodes={job.profile.nodes} hosts, got none: list them in the profile"]
        if "{host}" not in job.profile.ssh.shell:
            return [f"ssh.shell must say where {{host}} goes, got {job.profile.ssh.shell}: add it"]
        return bash_problems({name: text for name, text in self.artefacts(job).items() if name.endswith(".sh")})

    def nodes(self, job: Job) -> Mapping[str, Sequence[str]]:
        """Return each host's shell."""
        words = shlex.split(job.profile.ssh.shell)
        return {host: [word.replace("{host}", host) for word in words] for host in job.profile.ssh.hosts}
