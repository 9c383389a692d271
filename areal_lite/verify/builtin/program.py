"""One run of a program in a sandbox: what it wrote, and how it ended. Used by the verifier `code`."""

import contextlib
import json
import os
import selectors
import signal
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

from areal_lite.errors import VerifierUnavailable
from areal_lite.verify.builtin.sandbox import Kind, Limits, launch
from areal_lite.verify.tree import descendants

__all__ = ["START_TIMEOUT_S", "Outcome", "Program"]

START_TIMEOUT_S = 60.0
"""How long a sandbox may take until it stands; far beyond a busy machine's."""
_LOOK_EVERY_S = 0.05
_PAGE = os.sysconf("SC_PAGE_SIZE")


class Outcome(NamedTuple):
    """How a program ended."""

    status: str
    """`ok`, `crash`, `timeout`, `cpu`, `memory`, `output`, `processes` or `stopped`."""
    stdout: str
    stderr: str
    seconds: float = 0.0
    """Of one case: processor time, or wall time where it was ended from outside."""


class Program:
    """A running program; whoever makes one closes it."""

    def __init__(
        self,
        folder: Path,
        arguments: Sequence[str],
        *,
        files: Mapping[str, str],
        kind: Kind,
        limits: Limits,
        pass_fds: Sequence[int] = (),
        is_runner: bool = False,
    ) -> None:
        """Start it, and wait until its sandbox stands.

        Args:
            folder: Empty, its own.
            arguments: Of the interpreter; `{folder}` stands for where the program sees its files.
            files: Texts by name.
            kind: From `choose_kind`.
            limits: What it may take.
            pass_fds: File descriptors it inherits.
            is_runner: Whether it is `code_runner.py`, see `launch`.

        Raises:
            VerifierUnavailable: The sandbox cannot be set up.
        """
        for name, text in {**files, "stdin": ""}.items():
            (folder / name).write_text(text, encoding="utf-8", errors="surrogatepass")
        folder.chmod(0o755)
        self._limits, self._kind, self._folder = limits, kind, folder
        self._output_bytes, self._is_runner = limits.output_kb * 1024, is_runner
        self._status: str | None = None
        self._written = {"stdout": bytearray(), "stderr": bytearray()}
        ready, theirs = os.pipe()
        try:
            self._process = launch(
                folder, arguments, kind=kind, limits=limits, ready=theirs, pass_fds=pass_fds, is_runner=is_runner
            )
        except BaseException:
            os.close(ready)
            raise
        finally:
            os.close(theirs)
        self._wait_until_ready(ready)
        self._start = time.monotonic()

    def __enter__(self) -> "Program":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _wait_until_ready(self, ready: int) -> None:
        with open(ready, "rb", buffering=0) as pipe, selectors.DefaultSelector() as selector:
            selector.register(pipe, selectors.EVENT_READ)
            if selector.select(START_TIMEOUT_S) and pipe.read(1):
                return
        self._process.kill()
        trouble = self._process.communicate()[1].decode(errors="replace").strip()
        raise VerifierUnavailable(f"the sandbox ({self._kind}) must start a program, it did not: {trouble[-500:]}")

    def wait(self) -> Outcome:
        """Wait until the program ends, or end it at a limit."""
        ended = os.pidfd_open(self._process.pid)
        try:
            self._watch(ended)
        finally:
            os.close(ended)
        self.close()
        stdout, stderr = self._texts()
        return Outcome(self._status or _how_it_ended(self._process.returncode, stderr), stdout, stderr)

    def run_case(self, channel: socket.socket, stdin: str, *, more_output_bytes: int) -> Outcome:
        """Have `code_runner.py` run a case.

        Args:
            channel: To it.
            stdin: What the case can read.
            more_output_bytes: How much more it may write than the limits say.

        Returns:
            What came of it. After `gone`, or a limit that is met from outside, nothing runs any more.
        """
        (self._folder / "stdin").write_text(stdin, encoding="utf-8", errors="surrogatepass")
        self._written = {name: bytearray() for name in self._written}
        self._output_bytes = self._limits.output_kb * 1024 + more_output_bytes
        self._start = time.monotonic()
        line = b""
        with contextlib.suppress(ConnectionError):
            channel.sendall(b"c")
            self._watch(channel.fileno())
            line = b"" if self._status else channel.recv(4096)
        stdout, stderr = self._texts()
        if not line:
            self.close()
            return Outcome(self._status or "crash", stdout, stderr, time.monotonic() - self._start)
        code, cpu_s = json.loads(line)
        code = os.waitstatus_to_exitcode(code)
        if code == -signal.SIGKILL and cpu_s >= self._limits.cpu_s:
            code = -signal.SIGXCPU  # it ignored the first signal
        return Outcome(_how_it_ended(code, stderr), stdout, stderr, cpu_s)

    @property
    def has_ended(self) -> bool:
        """Whether it was closed."""
        return self._process.returncode is not None

    def _texts(self) -> tuple[str, str]:
        written = self._written
        return written["stdout"].decode(errors="replace"), written["stderr"].decode(errors="replace")

    def stop(self) -> None:
        """Have a `wait` of another thread end the program at once, with the status `stopped`."""
        self._status = self._status or "stopped"

    def _watch(self, end: int) -> None:
        """Read what it writes until `end` can be read and nothing is left, or it meets a limit."""
        with selectors.DefaultSelector() as selector:
            for name, pipe in (("stdout", self._process.stdout), ("stderr", self._process.stderr)):
                assert pipe is not None
                os.set_blocking(pipe.fileno(), False)
                selector.register(pipe, selectors.EVENT_READ, name)
            selector.register(end, selectors.EVENT_READ, "end")
            self._look(selector)

    def _look(self, selector: selectors.BaseSelector) -> None:
        look_at = 0.0
        while self._status is None:
            events = {key.data: key for key, _ in selector.select(_LOOK_EVERY_S)}
            for name in events.keys() - {"end"}:
                if not self._read(name, events[name].fd):
                    selector.unregister(events[name].fileobj)
            if "end" in events and not events.keys() - {"end"}:
                return
            if (now := time.monotonic()) >= look_at:
                self._status = self._status or self._over_limit()
                look_at = now + _LOOK_EVERY_S

    def _read(self, name: str, descriptor: int) -> bool:
        """Take what there is; False at the end of the stream."""
        try:
            data = os.read(descriptor, 65536)
        except BlockingIOError:
            return True
        self._written[name] += data
        if sum(map(len, self._written.values())) > self._output_bytes:
            self._status = "output"
        return bool(data)

    def _over_limit(self) -> str | None:
        if time.monotonic() - self._start > self._limits.wall_s:
            return "timeout"
        pids = {*descendants(self._process.pid), self._process.pid}
        # In bubblewrap the kernel counts them. Outside it counts all of the user's, so that only looking helps.
        if self._kind == "plain" and len(pids) - self._is_runner > self._limits.processes:
            return "processes"
        return "memory" if sum(map(_resident_bytes, pids)) > self._limits.memory_mb * 2**20 else None

    def close(self) -> None:
        """Kill it with everything it started; idempotent."""
        if self._process.returncode is None and self._process.poll() is None:
            below = descendants(self._process.pid)
            for number in (signal.SIGSTOP, signal.SIGKILL):
                for pid in (self._process.pid, *below):
                    with contextlib.suppress(ProcessLookupError, PermissionError):
                        os.kill(pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout=10)
        for pipe in (self._process.stdout, self._process.stderr):
            assert pipe is not None
            pipe.close()


def _resident_bytes(pid: int) -> int:
    """Return the memory of one process that it shares with no file."""
    try:
        fields = Path(f"/proc/{pid}/statm").read_text().split()
    except OSError:
        return 0
    return (int(fields[1]) - int(fields[2])) * _PAGE


def _how_it_ended(code: int | None, stderr: str) -> str:
    if code == 0:
        return "ok"
    # Bubblewrap says 128 + the signal's number.
    if code in (-signal.SIGXCPU, 128 + signal.SIGXCPU):
        return "cpu"
    return "memory" if "MemoryError" in stderr[-2000:].rpartition("\n  ")[2] else "crash"
