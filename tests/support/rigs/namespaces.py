"""Nodes on one machine: Linux namespaces that share the disk, and nothing else by accident.

A node has a network, processes, mounts and a host name of its own: an address on a private network, a /tmp, a /dev/shm,
an /etc/hosts, and an init process that takes everything on the node with it when it ends. The switch between them is a
namespace too, so that nothing is added to the machine's own network, and no address can clash with one in use.

The init processes read from pipes of this process: however it ends, the pipes close, and nothing is left.
"""

import contextlib
import ipaddress
import os
import select
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

import areal_lite
from areal_lite.errors import ConfigError, StallError

NETWORK = ipaddress.ip_network("10.77.0.0/24")
PRIVATE = ("/tmp", "/var/tmp", "/dev/shm")
"""Folders of which every node has its own, empty and in memory."""

_TOOLS = ("ip", "tc", "unshare", "nsenter")
_START_TIMEOUT_S = 60.0
_INIT = "echo ready; exec env --ignore-signal=CHLD cat > /dev/null"
"""Ignoring SIGCHLD, so that orphans that end leave no zombies; ends when its input does."""


class _Namespaces:
    """A process in namespaces of its own that does nothing."""

    def __init__(self, kinds: Sequence[str], setup: str) -> None:
        # --kill-child: init must not outlive the process that is waited for.
        command = ["unshare", *kinds, "--fork", "--kill-child", "sh", "-ec", f"{setup}\n{_INIT}"]
        pipes: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
        # In a session of its own: Ctrl-C is for the process that holds the nodes.
        self._process = subprocess.Popen(command, **pipes, text=True, start_new_session=True)
        output: Any = self._process.stdout
        try:
            readable, *_ = select.select([output], [], [], _START_TIMEOUT_S)
            if not readable:
                raise StallError(f"namespaces must start within {_START_TIMEOUT_S:g} s, got nothing from {command[:8]}")
            if output.readline() != "ready\n":
                raise ConfigError(
                    f"namespaces ({' '.join(kinds)}) must start, got: {self._process.communicate()[1].strip()}; in a "
                    "container they need --privileged"
                )
            (init,) = psutil.Process(self._process.pid).children()
        except BaseException:
            self.end()
            raise
        self.pid: int = init.pid

    def end(self) -> None:
        """Kill every process in there, at once; closing init's input would do so too, a little later."""
        if hasattr(self, "pid") and self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)  # its parent then reaps it, and ends
        else:
            self._process.kill()
        self._process.communicate(timeout=_START_TIMEOUT_S)


class Node:
    """One node and its link to the switch."""

    def __init__(self, name: str, *, address: str, switch: int, setup: str) -> None:
        """Describe a node; `boot` makes it.

        Args:
            switch: Process whose network is the switch.
            setup: Commands that init runs in the node's namespaces.
        """
        self.name, self.address = name, address
        self._switch, self._setup = switch, setup
        self._namespaces: _Namespaces | None = None

    @property
    def is_up(self) -> bool:
        """Whether it was booted, and not killed since."""
        return self._namespaces is not None

    @property
    def pid(self) -> int:
        """Of its init process, as the machine counts."""
        assert self._namespaces is not None, f"{self.name} is down"
        return self._namespaces.pid

    def boot(self) -> None:
        """Start it, at first or after `kill`: with empty private folders, and its link whole."""
        assert not self.is_up, f"{self.name} is up"
        kinds = ["--net", "--mount", "--uts", "--ipc", "--pid", "--mount-proc"]
        self._namespaces = _Namespaces(kinds, self._setup)
        prefix = NETWORK.prefixlen
        _run_in(self._switch, f"ip link add name {self.name} type veth peer name eth0 netns {self.pid}")
        _run_in(self._switch, f"ip link set dev {self.name} master switch up")
        _run_in(self.pid, f"ip addr add {self.address}/{prefix} dev eth0")
        _run_in(self.pid, "ip link set eth0 up")
        _run_in(self.pid, "ip link set lo up")

    def command(self, argv: Sequence[str], *, cwd: str | Path = "/", env: Mapping[str, str] | None = None) -> list[str]:
        """Return the command that runs another one on this node, with some variables more in its environment."""
        enter = ["nsenter", f"--target={self.pid}", "--net", "--mount", "--uts", "--ipc", "--pid"]
        return [*enter, "env", f"--chdir={cwd}", *(f"{name}={value}" for name, value in (env or {}).items()), *argv]

    def popen(
        self, argv: Sequence[str], *, cwd: str | Path = "/", env: Mapping[str, str] | None = None, **options: Any
    ) -> "subprocess.Popen[str]":
        """Start a command here, in a process group of its own: that, and not one process, is what can be signalled."""
        options = {"text": True, "start_new_session": True} | options
        return subprocess.Popen(self.command(argv, cwd=cwd, env=env), **options)

    def kill(self) -> None:
        """Cut its power: everything on it ends, and no other node gets a message."""
        if self._namespaces is not None:
            try:
                self.cut()  # else the kernel would close its connections in good order
            finally:
                self._namespaces.end()
                self._namespaces = None
            with contextlib.suppress(ConfigError):  # the kernel does so too, at leisure: `boot` needs the name
                _run_in(self._switch, f"ip link del dev {self.name}")

    def cut(self) -> None:
        """Pull the cable: packets are lost both ways, connections stay open."""
        _run_in(self._switch, f"ip link set dev {self.name} down")

    def slow(self, *, rate_mbit: float) -> None:
        """Limit the link's rate both ways, until `restore_link`; a `ConfigError` where the kernel cannot."""
        for pid, device in self._ends():
            _run_in(pid, f"tc qdisc replace dev {device} root tbf rate {rate_mbit}mbit burst 64kb latency 400ms")

    def restore_link(self) -> None:
        """Undo `cut` and `slow`."""
        for pid, device in self._ends():
            with contextlib.suppress(ConfigError):  # it was not slow
                _run_in(pid, f"tc qdisc del dev {device} root")
        _run_in(self._switch, f"ip link set dev {self.name} up")

    def _ends(self) -> tuple[tuple[int, str], tuple[int, str]]:
        return (self._switch, self.name), (self.pid, "eth0")


@contextlib.contextmanager
def make_nodes(names: Sequence[str], *, shared: Sequence[str | Path] = ()) -> Iterator[list[Node]]:
    """Boot nodes that reach each other by name and by address, and end them afterwards.

    The machine reaches them only by `Node.command`, and they reach nothing but each other.

    Args:
        names: Their host names, at most 15 letters each.
        shared: Folders that exist, to be seen by all nodes where they lie in one of `PRIVATE`; what lies elsewhere is
            seen anyway, and so are the program and the present folder.

    Raises:
        ConfigError: Not root, or a tool or a kind of namespace is missing.
    """
    missing = [tool for tool in _TOOLS if shutil.which(tool) is None]
    if os.geteuid() != 0 or missing:
        got = f"no {', '.join(missing)}" if missing else f"user id {os.geteuid()}"
        raise ConfigError(
            f"nodes on one machine need root and the commands {', '.join(_TOOLS)}, got {got}: run as root, and "
            "apt-get install iproute2 util-linux"
        )
    always = (Path(areal_lite.__file__).parents[1], Path.cwd(), sys.prefix)
    folders = sorted({Path(folder).resolve() for folder in always + tuple(shared)})
    addresses = dict(zip(names, map(str, NETWORK.hosts()), strict=False))
    with contextlib.ExitStack() as stack:
        switch = _Namespaces(["--net"], "ip link add switch type bridge; ip link set switch up")
        stack.callback(switch.end)
        nodes = []
        for name, address in addresses.items():
            setup = _setup(name, addresses=addresses, shared=folders)
            node = Node(name, address=address, switch=switch.pid, setup=setup)
            stack.callback(node.kill)
            node.boot()
            nodes.append(node)
        yield nodes


def _setup(name: str, *, addresses: Mapping[str, str], shared: Sequence[Path]) -> str:
    """Return the shell commands by which a new node makes its mounts and its host name its own."""
    lines = ["mount -t tmpfs tmpfs /dev/shm"]
    for private in PRIVATE[:-1]:
        # Made aside and moved into place, so that what it will hide can still be mounted into it.
        lines += ["mkdir /dev/shm/new", "mount -t tmpfs -o mode=1777 tmpfs /dev/shm/new"]
        for folder in map(str, shared):
            if folder.startswith(f"{private}/"):
                place = shlex.quote(f"/dev/shm/new{folder.removeprefix(private)}")
                lines += [f"mkdir -p {place}", f"mount --rbind {shlex.quote(folder)} {place}"]
        lines += [f"mount --move /dev/shm/new {private}", "rmdir /dev/shm/new"]
    # As Debian writes it: the own name is a loopback address, so that code that takes it for the node's fails.
    own = {"localhost": "127.0.0.1", name: "127.0.1.1"}
    others = {other: address for other, address in addresses.items() if other != name}
    hosts = "\n".join(f"{address} {host}" for host, address in (own | others).items())
    lines += [f"echo {shlex.quote(hosts)} > /dev/shm/hosts", "mount --bind /dev/shm/hosts /etc/hosts"]
    return "\n".join([*lines, f"echo {name} > /proc/sys/kernel/hostname"])


def _run_in(pid: int, command: str) -> None:
    """Run `ip` or `tc` in the network of a process."""
    argv = ["nsenter", f"--target={pid}", "--net", *command.split()]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=_START_TIMEOUT_S, check=False)
    if done.returncode:
        raise ConfigError(f"`{command}` must work on this kernel, got: {done.stderr.strip()}")
