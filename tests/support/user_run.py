"""`areal-lite train` as a user runs it: at a terminal of its own, in a process of its own; Linux only."""

import ctypes
import fcntl
import os
import pty
import re
import signal
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Self

import psutil
from warm_workers import serving

from areal_lite.record.run_folder import RunFolder

_PR_SET_CHILD_SUBREAPER = 36
_CONTROL_SEQUENCES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\r")
_PANEL = re.compile(r"╭─ areal-lite ─.*?╯", flags=re.DOTALL)
_DEADLINE_S = 600.0
_LEAVES_S = 300.0
_POLL_S = 0.2
_PATIENCE_S = 120.0


@contextmanager
def adopting_orphans() -> Iterator[None]:
    """Processes whose parent dies become children of this one instead of init's, so that none can hide."""
    prctl = ctypes.CDLL(None).prctl
    prctl(_PR_SET_CHILD_SUBREAPER, 1)
    try:
        yield
    finally:
        prctl(_PR_SET_CHILD_SUBREAPER, 0)


def _sit_down_at_the_terminal() -> None:
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    # A shell's background job ignores SIGINT, and hands that on to whatever tests it runs.
    signal.signal(signal.SIGINT, signal.SIG_DFL)


class UserRun:
    """One `areal-lite` command; use as a context manager, which leaves no process behind whatever happens."""

    def __init__(self, command: Sequence[str], *, run_folder: Path) -> None:
        self.folder = RunFolder(run_folder)
        self._others = _children()
        self._pieces: list[bytes] = []
        self._terminal, theirs = pty.openpty()
        environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "TERM": "xterm"}
        self._process = subprocess.Popen(
            command,
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            env=environment,
            cwd=run_folder.parent,
            start_new_session=True,
            preexec_fn=_sit_down_at_the_terminal,
        )
        os.close(theirs)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        for pid in self.processes():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._process.wait()
        self._reader.join(timeout=5)
        os.close(self._terminal)

    @property
    def output(self) -> str:
        """What the terminal has shown, without control sequences."""
        return _CONTROL_SEQUENCES.sub("", b"".join(self._pieces).decode(errors="replace"))

    @property
    def is_running(self) -> bool:
        """Whether the command has not ended yet."""
        return self._process.poll() is None

    def press_ctrl_c(self) -> None:
        """Have the terminal send SIGINT to its foreground process group, as it does for a user."""
        os.write(self._terminal, b"\x03")

    def wait_for_steps(self, count: int) -> None:
        """Wait until that many steps stand in `metrics.jsonl`."""
        self.wait_until(lambda: len(self.folder.read("metrics.jsonl")) >= count, f"{count} steps")

    def wait_until(self, condition: Callable[[], object], what: str) -> None:
        """Wait for something that must happen before the command ends."""
        deadline = time.monotonic() + _DEADLINE_S
        while not condition():
            assert self.is_running or condition(), f"ended before {what}:\n{self._words()}"
            assert time.monotonic() < deadline, f"still no {what}:\n{self._words()}"
            time.sleep(_POLL_S)

    def ends_with(self, code: int) -> None:
        """Wait for the end of the command; assert its exit code, and that it leaves nothing behind."""
        try:
            assert self._process.wait(timeout=_DEADLINE_S) == code, self._words()
        except subprocess.TimeoutExpired:
            raise AssertionError(f"does not end:\n{self._words()}") from None
        left = self._left_behind()
        assert not left, left  # pytest shows no values of asserts in this folder

    def actor(self, lane: str) -> int:
        """Process id of an actor: the topmost process that writes into its log."""
        log = str(self.folder.logs / f"{lane.replace('/', '-')}.log")
        writers = [pid for pid in self.processes() if _output_of(pid) == log]
        (actor,) = set(writers).difference(*map(_below, writers))
        return actor

    def engine_core(self, lane: str) -> int:
        """Process id of the engine-core process below a rollout actor."""
        (core,) = [pid for pid in _below(self.actor(lane)) if psutil.Process(pid).name().startswith("VLLM::")]
        return core

    def tree(self, pid: int) -> list[int]:
        """A process and everything below it."""
        return [pid, *_below(pid)]

    def processes(self) -> list[int]:
        """Everything that the command started and that is alive, orphans included."""
        roots = _children() - self._others
        return [pid for root in roots for pid in self.tree(root) if alive(pid)]

    def _words(self) -> str:
        """The output with the last of its panels alone."""
        *_, last = ["", *_PANEL.findall(self.output)]
        return _PANEL.sub("", self.output) + last

    def _left_behind(self) -> list[str]:
        """Commands of what is still there long after the command's end (Ray's processes end on their own)."""
        deadline = time.monotonic() + _LEAVES_S
        while (pids := self.processes()) and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        return [_command(pid) for pid in pids]

    def _read(self) -> None:
        with suppress(OSError):  # Linux reports the end of a terminal as an error
            while piece := os.read(self._terminal, 65536):
                self._pieces.append(piece)


def wait_until(condition: Callable[[], object], what: str) -> None:
    """Wait for something that happens in another process or thread."""
    deadline = time.monotonic() + _PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, f"still no {what}"
        time.sleep(0.01)


def alive(pid: int) -> bool:
    """Whether a process exists and is no zombie."""
    with suppress(psutil.NoSuchProcess):
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    return False


def _below(pid: int, *, recursive: bool = True) -> list[int]:
    """Processes that another has started, and those that they have."""
    with suppress(psutil.NoSuchProcess):
        return [child.pid for child in psutil.Process(pid).children(recursive=recursive)]
    return []


def _children() -> set[int]:
    """Processes that this one has started or adopted, and copies (`warm_workers.py`)."""
    return {pid for parent in (os.getpid(), *serving) for pid in _below(parent, recursive=False)}


def _command(pid: int) -> str:
    with suppress(psutil.NoSuchProcess):
        return " ".join(psutil.Process(pid).cmdline())
    return ""


def _output_of(pid: int) -> str:
    try:
        return os.readlink(f"/proc/{pid}/fd/1")
    except OSError:
        return ""
