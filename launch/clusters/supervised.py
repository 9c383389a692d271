"""What the kinds share whose supervisor is a process of this machine: local, ssh, and ray by address."""

import contextlib
import os
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence

import psutil

from areal_lite.config.section import Section
from areal_lite.errors import ConfigError, StallError
from areal_lite.launch.clusters.attempts import Attempts, end_leftovers
from areal_lite.launch.clusters.job import Job, Kind, Status
from areal_lite.launch.run.signals import notices_held_back
from areal_lite.record.writer import find_process


class Supervised(Kind):
    """A process in a session of its own supervises the job; the job's id is `process@start time@host`."""

    def submit(self, job: Job) -> str:
        """Start the supervisor, which outlives this terminal."""
        command = [sys.executable, "-P", "-m", "areal_lite.launch.clusters.attempts", str(job.record)]
        # A signal that comes before the supervisor can handle it, waits until `catch_signals`.
        with job.log.open("ab") as log, notices_held_back():
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=job.folder, start_new_session=True
            )
        return f"{process.pid}@{psutil.Process(process.pid).create_time():.2f}@{os.uname().nodename}"

    def status(self, job: Job) -> Status:
        """Read the record of the attempts; a supervisor that died has failed."""
        host, is_gone = _other_host(job), self._process(job) is None
        status = Attempts.read(job).status()  # after the look at the process, which may have ended in between
        if status.code is None and host:
            return Status(f"{status.words}; to see whether its supervisor still runs, run this on {host}")
        if status.code is None and is_gone:
            return Status(f"failed: its supervisor (process {job.id}) died; {status.words}; see {job.log}", code=1)
        return status

    def stop(self, job: Job) -> None:
        """Send SIGTERM to the supervisor, which counts it once; where it was killed, end what it left.

        Raises:
            ConfigError: The supervisor runs on another host.
            StallError: Something could not be ended.
        """
        if host := _other_host(job):
            raise ConfigError(
                f"{job.name} can be stopped only where its supervisor runs, got {os.uname().nodename}: do it on {host}"
            )
        if (process := self._process(job)) is not None:
            process.terminate()
        elif problems := end_leftovers(job):
            raise StallError(f"every process of {job.name} must end, got {'; '.join(problems)}: end them by hand")

    def _process(self, job: Job) -> psutil.Process | None:
        number, began, *_ = [*job.id.split("@"), ""]
        with contextlib.suppress(ValueError):
            return find_process(int(number), float(began))
        return None


class Local(Supervised):
    """The command as it is typed; the run starts its own Ray."""


class SshSettings(Section):
    """Machines with a name."""

    hosts: list[str] = []
    """the first is the head; as many as nodes"""
    shell: str = "ssh -o BatchMode=yes -o ConnectTimeout=15 -o ServerAliveInterval=15 {host}"
    """command that runs a shell command line on a host; it must detect a cut link by itself"""


class Ssh(Supervised):
    """Hosts that this machine reaches by a command, `ssh.shell`, over which Ray is started and ended on each."""

    Settings = SshSettings

    def check(self, job: Job) -> Sequence[str]:
        """Compare hosts with nodes."""
        ssh, nodes = self.settings(job), job.profile.nodes
        if not len(ssh.hosts) == len(set(ssh.hosts)) == nodes:
            got = f"{len(ssh.hosts)} ({', '.join(ssh.hosts)})" if ssh.hosts else "none"
            return [f"ssh.hosts must name nodes={nodes} hosts, got {got}: list each once, or correct nodes"]
        if "{host}" not in ssh.shell:
            return [f"ssh.shell must hold {{host}} where the host's name goes, got {ssh.shell}: add it"]
        return ()

    def nodes(self, job: Job) -> Mapping[str, Sequence[str]]:
        """Return each host's shell."""
        ssh = self.settings(job)
        try:
            words = shlex.split(ssh.shell)
        except ValueError as error:
            raise ConfigError(f"ssh.shell must be words as for a shell, got {ssh.shell!r}: {error}") from error
        return {host: [word.replace("{host}", host) for word in words] for host in ssh.hosts}


def _other_host(job: Job) -> str:
    """Return the name of the supervisor's host, empty where it is this one."""
    host = job.id.split("@")[-1]
    return "" if host == os.uname().nodename else host
