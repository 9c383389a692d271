"""`areal-lite drill`: faults in real runs of a recipe on this machine, and what becomes of them.

A run is the command a user types, with a Ray of its own. A fault is a signal to some of its processes, or a change of
its files; or the command is a rehearsal on two nodes, which breaks one. What is looked at is what the command says and
writes; one that ended goes on by `areal-lite resume`.
"""

import contextlib
import functools
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from random import Random
from signal import SIGCONT, SIGHUP, SIGKILL, SIGSTOP, SIGTERM, Signals, default_int_handler, signal
from typing import Any, Self

import psutil

from areal_lite.config.offline import load_any_config
from areal_lite.config.recipe import Config
from areal_lite.errors import ArealLiteError, ConfigError, StallError
from areal_lite.launch.bench.harness import finish, say
from areal_lite.launch.rehearse.books import are_alike, problems
from areal_lite.launch.rehearse.namespaces import make_nodes
from areal_lite.record.checkpoints import whole_checkpoints
from areal_lite.record.run_folder import RunFolder

_SETTINGS = (
    "run.checkpoint_every=1", "run.eval_every=0", "run.report=false", "run.log_samples=1000000",
    "run.stall_timeout_s=20", "run.save_timeout_s=60", "run.max_worker_restarts=1000",
)  # fmt: skip
_STEPS, _FOR_EVER = 16, 1_000_000
"""Of a run with one fault: more than are admitted without a worker; and of a soak."""
_FIRST_STEP = 3
"""After which a fault comes."""
_LONGEST_PAUSE_S = 20.0
"""Between two faults of a soak."""
_PATIENCE_S = 400.0
"""How long nothing may be heard of a command; its own deadlines come first (run.start_timeout_s)."""
_LINGER_S = 90.0
"""How long processes may outlive the last command: agents of Ray give a head that was lost a minute."""
_NOTICED = (
    r"(?m)^(?!step \d|areal-lite rehearse|.*\(raylet\))"
    ".*(lost|died|failed|Error|stopping after|saving step|late: |disk full)"
)
_UNDISTURBED = "none"
_UNNOTICED = {_UNDISTURBED, "slow-network"}
_Row = dict[str, Any]


class DrilledRun:
    """A run folder and the command that works there; a context manager, which leaves no process and notes what failed.

    What `suffer` has seen is in `outcomes`.
    """

    def __init__(self, folder: Path, words: Sequence[str], *, seed: int) -> None:
        """Take note of the command, the words behind `areal-lite`; it starts with the block."""
        self.folder, self.random = RunFolder(folder), Random(seed)
        self.outcomes, self.problems = list[_Row](), list[str]()
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
        """Start a command of ours; what it says goes into this run's log."""
        environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
        with self._log.open("a") as log:
            process = psutil.Popen(
                [sys.executable, "-m", "areal_lite.cli.main", *words],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment, start_new_session=True,
            )  # fmt: skip
        self._known.add(process)
        return process

    def num_rows(self) -> int:
        """How many steps stand in `metrics.jsonl`."""
        path = self.folder.path / "metrics.jsonl"
        return path.read_bytes().count(b"\n") if path.exists() else 0

    def said(self, pattern: str, begun: int = 0) -> bool:
        """Whether its commands have said something, behind so many bytes."""
        return self._found(pattern, begun) is not None

    def _found(self, pattern: str, begun: int) -> re.Match[str] | None:
        return re.search(pattern, self._log.read_bytes()[begun:].decode(errors="replace"))

    def wait(self, condition: Callable[[], object], what: str, *, poll_s: float = 0.1) -> None:
        """Wait; a command that ended before is gone on with, if it trained a step since it began.

        Raises:
            ArealLiteError: The run ended, or cannot go on.
            StallError: Nothing was heard for too long.
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
                raise StallError(f"expected {what}, nothing was heard for {_PATIENCE_S:g} s: {self._last_words()}")
            time.sleep(poll_s)

    def send(self, number: Signals, processes: Iterable[psutil.Process]) -> None:
        """Send a signal, and remember who is there, to be ended with the command."""
        self.is_struck()
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):  # it ended with its parent
                process.send_signal(number)

    def is_struck(self) -> None:
        """Note that the fault comes now, and who is there."""
        self._known.update(_tree(self.command))
        self._struck_at = time.monotonic()

    def strike(self, role: str, part: str, number: Signals) -> str:
        """Send a signal to the processes of one lane of a role, or to those among them with a word in their name.

        Returns:
            What the command must say once the lane is back, where only the lane is lost.
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

    def suffer(self, name: str) -> None:
        """Provoke a fault once there is a step, wait until the run is back, and note the outcome."""
        self.wait(lambda: self._stepped_at and self.num_rows() >= _FIRST_STEP, f"step {_FIRST_STEP}")
        begun, resumes, lost = self._log.stat().st_size, self._resumes, self._num_lost()
        says, must_be_back = "", ""
        with contextlib.ExitStack() as broken:
            if name in _TO_COMMAND:
                self.send(_TO_COMMAND[name], [self.command])
            elif name in _TO_LANES:
                must_be_back = self.strike(*_TO_LANES[name])
            elif name in _TO_RAY:
                self.send(SIGKILL, [one for one in _tree(self.command) if _is_named(one, _TO_RAY[name])])
            else:
                says = broken.enter_context(_BY_HAND[name](self))
            self.wait(lambda: self.said(_NOTICED, begun) or self.command.poll() is not None, "a word on the fault")
            noticed_at, struck_at = time.monotonic(), self._struck_at
        whole_at = time.monotonic()
        if name in (*_TO_COMMAND, "gcs"):
            self.wait(lambda: self.command.poll() is not None, "the end of the command")
        code, saved = self.command.poll(), max([0, *whole_checkpoints(self.folder.checkpoints)])
        if name in ("sigterm", "sighup", "gcs") and (code, saved) != (130, self.num_rows()):
            self.problems.append(f"expected exit code 130 and step {self.num_rows()} saved, got {code} and {saved}")

        def is_back() -> bool:
            is_lane = must_be_back and self._resumes == resumes
            is_alive_and_steps = self.command.poll() is None and self._stepped_at > whole_at
            return self.said(must_be_back, begun) if is_lane else is_alive_and_steps

        self.wait(is_back, "the run's return (with more run.steps, if it is done)")
        if must_be_back and (told := self._found(must_be_back, begun)):
            say(told[0])
        if not self.said(says, begun):
            self.problems.append(f"the command must say: {says}")
        self.outcomes.append({
            "fault": name,
            "noticed_s": None if code == -SIGKILL else noticed_at - struck_at,
            "back_s": time.monotonic() - struck_at,
            "steps_lost": self._num_lost() - lost,
            "healed_by": _HEALERS.get(name, "the run itself") if self._resumes == resumes else "areal-lite resume",
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
def _own_disk(folder: Path) -> Iterator[None]:
    """Have a new folder be a file system of its own, in memory; what lies there is kept."""
    folder.mkdir()
    _mount("-t", "tmpfs", "tmpfs", folder)
    try:
        yield
    finally:
        kept = folder.with_name(f".{folder.name}")
        shutil.copytree(folder, kept)
        subprocess.run(["umount", "--lazy", folder], check=True)
        kept.replace(folder)


def _mount(*words: str | Path) -> None:
    subprocess.run(["mount", *words], check=True, capture_output=True)


@contextlib.contextmanager
def _disk_full(run: DrilledRun) -> Iterator[str]:
    """Have the run's file system be no larger than what lies there, whatever is deleted, for two saves."""
    disk = run.folder.path

    def is_said(words: str) -> bool:
        with contextlib.suppress(subprocess.CalledProcessError):  # it has grown since
            _mount("-o", f"remount,size={shutil.disk_usage(disk).used}", disk)
        return run.said(words)

    run.is_struck()
    run.wait(lambda: is_said("disk full: "), "a save without room")
    yield f"disk full: \\d+ MB needed in {re.escape(str(disk))}"
    run.wait(lambda: is_said(r"(?s)(step \d+) is not saved.*(?!\1)step \d+ is not saved"), "another")
    _mount("-o", "remount,size=50%", disk)


@contextlib.contextmanager
def _node(run: DrilledRun) -> Iterator[str]:
    run.wait(lambda: run.said("lost its power"), "the node's end")
    run.is_struck()
    yield "node-2 was lost|node-2 .* is not reached"
    run.wait(lambda: run.said("is whole again"), "the node")


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
    yield re.escape(f"DAMAGED checkpoint, not taken: {newest}: {path.relative_to(newest)}")


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
_BY_HAND = {
    "two-writers": _two_writers, "torn-save": _torn_save, "bit-flip": _bit_flip, "disk-full": _disk_full, "node": _node
}  # fmt: skip
"""Each breaks something, yields what the command must say of it, and makes it whole once it is noticed."""
_ON_NODES = {
    "node": ["--kill-node", str(_FIRST_STEP + 1)],
    "slow-network": ["--slow", "10", "run.min_bandwidth_mb_s=0"],
}
"""What a rehearsal on two nodes is told."""
_AS_ROOT = {*_ON_NODES, "disk-full"}
_HEALERS = {"node": "areal-lite launch"}
FAULTS = [*_TO_LANES, *_TO_RAY, *_TO_COMMAND, *_BY_HAND, "slow-network"]
KILLS = ["engine", "rollout", "verifier", "queue", "trainer", "controller"]


def drill(
    recipe: str, overrides: Sequence[str], *, names: Sequence[str], out: Path, minutes: float | None, seed: int
) -> int:
    """Provoke faults, one a run, or for some minutes at random in one run, and show the table; returns the exit code.

    At `queue.max_staleness: 0` an undisturbed run comes first, whose losses must be those of all.
    """
    words = ["train", recipe, *_SETTINGS, f"run.steps={_FOR_EVER if minutes else _STEPS}", *overrides]
    config = load_any_config(recipe, words[2:])
    if not isinstance(config, Config) or config.run.dir or config.run.resume or (out.exists() and any(out.iterdir())):
        raise ConfigError(
            "a drill needs a recipe of areal-lite train without run.dir and run.resume, and --out a new folder, got "
            f"{recipe} of command: {config.command}, run.dir={config.run.dir}, run.resume={config.run.resume}, {out}"
        )
    if minutes and (alone := [name for name in names if name in _AS_ROOT]):
        raise ConfigError(
            f"a soak takes faults of the run's own processes and files, got {', '.join(alone)}: leave out"
        )
    rows, code, reference, ends_at = list[_Row](), 0, None, time.monotonic() + 60 * (minutes or 0)
    before = signal(SIGTERM, default_int_handler)  # else its commands would outlive it
    runs = ["soak"] if minutes else [*([_UNDISTURBED] * (config.queue.max_staleness == 0)), *names]
    out.mkdir(parents=True, exist_ok=True)
    try:
        for number, name in enumerate(runs, 1):
            say(f"{number} of {len(runs)}: {name}")
            if why := _why_not(name):
                rows.append(_row(name, [], []) | {"left_out": why})
                say(f"{name}: left out, as {why}")
                continue
            folder, typed = (out / name).resolve(), words
            if name in _ON_NODES:
                typed = ["rehearse", "nodes", "--nodes=2", recipe, *words[2:], *_ON_NODES[name]]
            disk = _own_disk(folder) if name == "disk-full" else contextlib.nullcontext()
            with disk, (run := DrilledRun(folder, typed, seed=seed)):
                try:
                    for fault in _drawn(run, names, ends_at) if minutes else {name} - _UNNOTICED:
                        run.suffer(fault)
                    steps = run.end_soon(config.queue.max_staleness) if minutes else config.run.steps
                    run.finish(steps, groups_per_step=config.queue.groups_per_step)
                finally:
                    rows += rows_of(run, name)
            if reference is None and name == _UNDISTURBED:
                reference = run.folder
            elif reference is not None and name not in _ON_NODES:
                rows[-1]["losses"] = "equal" if are_alike(run.folder, reference) else "differ"
                run.problems += ["losses must be those of the undisturbed run"] * (rows[-1]["losses"] == "differ")
            failure = "; ".join(["FAILED", *run.problems, f"its run folder is {run.folder.path}"])
            say(f"{name}: {failure if run.problems else 'passed'}")
    except KeyboardInterrupt:
        code = 130
        say("stopped: what follows was seen until then")
    finally:
        signal(SIGTERM, before)
    settings = {"recipe": recipe, "overrides": list(overrides), "seed": seed, "minutes": minutes}
    benchmark = "soak" if minutes else "drill"
    finish(benchmark, benchmark, rows, settings=settings, out=out)
    return code or int(any(row["problems"] for row in rows))


def _drawn(run: DrilledRun, names: Sequence[str], ends_at: float) -> Iterator[str]:
    while time.monotonic() < ends_at:
        moment = time.monotonic() + run.random.uniform(0, _LONGEST_PAUSE_S)
        run.wait(functools.partial(lambda moment: time.monotonic() > moment, moment), "the next fault")
        yield run.random.choice(names)


def _why_not(name: str) -> str:
    """Say why a fault cannot be provoked on this machine; nothing where it can."""
    try:
        with make_nodes(["node-1"]) if name in _AS_ROOT else contextlib.nullcontext():
            return ""
    except ConfigError as error:
        return str(error)


def rows_of(run: DrilledRun, name: str) -> list[_Row]:
    """Return the table's rows of a run: where it suffered several faults, one for each kind, and one of all."""
    kinds = sorted({one["fault"] for one in run.outcomes} - {name})
    of_each = [_row(kind, [one for one in run.outcomes if one["fault"] == kind], []) for kind in kinds]
    return [*of_each, _row(name, run.outcomes, run.problems)]


def _row(kind: str, outcomes: Sequence[_Row], problems: list[str]) -> _Row:
    return {
        "fault": kind,
        "times": len(outcomes),
        **{key: [one[key] for one in outcomes if one[key] is not None] for key in ("noticed_s", "back_s")},
        "steps_lost": sum(one["steps_lost"] for one in outcomes),
        "healed_by": ", ".join(sorted({one["healed_by"] for one in outcomes})) or None,
        "losses": None,
        "problems": problems,
    }
