"""A program in a sandbox: what it writes, which limits it meets, and how it ends."""

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
from typing import NamedTuple

from areal_lite.errors import VerifierError, VerifierUnavailable
from areal_lite.verify.builtin import inside, remote
from areal_lite.verify.builtin.sandbox import Limits, command_line
from areal_lite.verify.descendants import descendants, held_above, kill_trees

_START_TIMEOUT_S = 60.0
"""How long a sandbox may take until it stands; far beyond a busy machine's."""
_LOOK_S = 0.05
_INSIDE, _REMOTE = Path(inside.__file__).read_text(), Path(remote.__file__).read_text()


class Outcome(NamedTuple):
    """How a program ended."""

    status: str
    """`ok`, `crash`, `timeout`, `cpu`, `memory`, `output`, `processes`, or `stopped`: it was still running."""
    stdout: str
    stderr: str
    seconds: float = 0.0
    """Of one case: processor time, or wall time where it was ended from outside."""


class Program:
    """A running `inside.py` in a folder of its own; whoever makes one closes it.

    What it writes goes into two files in memory: nobody has to read along, and it never waits for a reader.
    """

    def __init__(self, role: str, file: str, text: str, *, limits: Limits, link: socket.socket | None = None) -> None:
        """Start it; a `VerifierError` where the machine gives no more processes.

        Args:
            role: What `inside.py` does with the file of this name, which holds this text.
            link: To another program; closed here, so that the other end learns of this program's end.
        """
        self._limits = limits
        self._output_bytes = limits.output_kb * 1024
        self._status: str | None = None
        self._folder = tempfile.TemporaryDirectory()
        for name, content in (("inside.py", _INSIDE), ("remote.py", _REMOTE), (file, text), ("stdin", "")):
            self._write(name, content)
        folder = Path(self._folder.name)
        folder.chmod(0o755)
        self._written = [os.fdopen(os.memfd_create(name), "w+b", 0) for name in ("stdout", "stderr")]
        for written in self._written:
            fcntl.fcntl(written, fcntl.F_SETFL, os.O_APPEND)
        self._channel, theirs = socket.socketpair()
        with theirs, link or contextlib.nullcontext(), (folder / "stdin").open("rb") as stdin:
            descriptors = [end.fileno() for end in (theirs, link) if end]
            try:
                self._process = subprocess.Popen(
                    command_line(folder, role, file, descriptors, limits=limits),
                    stdin=stdin,
                    stdout=self._written[0],
                    stderr=self._written[1],
                    env={"PATH": "/usr/bin:/bin", "HOME": str(folder), "TMPDIR": str(folder), "LANG": "C.UTF-8"},
                    cwd=folder,
                    pass_fds=descriptors,
                    start_new_session=True,
                )
            except OSError as error:
                raise VerifierError(f"a program cannot be started: {error}") from error

    def stand(self) -> None:
        """Wait until its sandbox stands; `VerifierUnavailable` where that cannot be set up."""
        if not (_can_be_read(self._channel.fileno(), _START_TIMEOUT_S) and self._channel.recv(1)):
            self._process.kill()
            trouble = self.end().stderr.strip()[-500:]
            raise VerifierUnavailable(f"the sandbox ({self._limits.kind}) must start a program, it did not: {trouble}")
        self._start = time.monotonic()

    def _write(self, name: str, text: str) -> None:
        Path(self._folder.name, name).write_text(text, encoding="utf-8", errors="surrogatepass")

    def run_case(self, stdin: str, *, more_output_bytes: int) -> Outcome:
        """Have a program in the role `cases` run one, which may write so much more than the limits say.

        Once it `has_ended`, at a limit that is met from outside, nothing runs any more.
        """
        self._write("stdin", stdin)
        for file in self._written:
            file.truncate(0)
        self._output_bytes = self._limits.output_kb * 1024 + more_output_bytes
        self._start = time.monotonic()
        answer = b""
        with contextlib.suppress(ConnectionError):
            self._channel.sendall(b"c")
            self._watch(self._channel.fileno())
            answer = b"" if self._status else self._channel.recv(4096)
        stdout, stderr = self._texts()
        if not answer:
            self.close()
            return Outcome(self._status or "crash", stdout, stderr, time.monotonic() - self._start)
        status, cpu_s = json.loads(answer)
        code = os.waitstatus_to_exitcode(status)
        if code == -signal.SIGKILL and cpu_s >= self._limits.cpu_s:
            code = -signal.SIGXCPU  # it ignored the first signal
        return Outcome(_how_it_ended(code, stderr), stdout, stderr, cpu_s)

    def wait(self, *, beside: "Program") -> Outcome:
        """Wait until the program ends, or end it at a limit; meanwhile see to the limits of another."""
        ended = os.pidfd_open(self._process.pid)
        try:
            self._watch(ended, beside)
        finally:
            os.close(ended)
        return self.end()

    def end(self) -> Outcome:
        """End the program where it still runs, and say what came of it."""
        if self._status is None and self._process.poll() is None:
            self._status = "stopped"
        status, (stdout, stderr) = self._status, self._texts()
        self.close()
        return Outcome(status or _how_it_ended(self._process.returncode, stderr), stdout, stderr)

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

    def _watch(self, end: int, *beside: "Program") -> None:
        """See to the limits of this program and others until `end` can be read, as it can once this one is killed."""
        while not _can_be_read(end, _LOOK_S):
            for program in (self, *beside):
                program._look()
        if self._status is None and self._has_written_too_much():
            self._status = "output"

    def _look(self) -> None:
        if self._status is None and not self.has_ended and (status := self._over_limit()):
            self._status = status
            kill_trees(lambda: [self._process.pid])

    def _over_limit(self) -> str | None:
        if self._has_written_too_much():
            return "output"
        if time.monotonic() - self._start > self._limits.wall_s:
            return "timeout"
        below = descendants(self._process.pid)
        # In bubblewrap the kernel counts them. Outside it counts all of the user's, so that only looking helps.
        if self._limits.kind == "plain" and len(below) > self._limits.processes:
            return "processes"
        return "memory" if held_above(self._limits.memory_mb << 20, [self._process.pid, *below]) else None

    def _has_written_too_much(self) -> bool:
        return sum(os.fstat(file.fileno()).st_size for file in self._written) > self._output_bytes

    def _texts(self) -> list[str]:
        return [os.pread(file.fileno(), self._output_bytes, 0).decode(errors="replace") for file in self._written]


def _can_be_read(descriptor: int, within_s: float) -> bool:
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(within_s * 1000))


def _how_it_ended(code: int | None, stderr: str) -> str:
    if code == 0:
        return "ok"
    # Bubblewrap says 128 + the signal's number.
    if code in (-signal.SIGXCPU, 128 + signal.SIGXCPU):
        return "cpu"
    return "memory" if "MemoryError" in stderr[-2000:].rpartition("\n  ")[2] else "crash"
