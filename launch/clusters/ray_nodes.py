"""A Ray cluster of a job's own: one `ray start` a node, with a token, and an end by recorded process id.

As a process of its own, `python -m areal_lite.launch.clusters.ray_nodes start ...`, it is that `ray start`: what a
batch system sends to all processes does not end it before the run has saved; SIGINT does, with all that it started.
"""

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
from areal_lite.launch.clusters.remote import Remote, python_of, script
from areal_lite.launch.run.signals import NOTICES

_STARTED = "Ray runtime started"
_ADDRESS = re.compile(r"^areal-lite address (\S+)$", re.MULTILINE)
_POLL_S = 0.2
_OF_HEAD = ("port", "dashboard-port", "ray-client-server-port")


class RayNodes:
    """Ray on every node; the first is the head."""

    def __init__(self, job: Job, shells: Mapping[str, Sequence[str]], *, logs: Path) -> None:
        """Take note of the nodes; `form` starts them."""
        self._job, self._shells, self._logs = job, shells, logs
        self._names = list(shells)
        self.processes: dict[str, Remote] = {}
        self.env = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
        """With it a process may join, or speak to the cluster."""
        self.host, self.address = "", ""

    def form(self, should_stop: Callable[[], bool], note: Callable[[], None]) -> None:
        """Start Ray on all nodes and wait until they have joined.

        Args:
            should_stop: Asked again and again; ends the wait.
            note: Called again and again, to write down the ids of processes.

        Raises:
            StallError: A node is late, or its Ray ended; names it.
        """
        deadline = time.monotonic() + self._job.profile.start_timeout_s
        head, *workers = self._names
        self._start(head, 0)
        self._wait([head], deadline, should_stop, note)
        if should_stop():
            return
        (self.host,) = _ADDRESS.findall(self.processes[head].said())[:1] or [""]
        self.address = f"{self.host}:{self._ports(0)[0]}"
        for index, node in enumerate(workers, 1):
            self._start(node, index)
        self._wait(workers, deadline, should_stop, note)

    def lost(self) -> str | None:
        """Name a node whose Ray has ended."""
        for node, process in self.processes.items():
            if process.code is not None:
                return f"node {node} was lost: its Ray ended ({process.last_words(3)}); log: {process.log}"
        return None

    def end(self) -> dict[str, str | None]:
        """End Ray on every node, the head last; returns what went wrong on each, and none holds up another."""
        names = list(self.processes)
        with ThreadPoolExecutor(max_workers=max(len(names), 1)) as pool:
            found = dict(zip(names[1:], pool.map(self._end, names[1:]), strict=True))
        return found | {name: self._end(name) for name in names[:1]}

    def _end(self, node: str) -> str | None:
        return self.processes[node].end(self._job.name, "INT")

    def _start(self, node: str, index: int) -> None:
        text = start_script(
            self._job, ports=self._ports(index), head=self.address, peer=self._peer(index), env=self.env
        )
        self.processes[node] = Remote(node, self._shells[node], text, log=self._logs / f"{node}-ray.log")

    def _ports(self, index: int) -> range:
        """Ports of a node's Ray: of its own, as two nodes may be one machine."""
        ports = self._job.profile.port_range
        size = len(ports) // 2 // len(self._names)
        return ports[index * size : (index + 1) * size]

    def _peer(self, index: int) -> str | None:
        """Name of a machine to which the route is looked up where the profile names no network."""
        if index:
            return self.host
        return self._names[1].rpartition("@")[2] if len(self._names) > 1 else None

    def _wait(
        self, nodes: list[str], deadline: float, should_stop: Callable[[], bool], note: Callable[[], None]
    ) -> None:
        late = list(nodes)
        while late := [node for node in late if _STARTED not in self.processes[node].said()]:
            for node in late:
                if (process := self.processes[node]).code is not None:
                    raise StallError(
                        f"Ray must start on every node, on {node} it ended: {process.last_words(3)}; log: {process.log}"
                    )
            note()
            if should_stop():
                return
            if time.monotonic() > deadline:
                raise StallError(
                    f"{len(self._names)} nodes must join within start_timeout_s={self._job.profile.start_timeout_s:g}, "
                    f"missing: {', '.join(late)}; logs: {self._logs}"
                )
            time.sleep(_POLL_S)


def start_script(job: Job, *, ports: range, head: str, peer: str | None, env: Mapping[str, str]) -> str:
    """Return the script that becomes `ray start`; without `head` it starts one.

    Args:
        ports: All that this node's Ray opens.
        head: host:port to join.
        peer: A machine to which the route is looked up where the profile names no network.
    """
    python, profile = python_of(job), job.profile
    inside = " ".join(filter(None, [profile.container, python]))
    look_up = f"from areal_lite.network import local_address; print(local_address({profile.network or peer!r}))"
    names = (
        "port", "node-manager-port", "object-manager-port", "dashboard-agent-listen-port", "dashboard-agent-grpc-port",
        "runtime-env-agent-port", "metrics-export-port", "dashboard-port", "ray-client-server-port",
    )  # fmt: skip
    fixed = dict(zip(names, ports, strict=False))
    where = ["--head", "--include-dashboard=false"] if not head else [f"--address={head}"]
    options = {
        **{name: port for name, port in fixed.items() if not head or name not in _OF_HEAD},
        "min-worker-port": ports[len(names)],
        "max-worker-port": ports[-1],
        "num-gpus": profile.gpus_per_node,
    }
    start = [
        python, "-m", __name__, "start", *where, "--block", "--disable-usage-stats", "--include-log-monitor=false",
        '--node-ip-address="$address"', *(f"--{name}={value}" for name, value in options.items()),
    ]  # fmt: skip
    # Nobody serves from it: it need not wait for its workers to leave, which would take longer than the grace it has.
    own = {"RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0", "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0"}
    own["RAY_prestart_worker_first_driver"] = "0"
    text = script(job, start, {**env, **own})
    say = f'address=$({inside} -c {shlex.quote(look_up)}) || exit 1\necho "areal-lite address $address"\n'
    return text.replace('echo "areal-lite pid', say + 'echo "areal-lite pid')


def _main() -> None:
    from ray.scripts.scripts import main

    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_BLOCK, NOTICES)
    try:
        main()
    finally:
        for process in psutil.Process().children(recursive=True):
            process.kill()


if __name__ == "__main__":
    _main()
