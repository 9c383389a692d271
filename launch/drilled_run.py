"""A run that a drill breaks: the command, its processes and files, and the faults that are known.

The run is the command a user types, with a Ray of its own. A fault is a signal to some of its processes, or a change of
its files. What is looked at is what the command prints and writes; one that ended is continued by `areal-lite resume`.
"""

import contextlib
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from random import Random
from signal import SIGCONT, SIGHUP, SIGKILL, SIGSTOP, SIGTERM, Signals
from typing import Any, Self

import psutil

from areal_lite.errors import ArealLiteError, StallError
from areal_lite.launch.bench.harness import say
from areal_lite.launch.drill_books import problems
from areal_lite.record.checkpoints import whole_checkpoints
from areal_lite.record.run_folder import RunFolder

_FIRST_STEP = 3
"""After which a fault comes."""
_PATIENCE_S = 400.0
"""How long a command may print and write nothing; its own deadlines come first (run.start_timeout_s)."""
_LINGER_S = 90.0
"""How long processes may outlive the last command: agents of Ray give a head that was lost a minute."""
_NOTICED = r"(?m)^(?!step \d|.*\(raylet\)).*(lost|died|failed|Error|stopping after|saving step|late: )"


Outcome = dict[str, Any]
"""Of one fault: its name, when it was noticed, when the run was back, steps lost, and what brought it back."""


class DrilledRun:
    """A run folder and the command that works there; a context manager, which leaves no process and notes what failed.

    What `inject_fault` has seen is in `outcomes`.
    """

    def __init__(self, folder: Path, words: Sequence[str], *, seed: int) -> None:
        """Take note of the command, the words behind `areal-lite`; it starts with the block."""
        self.folder, self.random = RunFolder(folder), Random(seed)
        self.outcomes, self.problems = list[Outcome](), list[str]()
        self.to_go_on = ["resume", str(folder)]
        self._words, self._log = [*words, f"run.dir={folder}"], folder.with_name(f"{folder.name}.log")
        self._known, self._resumes, self._rows, self._stepped_at = set[psutil.Process](), 0, 0, 0.0

    def __enter__(self) -> Self:
        self._start(self._words)
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> bool:
        self._end_all(after_s=0)
        if error is not None:
            self.problems.append(f"{type(error).__name__}: {error}")
        return isinstance(error, ArealLiteError | psutil.Error)

    def type(self, words: Sequence[str]) -> psutil.Popen:
        """Start a command of ours; what it prints goes into this run's log."""
        environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
        with self._log.open("a") as log:
            process = psutil.Popen(
                [sys.executable, "-m", "areal_lite.launch.commands.main", *words],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment, start_new_session=True,
            )  # fmt: skip
        self._known.add(process)
        return process

    def num_rows(self) -> int:
        """How many steps stand in `metrics.jsonl`."""
        path = self.folder.path / "metrics.jsonl"
        return path.read_bytes().count(b"\n") if path.exists() else 0

    def has_printed(self, pattern: str, begun: int = 0) -> bool:
        """True if its commands have printed something, behind so many bytes."""
        return self._found(pattern, begun) is not None

    def _found(self, pattern: str, begun: int) -> re.Match[str] | None:
        return re.search(pattern, self._log.read_bytes()[begun:].decode(errors="replace"))

    def wait(self, condition: Callable[[], object], what: str, *, poll_s: float = 0.1) -> None:
        """Wait; a command that ended before is resumed, if it trained a step since it began.

        Raises:
            ArealLiteError: The run ended, or cannot go on.
            StallError: It printed and wrote nothing for too long.
        """
        heard, since = (0, 0), time.monotonic()
        while not condition():
            code, rows, now = self.command.poll(), self.num_rows(), time.monotonic()
            if rows > self._rows:
                self._stepped_at = now
            self._rows = rows
            if code is not None and not condition():
                if code == 0 or not self._stepped_at:
                    raise ArealLiteError(f"expected {what}, the command ended with {code}: {self._last_words()}")
                self._resumes += 1
                self._start(self.to_go_on)
            if (new := (rows, self._log.stat().st_size)) != heard:
                heard, since = new, now
            elif now - since > _PATIENCE_S:
                raise StallError(f"expected {what}, nothing came for {_PATIENCE_S:g} s: {self._last_words()}")
            time.sleep(poll_s)

    def send(self, number: Signals, processes: Iterable[psutil.Process]) -> None:
        """Send a signal, and remember who is there, to be ended with the command."""
        self.mark_fault()
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):  # it ended with its parent
                process.send_signal(number)

    def mark_fault(self) -> None:
        """Note that the fault comes now, and who is there."""
        self._known.update(_tree(self.command))
        self._fault_at = time.monotonic()

    def signal_lane(self, role: str, part: str, number: Signals) -> str:
        """Send a signal to the processes of one lane of a role, or to those among them with a word in their name.

        Returns:
            What the command must print once the lane is back, where only the lane is lost.
        """
        found: dict[str, list[psutil.Process]] = {}

        def is_there() -> bool:
            below = {process.pid: process for process in _tree(self.command)}
            for path in sorted(self.folder.logs.glob(f"{role}*.log")):
                said = re.findall(r"(\S+) on \S+, process (\d+)$", path.read_text(errors="replace"), re.MULTILINE)
                if said and (process := below.get(int(said[-1][1]))):
                    found[said[-1][0]] = [one for one in _tree(process) if _is_named(one, part)]
            return any(found.values())

        self.wait(is_there, f"a process of {role} on this machine")
        lane = self.random.choice([lane for lane, processes in found.items() if processes])
        self.send(number, found[lane])
        if role == "queue":  # in a moment without a copy of its state the run goes back
            return "queue is back.*|back at step"
        return f"{lane} is back" if role in ("rollout", "verifier") else ""

    def inject_fault(self, name: str) -> None:
        """Provoke a fault once there is a step, wait until the run is back, and note the outcome."""
        self.wait(lambda: self._stepped_at and self.num_rows() >= _FIRST_STEP, f"step {_FIRST_STEP}")
        begun, resumes, lost = self._log.stat().st_size, self._resumes, self._num_lost()
        expected, must_be_back = "", ""
        with contextlib.ExitStack() as broken:
            if name in _TO_COMMAND:
                self.send(_TO_COMMAND[name], [self.command])
            elif name in _TO_LANES:
                must_be_back = self.signal_lane(*_TO_LANES[name])
            elif name in _TO_RAY:
                self.send(SIGKILL, [one for one in _tree(self.command) if _is_named(one, _TO_RAY[name])])
            else:
                expected = broken.enter_context(_BY_HAND[name](self))
            self.wait(
                lambda: self.has_printed(_NOTICED, begun) or self.command.poll() is not None,
                "a message about the fault",
            )
            noticed_at, fault_at = time.monotonic(), self._fault_at
        whole_at = time.monotonic()
        if name in (*_TO_COMMAND, "gcs"):
            self.wait(lambda: self.command.poll() is not None, "the end of the command")
        code, saved = self.command.poll(), max([0, *whole_checkpoints(self.folder.checkpoints)])
        if name in ("sigterm", "sighup", "gcs") and (code, saved) != (130, self.num_rows()):
            self.problems.append(f"expected exit code 130 and step {self.num_rows()} saved, got {code} and {saved}")

        def is_back() -> bool:
            is_lane = must_be_back and self._resumes == resumes
            is_alive_and_steps = self.command.poll() is None and self._stepped_at > whole_at
            return self.has_printed(must_be_back, begun) if is_lane else is_alive_and_steps

        self.wait(is_back, "the run's return (with more run.steps, if it is done)")
        if must_be_back and (told := self._found(must_be_back, begun)):
            say(told[0])
        if not self.has_printed(expected, begun):
            self.problems.append(f"expected the command to print: {expected}")
        self.outcomes.append({
            "fault": name,
            "noticed_s": None if code == -SIGKILL else noticed_at - fault_at,
            "back_s": time.monotonic() - fault_at,
            "steps_lost": self._num_lost() - lost,
            "healed_by": "the run itself" if self._resumes == resumes else "areal-lite resume",
        })  # fmt: skip
        say("{fault}: back after {back_s:.1f} s by {healed_by}, {steps_lost} steps lost".format(**self.outcomes[-1]))

    def finish(self, steps: int, *, groups_per_step: int) -> None:
        """Wait for the end of the run, and of its processes, and check its books."""
        self.wait(lambda: self.command.poll() == 0, "the last step")
        self._end_all(after_s=_LINGER_S)
        self.problems += problems(self.folder, steps=steps, groups_per_step=groups_per_step)

    def end_soon(self, max_staleness: int) -> int:
        """Have the run end a few steps from now; returns the step."""
        self.send(SIGTERM, [self.command])
        self.wait(lambda: self.command.poll() is not None, "the end of the command")
        steps = self.num_rows() + max_staleness + _FIRST_STEP
        self.to_go_on.append(f"run.steps={steps}")
        return steps

    def _start(self, words: Sequence[str]) -> None:
        self.command, self._rows, self._stepped_at = self.type(words), self.num_rows(), 0.0

    def _end_all(self, *, after_s: float) -> None:
        self._known.update(_tree(self.command))
        if (left := self._left(after_s)) and after_s:
            self.problems.append(f"no process may outlive the command by {after_s:g} s, got {left}")
        for process in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self._left(_LINGER_S)
        self.command.wait()
        self._known.clear()

    def _left(self, wait_s: float) -> list[psutil.Process]:
        until = time.monotonic() + wait_s
        while (left := [one for one in self._known if _is_named(one, "")]) and time.monotonic() < until:
            time.sleep(0.05)
        return left

    def _num_lost(self) -> int:
        return len(self.folder.read("metrics.orphaned.jsonl"))

    def _last_words(self) -> str:
        return " ".join(self._log.read_text(errors="replace").split()[-60:])


def _tree(process: psutil.Process) -> list[psutil.Process]:
    """Return a process and all below it; nothing where it has ended."""
    try:
        return [process, *process.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def _is_named(process: psutil.Process, part: str) -> bool:
    try:
        # Its number may be another's by now.
        return process.is_running() and part in " ".join(process.cmdline())
    except psutil.NoSuchProcess:  # or a zombie
        return False


@contextlib.contextmanager
def _two_writers(run: DrilledRun) -> Iterator[str]:
    run.send(SIGSTOP, [run.command])  # it must not end before the other one has looked
    run.type(run.to_go_on).wait(timeout=_PATIENCE_S)
    run.command.send_signal(SIGCONT)
    yield "must have one writer, and is held by"


@contextlib.contextmanager
def _torn_save(run: DrilledRun) -> Iterator[str]:
    def is_stopped_in_a_save() -> bool:
        if is_saving := any(run.folder.checkpoints.glob(".step-*.tmp")):
            run.send(SIGSTOP, [run.command])
            time.sleep(0.05)
            if not (is_saving := any(run.folder.checkpoints.glob(".step-*.tmp"))):
                run.send(SIGCONT, [run.command])
        return is_saving

    run.wait(is_stopped_in_a_save, "a save", poll_s=0.005)
    run.send(SIGKILL, [run.command])
    yield ""


@contextlib.contextmanager
def _bit_flip(run: DrilledRun) -> Iterator[str]:
    run.wait(lambda: len(whole_checkpoints(run.folder.checkpoints)) > 1, "a second checkpoint")
    run.send(SIGKILL, [run.command])
    run.command.wait()
    newest = run.folder.newest_checkpoint()
    path = run.random.choice(sorted(path for path in newest.rglob("*") if path.is_file() and path.stat().st_size))
    content = bytearray(path.read_bytes())
    for bit in run.random.sample(range(8 * len(content)), 8):
        content[bit // 8] ^= 1 << bit % 8
    path.write_bytes(content)
    yield re.escape(f"DAMAGED checkpoint, skipped: {newest}: {path.relative_to(newest)}")


_TO_LANES = {
    "engine": ("rollout", "EngineCore", SIGKILL),
    "rollout": ("rollout", "", SIGKILL),
    "verifier": ("verifier", "", SIGKILL),
    "queue": ("queue", "", SIGKILL),
    "trainer": ("trainer", "", SIGKILL),
    "hang-engine": ("rollout", "EngineCore", SIGSTOP),
    "hang-trainer": ("trainer", "", SIGSTOP),
}
_TO_COMMAND = {"controller": SIGKILL, "sigterm": SIGTERM, "sighup": SIGHUP}
_TO_RAY = {"raylet": "/raylet/raylet ", "gcs": "/gcs/gcs_server "}
_BY_HAND = {"two-writers": _two_writers, "torn-save": _torn_save, "bit-flip": _bit_flip}
"""Each breaks something, yields what the command must print about it, and makes it whole once it is noticed."""
FAULTS = [*_TO_LANES, *_TO_RAY, *_TO_COMMAND, *_BY_HAND]
KILLS = ["engine", "rollout", "verifier", "queue", "trainer", "controller"]
