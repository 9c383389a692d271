"""What the kinds share whose supervisor is a process of this machine: local, ssh, and ray by address."""

import contextlib
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence

import psutil

from areal_lite.config.section import Section
from areal_lite.errors import ConfigError, StallError
from areal_lite.launch.clusters.attempts import Attempts, driver_script, end_leftovers
from areal_lite.launch.clusters.job import Job, Kind, Status
from areal_lite.launch.clusters.ray_nodes import start_script
from areal_lite.record.writer import find_process

_ENV = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "made-for-each-attempt"}


class Supervised(Kind):
    """A process of its own session supervises the job, whose id is the process's, the moment it began, and its host."""

    def artefacts(self, job: Job) -> Mapping[str, str]:
        """Return the line that each attempt runs."""
        return {"run.sh": driver_script(job, attempt=1)}

    def submit(self, job: Job) -> str:
        """Start the supervisor, which outlives this terminal."""
        command = [sys.executable, "-m", "areal_lite.launch.clusters.attempts", str(job.record)]
        with job.log.open("ab") as log:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=job.folder, start_new_session=True
            )
        return f"{process.pid}@{psutil.Process(process.pid).create_time():.2f}@{os.uname().nodename}"

    def status(self, job: Job) -> Status:
        """Read the record of the attempts; a supervisor that is gone without a word has failed."""
        host, is_gone = _other_host(job), self._process(job) is None
        status = Attempts.read(job).status()  # after that look, as it may have ended in between
        if status.code is None and host:
            return Status(f"{status.words}; whether its supervisor still runs, ask on {host}")
        if status.code is None and is_gone:
            return Status(f"failed: its supervisor (process {job.id}) is gone; {status.words}; see {job.log}", code=1)
        return status

    def stop(self, job: Job) -> None:
        """Interrupt the supervisor, which hands it on; end what one that was killed has left.

        Raises:
            ConfigError: The supervisor runs on another host.
            StallError: Something could not be ended.
        """
        if host := _other_host(job):
            raise ConfigError(
                f"{job.name} is stopped where its supervisor runs, got {os.uname().nodename}: ask on {host}"
            )
        if (process := self._process(job)) is not None:
            process.send_signal(signal.SIGINT)
        elif problems := end_leftovers(job):
            raise StallError(f"every process of {job.name} must end, got {'; '.join(problems)}: end them by hand")

    def _process(self, job: Job) -> psutil.Process | None:
        number, began, *_ = [*job.id.split("@"), ""]
        with contextlib.suppress(ValueError):
            return find_process(int(number), float(began))
        return None


class Local(Supervised):
    """The command as it is typed; the run starts its own Ray."""

    def check(self, job: Job) -> Sequence[str]:
        """Have bash read the script; there is one machine."""
        if job.profile.nodes > 1:
            return [f"--on local is one machine, got nodes={job.profile.nodes}: choose another kind, or set nodes: 1"]
        return super().check(job)


class SshSettings(Section):
    """Machines with a name."""

    hosts: list[str] = []
    """the first is the head; as many as nodes"""
    shell: str = "ssh -o BatchMode=yes -o ConnectTimeout=15 -o ServerAliveInterval=15 {host}"
    """command in front of a shell command line that is meant for a host; it must notice by itself that a link is cut"""


class Ssh(Supervised):
    """Hosts that this machine reaches by a command, `ssh.shell`, over which Ray is started and ended on each."""

    Settings = SshSettings

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
            "run.sh": driver_script(job, attempt=1, env={**_ENV, "RAY_ADDRESS": "HEAD:20000"}),
        }

    def check(self, job: Job) -> Sequence[str]:
        """Have bash read the scripts, and compare hosts with nodes."""
        hosts, shell, nodes = self.settings(job).hosts, self.settings(job).shell, job.profile.nodes
        if len(hosts) != nodes:
            got = f"{len(hosts)} ({', '.join(hosts)})" if hosts else "none"
            return [f"ssh.hosts must name nodes={nodes} hosts, got {got}: list them in the profile, or correct nodes"]
        if "{host}" not in shell:
            return [f"ssh.shell must say where {{host}} goes, got {shell}: add it"]
        return super().check(job)

    def nodes(self, job: Job) -> Mapping[str, Sequence[str]]:
        """Return each host's shell."""
        ssh = self.settings(job)
        try:
            words = shlex.split(ssh.shell)
        except ValueError as error:
            raise ConfigError(f"ssh.shell must be words as for a shell, got {ssh.shell!r}: {error}") from error
        return {host: [word.replace("{host}", host) for word in words] for host in ssh.hosts}


def _other_host(job: Job) -> str:
    """Name the host of the supervisor where it is not this one."""
    host = job.id.split("@")[-1]
    return "" if host == os.uname().nodename else host
