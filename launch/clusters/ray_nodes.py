"""A Ray cluster of a job's own: one `ray start` a node, with a token, and an end by recorded process id.

As a process of its own, `python -m areal_lite.launch.clusters.ray_nodes start ...`, it is that `ray start`. It ignores
the signals that a batch system sends to all processes, so that the run can save first; SIGINT ends it, with all that it
started.
"""

import contextlib
import os
import re
import secrets
import shlex
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil

from areal_lite.errors import StallError
from areal_lite.launch.clusters.job import Job
from areal_lite.launch.clusters.remote import Remote, script
from areal_lite.launch.run.ray_session import MOST_STARTS, OWN_RAY, SLOW
from areal_lite.launch.run.signals import NOTICES

_STARTED = "Ray runtime started"
_ADDRESS = re.compile(r"^areal-lite address (\S+)$", re.MULTILINE)
LOCAL = ("bash", "-c")
_POLL_S = 0.2
_RETRY_S = 2.0
_NAMED_PORTS = 9
"""Ports of a node's Ray before those of its workers, as in `templates/ray.sh`."""
_BOOTING = re.compile(r"[Cc]onnection (refused|timed out|reset|closed)|No route to host")
"""What ssh prints of a host that may answer in a minute, unlike of a wrong key or name."""


class RayNodes:
    """A job's nodes, with Ray on each, the head first, and the command on the head; without any, this machine alone."""

    def __init__(self, job: Job, shells: Mapping[str, Sequence[str]], *, logs: Path) -> None:
        """Start nothing yet: `form` does."""
        self._job, self._shells, self._logs = job, shells, logs
        self.processes: dict[str, Remote] = {}
        self._driver: Remote | None = None
        self.env: dict[str, str] = {}
        """What a process needs to join the cluster."""

    def form(self, should_stop: Callable[[], bool]) -> None:
        """Start Ray on all nodes, the head first, and wait until they have joined.

        Args:
            should_stop: Polled; True ends the wait.

        Raises:
            StallError: A node is late, or its Ray ended; the message names it.
        """
        if not self._shells:
            return
        deadline = time.monotonic() + self._job.profile.start_timeout_s
        head, *workers = self._shells
        address, env = "", {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
        # Where the profile names no network, the route to another machine decides.
        peer = workers[0].rpartition("@")[2] if workers else None
        for nodes in ([head], workers):
            for node in nodes:
                ports = self._ports(len(self.processes))
                text = start_script(self._job, ports=ports, head=address, peer=peer, env=env)
                log = self._logs / f"{node}-ray.log"
                self.processes[node] = Remote(self._job, self._shells[node], text, log=log)
            self._wait(nodes, deadline, should_stop)
            if should_stop():
                return
            peer = _ADDRESS.findall(self.processes[head].read_log())[0]
            address = f"{peer}:{self._ports(0)[0]}"
        self.env = {**env, "RAY_ADDRESS": address}

    def run(self, text: str) -> Remote:
        """Start the command, given as a script."""
        node, shell = next(iter(self._shells.items()), (os.uname().nodename, LOCAL))
        self._driver = Remote(self._job, shell, text, log=self._logs / f"{node}-driver.log")
        return self._driver

    def lost(self) -> str:
        """Name a node whose Ray has ended; empty where none has."""
        for node, process in self.processes.items():
            if process.code is not None:
                return f"node {node} was lost: its Ray ended ({process.last_lines()}); log: {process.log}"
        return ""

    def end(self) -> list[str]:
        """End the command, then Ray on every node, all workers at once and the head last; returns what went wrong."""
        head, workers = list(self.processes.values())[:1], list(self.processes.values())[1:]
        with ThreadPoolExecutor(max_workers=len(workers) + 1) as pool:
            first = [self._driver.end()] if self._driver else []
            found = [*first, *pool.map(Remote.end, workers), *map(Remote.end, head)]
        return [problem for problem in found if problem]

    def _ports(self, index: int) -> range:
        """Ports of a node's Ray, disjoint from other nodes', as two nodes may be one machine."""
        ports = self._job.profile.port_range
        size = len(ports) // 2 // len(self._shells)
        return ports[index * size : (index + 1) * size]

    def _wait(self, nodes: list[str], deadline: float, should_stop: Callable[[], bool]) -> None:
        """Wait for Ray on these nodes; a host that is still booting is tried again."""
        late, tried = list(nodes), dict[str, float]()
        while late := [node for node in late if _STARTED not in self.processes[node].read_log()]:
            for node in late:
                if self.processes[node].code is not None:
                    self._start_again(node, tried)
            if time.monotonic() > deadline:
                raise self._too_late(late)
            if should_stop():
                return
            time.sleep(_POLL_S)

    def _start_again(self, node: str, tried: dict[str, float]) -> None:
        """Start Ray on a node once more, where the host was only out of reach or busy; `tried` has the time of each."""
        process, now = self.processes[node], time.monotonic()
        is_slow = SLOW in process.last_lines() and process.read_log().count(SLOW) < MOST_STARTS
        if not is_slow and (process.pid is not None or not _BOOTING.search(process.last_lines())):
            raise StallError(
                f"Ray must start on every node, on {node} it ended: {process.last_lines()}; log: {process.log}"
            )
        if now <= tried.get(node, 0.0) + _RETRY_S:
            return
        if is_slow:
            print(f"areal-lite launch: {node} is too busy, Ray was not ready within 30 s; retrying", flush=True)
        elif node not in tried:
            print(f"areal-lite launch: {node} is out of reach ({process.last_lines()}); retrying", flush=True)
        tried[node] = now
        process.start()

    def _too_late(self, late: list[str]) -> StallError:
        def state(process: Remote) -> str:
            found = process.last_lines().rpartition(" / ")[2] or "no answer"
            return found if process.pid is None else "Ray is still starting"

        limit_s = self._job.profile.start_timeout_s
        return StallError(
            f"{len(self._shells)} nodes must join within start_timeout_s={limit_s:g}, missing: "
            f"{', '.join(f'{node} ({state(self.processes[node])})' for node in late)}. Fix: see whether it answers, "
            f"`{shlex.join([*self._shells[late[0]], 'hostname'])}`, or give it more time; logs: {self._logs}"
        )


def start_script(job: Job, *, ports: range, head: str, peer: str | None, env: Mapping[str, str]) -> str:
    """Return the script that becomes `ray start`; an empty `head` starts a head.

    Args:
        ports: Every port that this node's Ray opens.
        head: host:port to join.
        peer: Where the profile names no network, the route to this machine gives the node's address.
    """
    named = ports[:_NAMED_PORTS]
    look_up = (
        "from areal_lite.network import local_address, require_free; "
        f"require_free({named!r}); print(local_address({job.profile.network or peer!r}))"
    )
    # Nothing is served from it: waiting for its workers to leave would take longer than its grace period.
    own = {"RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0"}
    return script(job, env={**env, **own}, template="ray.sh", head=head, ports=ports, look_up=look_up)


def _main() -> None:
    from ray.scripts.scripts import main

    os.environ.update(OWN_RAY)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_BLOCK, NOTICES)
    with contextlib.suppress(PermissionError):  # the first process of a session leads a group already
        os.setpgid(0, 0)
    try:
        main()
    finally:
        # An agent whose raylet has ended is no child any more, holds its port for a while, and is in this group.
        left = {*psutil.Process().children(recursive=True), *filter(_is_of_this_group, psutil.process_iter())}
        for process in left - {psutil.Process()}:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()


def _is_of_this_group(process: psutil.Process) -> bool:
    try:
        return os.getpgid(process.pid) == os.getpgrp()
    except ProcessLookupError:
        return False


if __name__ == "__main__":
    _main()
