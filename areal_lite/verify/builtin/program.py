"""A program in a sandbox, run for one case after another: what it writes, which limits it meets, how it ends."""

import contextlib
import fcntl
import json
import os
import select
import signal
import socket
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

from areal_lite.errors import VerifierError, VerifierUnavailable
from areal_lite.verify.builtin import inside, remote
from areal_lite.verify.builtin.sandbox import Limits, command_line
from areal_lite.verify.descendants import descendants, held_above, kill_trees

_START_TIMEOUT_S = 60.0
"""How long a sandbox may take until it stands; far beyond a busy machine's."""
_LOOK_S = 0.05
_SOURCE = "candidate.py"
_INODE_BYTES = 1024
_INSIDE, _REMOTE = Path(inside.__file__).read_text(), Path(remote.__file__).read_text()


class Outcome(NamedTuple):
    """How a case ended."""

    status: str
    """`ok`, `crash`, `timeout`, `cpu`, `memory`, `output`, `processes`, or `stopped`: its tests ended before it did."""
    stdout: str
    stderr: str
    seconds: float
    """Processor time, or wall time where it was ended from outside."""
    verdicts: list[str | None]
    """Of each test: None where it passed, else what went wrong."""


class Program:
    """A running `inside.py` in a folder of its own, which runs a program for one case after another; close it.

    What it writes goes into two files in memory: nothing has to read along, and it never waits for a reader.
    """

    def __init__(self, source: str, *, limits: Limits) -> None:
        """Start it.

        Raises:
            VerifierError: The machine gives no more processes.
            VerifierUnavailable: The sandbox cannot be set up.
        """
        self._limits = limits
        self._output_bytes = limits.output_kb * 1024
        self._status: str | None = None
        self._folder = tempfile.TemporaryDirectory()
        for name, content in (("inside.py", _INSIDE), ("remote.py", _REMOTE), (_SOURCE, source), ("stdin", "")):
            self._write(name, content)
        folder = Path(self._folder.name)
        folder.chmod(0o755)
        self._written = [os.fdopen(os.memfd_create(name), "w+b", 0) for name in ("stdout", "stderr")]
        for written in self._written:
            fcntl.fcntl(written, fcntl.F_SETFL, os.O_APPEND)
        self._channel, theirs = socket.socketpair()
        with theirs:
            try:
                self._process = subprocess.Popen(
                    command_line(folder, _SOURCE, theirs.fileno(), limits=limits),
                    stdin=subprocess.DEVNULL,
                    stdout=self._written[0],
                    stderr=self._written[1],
                    env={"PATH": "/usr/bin:/bin", "HOME": str(folder), "TMPDIR": str(folder), "LANG": "C.UTF-8"},
                    cwd=folder,
                    pass_fds=[theirs.fileno()],
                    start_new_session=True,
                )
            except OSError as error:
                raise VerifierError(f"a program cannot be started: {error}") from error
        if not (_can_be_read(self._channel, _START_TIMEOUT_S) and self._channel.recv(1)):
            trouble = self._texts()[1].strip()[-500:]
            self.close()
            raise VerifierUnavailable(f"the sandbox ({limits.sandbox}) must start a program, it did not: {trouble}")

    def run(self, stdin: str = "", *, tests: object = None, more_output_bytes: int = 0) -> Outcome:
        """Run a case; once the program `has_ended`, at a limit that is met from outside, none can follow.

        Args:
            tests: For `remote.test`; None = the program runs as a script.
            more_output_bytes: What it may write beyond what the limits allow.
        """
        self._write("stdin", stdin)
        for file in self._written:
            file.truncate(0)
        self._output_bytes = self._limits.output_kb * 1024 + more_output_bytes
        self._start = time.monotonic()
        request = b"c" if tests is None else b"t" + json.dumps(tests).encode() + b"\n"
        lines = self._answer(request)
        *verdicts, end = lines if lines and isinstance(lines[-1], list) else [*lines, None]
        stdout, stderr = self._texts()
        if end is None or self._status:
            self.close()
            seconds = time.monotonic() - self._start
            return Outcome(self._status or "crash", stdout, stderr, seconds, verdicts)
        status, cpu_s = end
        return Outcome(self._how_it_ended(status, cpu_s, stderr), stdout, stderr, cpu_s, verdicts)

    def _answer(self, request: bytes) -> list[Any]:
        """Send a request, see to the limits, and return the lines of the answer; it lacks its end if one was met."""
        received = b""
        with contextlib.suppress(ConnectionError):
            self._channel.sendall(request)
            while not received.endswith(b"]\n"):
                while not _can_be_read(self._channel, _LOOK_S):
                    self._look()
                if not (data := self._channel.recv(2**16)):
                    break
                received += data
        if self._status is None and self._has_written_too_much():
            self._status = "output"
        return list(map(json.loads, received.split(b"\n")[:-1]))

    def _how_it_ended(self, end: int | str | None, cpu_s: float, stderr: str) -> str:
        if not isinstance(end, int):
            return end or "stopped"
        code = os.waitstatus_to_exitcode(end)
        if code == 0:
            return "ok"
        # The second: it ignored the first signal.
        if code == -signal.SIGXCPU or (code == -signal.SIGKILL and cpu_s >= self._limits.cpu_s):
            return "cpu"
        return "memory" if "MemoryError" in stderr[-2000:].rpartition("\n  ")[2] else "crash"

    @property
    def has_ended(self) -> bool:
        """Whether it was closed."""
        return self._process.returncode is not None

    def close(self) -> None:
        """Kill it with everything it started; idempotent."""
        if self._process.poll() is None:
            kill_trees(lambda: [self._process.pid])
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout=10)
        self._channel.close()
        for file in self._written:
            file.close()
        self._folder.cleanup()

    def _write(self, name: str, text: str) -> None:
        Path(self._folder.name, name).write_text(text, encoding="utf-8", errors="surrogatepass")

    def _look(self) -> None:
        """Kill the program if it exceeds a limit."""
        if self._status is None and (status := self._over_limit()):
            self._status = status
            kill_trees(lambda: [self._process.pid])

    def _over_limit(self) -> str | None:
        if self._has_written_too_much():
            return "output"
        if time.monotonic() - self._start > self._limits.wall_s:
            return "timeout"
        below = descendants(self._process.pid)
        # In bubblewrap the kernel counts them. Outside it counts all of the user's, so that only looking helps.
        if self._limits.sandbox == "plain" and len(below) > self._limits.processes:
            return "processes"
        allowed = self._limits.memory_mb << 20
        if self._limits.sandbox == "bubblewrap" and below:
            allowed -= _bytes_of_inodes(below[-1])
        return "memory" if held_above(allowed, [self._process.pid, *below]) else None

    def _has_written_too_much(self) -> bool:
        return sum(os.fstat(file.fileno()).st_size for file in self._written) > self._output_bytes

    def _texts(self) -> list[str]:
        return [os.pread(file.fileno(), self._output_bytes, 0).decode(errors="replace") for file in self._written]


def _can_be_read(channel: socket.socket, within_s: float) -> bool:
    poll = select.poll()
    poll.register(channel, select.POLLIN)
    return bool(poll.poll(within_s * 1000))


def _bytes_of_inodes(pid: int) -> int:
    """Return the kernel's memory for the files in a sandbox's /tmp, whose size alone is limited."""
    with contextlib.suppress(OSError):
        files = os.statvfs(Path("/proc", str(pid), "root", "tmp"))
        return (files.f_files - files.f_ffree) * _INODE_BYTES
    return 0
