"""A run that a drill breaks: its command, processes and files, and the faults.

The run is the command a user types, with a Ray of its own. A fault is a signal to some of its processes, or a change of
its files. The drill watches only what the command prints and writes; a command that ended is resumed:

    wait for a step → break something → wait until the command reports it, or ends → wait until the run is back
"""

import contextlib
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from random import Random
from signal import SIGCONT, SIGHUP, SIGKILL, SIGSTOP, SIGTERM, Signals
from typing import Any, Self

import psutil

from areal_lite.config.reading import override
from areal_lite.errors import ArealLiteError, StallError
from areal_lite.launch.bench.harness import say
from areal_lite.launch.drill_checks import problems
from areal_lite.record.checkpoints import whole_checkpoints
from areal_lite.record.run_folder import RunFolder

_FIRST_STEP = 3
"""A fault comes after this step."""
_PATIENCE_S = 400.0
"""How long a command may print and write nothing; its own time-outs are shorter (run.start_timeout_s)."""
_LINGER_S = 90.0
"""How long processes may outlive the last command: Ray's agents wait a minute for a lost head."""
_NOTICED = r"(?m)^(?!step \d|.*\(raylet\)).*(lost|died|failed|Error|stopping after|saving step|late: )"


Outcome = dict[str, Any]
"""Of one fault: its name, when it was noticed, when the run was back, steps lost, and what brought it back."""
Fault = Callable[["DrilledRun"], tuple[str, str]]
"""Breaks something. Returns what the command must print about it, and what it prints once the run is back if only one
lane was lost; each may be empty."""


class DrilledRun:
    """A run folder and its command; a context manager, which leaves no process behind and notes what failed.

    `inject_fault` adds to `outcomes`.
    """

    def __init__(self, folder: Path, words: Sequence[str], *, seed: int) -> None:
        """Keep the command, the words after `areal-lite`; it starts with the block."""
        self.folder = RunFolder(folder)
        self.random = Random(seed)
        self.outcomes: list[Outcome] = []
        self.problems: list[str] = []
        self.resume_words = ["resume", str(folder)]
        self._words = [*words, override("run.dir", str(folder))]
        self.log = folder.with_name(f"{folder.name}.log")
        self._known: set[psutil.Process] = set()
        self._resumes = self._rows = 0
        self._stepped_at = 0.0

    def __enter__(self) -> Self:
        self._start(self._words)
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> bool:
        self._end_all(after_s=0)
        if error is not None:
            self.problems.append(f"{type(error).__name__}: {error}")
        return isinstance(error, ArealLiteError | psutil.Error)

    def run_command(self, words: Sequence[str]) -> psutil.Popen:
        """Start an `areal-lite` command; its output goes into this run's log."""
        environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
        with self.log.open("a") as log:
            process = psutil.Popen(
                [sys.executable, "-P", "-m", "areal_lite.launch.commands.main", *words],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment, start_new_session=True,
            )  # fmt: skip
        self._known.add(process)
        return process

    def num_rows(self) -> int:
        """Return the number of steps in `metrics.jsonl`."""
        path = self.folder.path / "metrics.jsonl"
        return path.read_bytes().count(b"\n") if path.exists() else 0

    def printed(self, pattern: str, start: int = 0) -> re.Match[str] | None:
        """Search the output of its commands, from a byte on."""
        return re.search(pattern, self.log.read_bytes()[start:].decode(errors="replace"))

    def wait(self, condition: Callable[[], object], what: str, *, poll_s: float = 0.1) -> None:
        """Wait; a command that ends meanwhile is resumed if it has trained a step.

        Raises:
            ArealLiteError: The run is done, or ended without training a step.
            StallError: It printed and wrote nothing for too long.
        """
        seen, since = (0, 0), time.monotonic()
        while not condition():
            code, rows, now = self.command.poll(), self.num_rows(), time.monotonic()
            if rows > self._rows:
                self._stepped_at = now
            self._rows = rows
            if code is not None and not condition():
                if code == 0 or not self._stepped_at:
                    raise ArealLiteError(f"expected {what}, the command ended with {code}: {self._last_words()}")
                self._resumes += 1
                self._start(self.resume_words)
            if (new := (rows, self.log.stat().st_size)) != seen:
                seen, since = new, now
            elif now - since > _PATIENCE_S:
                raise StallError(f"expected {what}, nothing came for {_PATIENCE_S:g} s: {self._last_words()}")
            time.sleep(poll_s)

    def send(self, number: Signals, processes: Iterable[psutil.Process]) -> None:
        """Send a signal: the fault. Every process that exists now is remembered, to be ended with the command."""
        self._known.update(_tree(self.command))
        self._fault_at = time.monotonic()
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):  # it ended with its parent
                process.send_signal(number)

    def processes_of(self, role: str, part: str) -> tuple[str, list[psutil.Process]]:
        """Wait for a lane of a role, chosen at random, with processes that have a word in their command lines."""
        found: dict[str, list[psutil.Process]] = {}

        def is_there() -> bool:
            found.clear()
            below = {process.pid: process for process in _tree(self.command)}
            for path in sorted(self.folder.logs.glob(f"{role}*.log")):
                started = re.findall(r"(\S+) on \S+, process (\d+)$", path.read_text(errors="replace"), re.MULTILINE)
                process = below.get(int(started[-1][1])) if started else None
                if process and (named := [one for one in _tree(process) if _is_named(one, part)]):
                    found[started[-1][0]] = named
            return bool(found)

        self.wait(is_there, f"a process of {role} on this machine")
        lane = self.random.choice(list(found))
        return lane, found[lane]

    def inject_fault(self, name: str) -> None:
        """Inject a fault once there is a step, wait until the run is back, and note the outcome."""
        self.wait(lambda: self._stepped_at and self.num_rows() >= _FIRST_STEP, f"step {_FIRST_STEP}")
        start, resumes, lost = self.log.stat().st_size, self._resumes, self._num_lost()
        expected, lane_is_back = FAULTS[name](self)
        self.wait(lambda: self.printed(_NOTICED, start) or self.command.poll() is not None, "a message about the fault")
        noticed_at = time.monotonic()
        if name in _END_THE_COMMAND:
            self.wait(lambda: self.command.poll() is not None, "the end of the command")
        code, saved = self.command.poll(), max([0, *whole_checkpoints(self.folder.checkpoints)])
        if name in _SAVE_FIRST and (code, saved) != (130, self.num_rows()):
            self.problems.append(f"expected exit code 130 and step {self.num_rows()} saved, got {code} and {saved}")

        def is_back() -> object:
            if lane_is_back and self._resumes == resumes:
                return self.printed(lane_is_back, start)
            return self.command.poll() is None and self._stepped_at > noticed_at

        self.wait(is_back, "the run's return (with more run.steps, if it is done)")
        if not self.printed(expected, start):
            self.problems.append(f"expected the command to print: {expected}")
        outcome: Outcome = {
            "fault": name,
            "noticed_s": None if code == -SIGKILL else noticed_at - self._fault_at,
            "back_s": time.monotonic() - self._fault_at,
            "steps_lost": self._num_lost() - lost,
            "healed_by": "the run itself" if self._resumes == resumes else "areal-lite resume",
        }
        self.outcomes.append(outcome)
        say("{fault}: back after {back_s:.1f} s by {healed_by}, {steps_lost} steps lost".format(**outcome))

    def finish(self, steps: int, *, groups_per_step: int) -> None:
        """Wait for the end of the run and of its processes, and check its files."""
        self.wait(lambda: self.command.poll() == 0, "the last step")
        self._end_all(after_s=_LINGER_S)
        self.problems += problems(self.folder, steps=steps, groups_per_step=groups_per_step)

    def end_soon(self, max_staleness: int) -> int:
        """Make the run end a few steps from now; returns that step."""
        self.send(SIGTERM, [self.command])
        self.wait(lambda: self.command.poll() is not None, "the end of the command")
        steps = self.num_rows() + max_staleness + _FIRST_STEP
        self.resume_words.append(f"run.steps={steps}")
        return steps

    def _start(self, words: Sequence[str]) -> None:
        self.command, self._rows, self._stepped_at = self.run_command(words), self.num_rows(), 0.0

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
        return " ".join(self.log.read_text(errors="replace").split()[-60:])


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


def signal_lane(role: str, part: str, number: Signals, run: DrilledRun) -> tuple[str, str]:
    """Send a signal to a lane of a role, or to the lane itself (`rollout-1`): a fault, once the others are given."""
    lane, processes = run.processes_of(role, part)
    run.send(number, processes)
    named = "the sample queue died" if role == "queue" else rf"\b{lane} died"
    # Without a copy of its state, in its first moment, a queue that dies sends the run back to a checkpoint.
    is_back = {"queue": "queue is back.*|back at step", "trainer": ""}.get(role, f"{lane} is back")
    return named if number == SIGKILL else rf"\b{lane}\b", is_back


def _signal_command(number: Signals, run: DrilledRun) -> tuple[str, str]:
    run.send(number, [run.command])
    return "", ""


def _kill_ray(part: str, run: DrilledRun) -> tuple[str, str]:
    run.send(SIGKILL, [one for one in _tree(run.command) if _is_named(one, part)])
    return "", ""


def _two_writers(run: DrilledRun) -> tuple[str, str]:
    run.send(SIGSTOP, [run.command])  # so that it does not end before the other one has started
    run.run_command(run.resume_words).wait(timeout=_PATIENCE_S)
    run.command.send_signal(SIGCONT)
    return "is in use by", ""


def _torn_save(run: DrilledRun) -> tuple[str, str]:
    def is_stopped_in_a_save() -> bool:
        if is_saving := any(run.folder.checkpoints.glob(".step-*.tmp")):
            run.send(SIGSTOP, [run.command])
            time.sleep(0.05)
            if not (is_saving := any(run.folder.checkpoints.glob(".step-*.tmp"))):
                run.send(SIGCONT, [run.command])
        return is_saving

    run.wait(is_stopped_in_a_save, "a save", poll_s=0.005)
    run.send(SIGKILL, [run.command])
    return "", ""


def _bit_flip(run: DrilledRun) -> tuple[str, str]:
    run.wait(lambda: len(whole_checkpoints(run.folder.checkpoints)) > 1, "a second checkpoint")
    run.send(SIGKILL, [run.command])
    run.command.wait()
    newest = run.folder.newest_checkpoint()
    path = run.random.choice(sorted(path for path in newest.rglob("*") if path.is_file() and path.stat().st_size))
    content = bytearray(path.read_bytes())
    for bit in run.random.sample(range(8 * len(content)), 8):
        content[bit // 8] ^= 1 << bit % 8
    path.write_bytes(content)
    return re.escape(f"DAMAGED checkpoint, skipped: {newest}: {path.relative_to(newest)}"), ""


FAULTS: dict[str, Fault] = {
    "engine": partial(signal_lane, "rollout", "EngineCore", SIGKILL),
    "rollout": partial(signal_lane, "rollout", "", SIGKILL),
    "verifier": partial(signal_lane, "verifier", "", SIGKILL),
    "queue": partial(signal_lane, "queue", "", SIGKILL),
    "trainer": partial(signal_lane, "trainer", "", SIGKILL),
    "hang-engine": partial(signal_lane, "rollout", "EngineCore", SIGSTOP),
    "hang-trainer": partial(signal_lane, "trainer", "", SIGSTOP),
    "raylet": partial(_kill_ray, "/raylet/raylet "),
    "gcs": partial(_kill_ray, "/gcs/gcs_server "),
    "controller": partial(_signal_command, SIGKILL),
    "sigterm": partial(_signal_command, SIGTERM),
    "sighup": partial(_signal_command, SIGHUP),
    "two-writers": _two_writers,
    "torn-save": _torn_save,
    "bit-flip": _bit_flip,
}
KILLS = ["engine", "rollout", "verifier", "queue", "trainer", "controller"]
_SAVE_FIRST = ("sigterm", "sighup", "gcs")
_END_THE_COMMAND = (*_SAVE_FIRST, "controller")
