"""The supervisor of a job: runs its command, ends everything on every node, and goes on after a failure.

A process of its own: `python -m areal_lite.launch.clusters.attempts RECORD`, on the head or wherever the nodes are
reached from. Ctrl-C, and a batch system's notice (SIGTERM, SIGHUP, SIGUSR1), are handed to the command as an interrupt,
so that the run saves; a second Ctrl-C ends it at once.
"""

import contextlib
import json
import os
import shlex
import shutil
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from areal_lite.actors.process import HOME
from areal_lite.config.offline import load_any_config
from areal_lite.config.reading import parse_section, read_yaml
from areal_lite.config.sections import LaunchConfig
from areal_lite.errors import ArealLiteError, StallError
from areal_lite.launch.clusters.fit import recipe_of
from areal_lite.launch.clusters.job import Job, Status, find_kind
from areal_lite.launch.clusters.ray_nodes import LOCAL, RayNodes
from areal_lite.launch.clusters.remote import Remote, end_process, python_of, script
from areal_lite.launch.run.signals import NOTICES
from areal_lite.record.checkpoints import whole_checkpoints
from areal_lite.record.run_files import read_rows, read_summary, write_whole

INTERRUPTED = 130
_POLL_S = 0.25
_SAME_STEP = 3
_LONGEST_PAUSE_S = 600.0
_LOST_GRACE_S = 15.0
"""How long the command may take to say what the loss of a node meant to it."""


@dataclass(slots=True)
class Attempt:
    """One try."""

    began: float
    """Seconds since the epoch."""
    ended: float = 0.0
    code: int | None = None
    """Exit code of the command; None while it is under way."""
    step: int = 0
    """Last trainer step in the run's metrics."""
    cause: str = ""
    """Why it failed."""


@dataclass(slots=True)
class Attempts:
    """What has become of a job so far; `attempts.json` beside its log."""

    attempts: list[Attempt] = field(default_factory=list)
    said: str = "waiting for its nodes"
    """Where the job stands, one sentence."""
    code: int | None = None
    """Its exit code, once there will be no further attempt."""

    @classmethod
    def read(cls, job: Job) -> "Attempts":
        """Read a job's record; an empty one where there is none."""
        path = job.files / "attempts.json"
        return TypeAdapter(cls).validate_json(path.read_text()) if path.is_file() else cls()

    def save(self, job: Job) -> None:
        """Write it, whole or not at all."""
        job.files.mkdir(parents=True, exist_ok=True)
        write_whole(job.files / "attempts.json", json.dumps(asdict(self), indent=2) + "\n")

    def status(self) -> Status:
        """Say where the job stands."""
        return Status(self.said, code=self.code)


def verdict(attempts: Sequence[Attempt], *, max_attempts: int) -> str | None:
    """Return why there is no further attempt, or None when there is one; those that were stopped do not count.

    >>> failed = Attempt(began=0, ended=1, code=1, step=7, cause="rollout/0 died")
    >>> verdict([failed], max_attempts=2) is None
    True
    >>> verdict([failed] * 3, max_attempts=9)
    'failed 3 times at step 7: rollout/0 died'
    """
    last = attempts[-1]
    if last.code == 0:
        return f"done after {len(attempts)} attempt{'s' if len(attempts) > 1 else ''}"
    if last.code == INTERRUPTED:
        return f"stopped at step {last.step}: {last.cause}" if last.cause else f"stopped and saved at step {last.step}"
    failed = [one for one in attempts if one.code not in (None, INTERRUPTED)]  # None: its supervisor was killed
    if len(failed) >= _SAME_STEP and {one.step for one in failed[-_SAME_STEP:]} == {last.step}:
        return f"failed {_SAME_STEP} times at step {last.step}: {last.cause}"
    if len(failed) >= max_attempts:
        return f"failed at step {last.step}, attempt {len(failed)} of launch.max_attempts={max_attempts}: {last.cause}"
    return None


def driver_script(job: Job, *, attempt: int, env: Mapping[str, str] = {}) -> str:
    """Return the script of the command itself.

    Args:
        attempt: From 1; a later one goes on from the run folder's newest checkpoint, where there is one.
        env: Of the Ray cluster that was formed for it.
    """
    words, profile, folder = job.words, job.profile, job.run_folder
    ours = {"run.env": json.dumps(profile.env) if profile.env else None}
    if profile.nodes > 1:
        ports = profile.port_range  # the first half is Ray's
        ours |= {"run.network": profile.network, "run.ports": f"{ports[len(ports) // 2]}-{ports[-1]}"}
    if folder is not None and attempt > 1 and whole_checkpoints(folder / "checkpoints"):
        words = [word for word in words if not word.startswith(("run.dir=", "run.resume=", "run.resume_from="))]
        ours["run.resume"] = str(folder)
    elif folder is not None and not any(word.startswith(("run.dir=", "run.resume=")) for word in words):
        ours["run.dir"] = str(folder)
    given = {word.partition("=")[0] for word in words}
    more = [f"{key}={value}" for key, value in ours.items() if value is not None and key not in given]
    command = [python_of(job), "-m", "areal_lite.launch.commands.main", *map(shlex.quote, [*words, *more])]
    joined = find_kind(job.kind).joined(job)
    if joined is not None and profile.nodes > 1:
        wait = [python_of(job), "-m", "areal_lite.launch.clusters.joined"]
        command = [*wait, str(profile.nodes), f"{profile.start_timeout_s:g}", *command]
    return script(job, env=joined or env, command=command)


def supervise(job: Job) -> int:
    """Run a job to its end and return the exit code, which is 0 only when the command has done all."""
    config = load_any_config(*recipe_of(job.words)[1:]).launch if job.run_folder is not None else LaunchConfig()
    record = _reopened(job)
    (job.files / "pid").write_text(f"{os.getpid()}\n")
    with _asked_to_stop() as asked:
        while True:
            number = len(record.attempts) + 1
            _say(f"attempt {number}")
            attempt = Attempt(began=time.time())
            record.attempts.append(attempt)
            record.said = f"attempt {number} is under way since {time.ctime()}"
            record.save(job)
            code, attempt.cause = _attempt(job, number, asked)
            attempt.step, attempt.ended = last_step(job.run_folder), time.time()
            attempt.code = INTERRUPTED if asked and code else code
            _gather(job, number)
            if outcome := verdict(record.attempts, max_attempts=config.max_attempts):
                break
            failures = sum(one.code != INTERRUPTED for one in record.attempts)
            pause = min(config.pause_s * 2 ** (failures - 1), _LONGEST_PAUSE_S)
            record.said = (
                f"attempt {number} failed at step {attempt.step}: {attempt.cause}; the next one in {pause:g} s"
            )
            record.save(job)
            _say(record.said)
            _wait(pause, asked)
            if asked:
                attempt.code = INTERRUPTED
                outcome = f"stopped before another attempt, at step {attempt.step}"
                break
    record.said, record.code = outcome, attempt.code
    record.save(job)
    _sum_up(job, record)
    _say(outcome)
    return attempt.code


def _attempt(job: Job, number: int, asked: Sequence[int]) -> tuple[int, str]:
    """Form the cluster, run the command, end everything; returns the exit code and the cause of a failure."""
    logs = job.files / f"attempt-{number}"
    logs.mkdir(parents=True, exist_ok=True)
    try:
        if left := end_leftovers(job):
            raise StallError(f"processes of an earlier attempt must end before another, got {'; '.join(left)}")
        kind = find_kind(job.kind)
        nodes = RayNodes(job, kind.nodes(job), logs=logs)
        gets_signals = kind.signals_command(job)
        try:
            nodes.form(lambda: bool(asked))
            if asked:
                return INTERRUPTED, "stopped while the nodes joined"
            if nodes.env:
                _say(f"Ray on {len(nodes.processes)} nodes, head {nodes.env['RAY_ADDRESS']}")
            if number > 1:
                _set_aside(job.run_folder, number - 1)
            script = driver_script(job, attempt=number, env=nodes.env)
            # Before the command starts: one that runs may have the first signal already.
            is_told = gets_signals and not asked
            return _watch(nodes, nodes.run(script), asked, is_told=is_told)
        finally:
            for problem in nodes.end():
                _say(f"not ended: {problem}")
    except (ArealLiteError, OSError) as error:  # the latter: ssh, srun or nsenter is not there
        return 1, str(error)


def _watch(nodes: RayNodes, driver: Remote, asked: Sequence[int], *, is_told: bool) -> tuple[int, str]:
    """Wait for the command; a node that is lost ends it, also where it does not notice by itself.

    Args:
        is_told: The first signal reaches the command without this process.
    """
    text, shown, lost, lost_at, handed_on = "", 0, "", 0.0, 0
    while True:
        code = driver.code  # before its output, so that the last words are among it
        if driver.pid is not None or code is not None:
            text = driver.output()
            print(text[shown:], end="", flush=True)
            shown = len(text)
        if code is not None:
            return (code or (1 if lost else 0)), lost or ("" if code in (0, INTERRUPTED) else _cause(text))
        if not lost and (lost := nodes.lost()):
            lost_at = time.monotonic()
            _say(lost)
        if lost and time.monotonic() > lost_at + _LOST_GRACE_S:
            return 1, lost
        if len(asked) > handed_on and driver.pid is not None:  # before that, nobody could hear it
            handed_on += 1
            if handed_on > 1 or not is_told:
                driver.interrupt()
        _wait(_POLL_S, asked)


@contextlib.contextmanager
def _asked_to_stop() -> Iterator[list[int]]:
    """Yield a list that grows by a signal whenever the user asks to stop, or when the batch system does so first."""
    asked: list[int] = []

    def handle(number: int, frame: Any) -> None:
        # A notice may come to every process, and once more from who started this one.
        if number == signal.SIGINT or not asked:
            asked.append(number)

    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, *NOTICES)}
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _wait(seconds: float, asked: Sequence[int]) -> None:
    """Sleep, but no longer than until somebody asks."""
    count, until = len(asked), time.monotonic() + seconds
    while len(asked) == count and (left := until - time.monotonic()) > 0:
        time.sleep(min(left, _POLL_S))


def end_leftovers(job: Job) -> list[str]:
    """End what is left on the nodes, by the logs: after a supervisor was killed, or a node was out of reach.

    Returns:
        What went wrong. Nodes that are no longer the job's are left to who has taken them away.
    """
    shells = find_kind(job.kind).nodes(job)
    head, found = next(iter(shells.values()), LOCAL), []
    for log in sorted(job.files.glob("attempt-*/*.log"), key=lambda log: log.stem.endswith("-ray")):  # commands first
        node, _, what = log.stem.rpartition("-")
        if what == "driver" or node in shells:
            found.append(end_process(job, shells.get(node, head), log=log))
    return [problem for problem in found if problem]


def _reopened(job: Job) -> Attempts:
    """Read the record of a job that a batch system starts once more; an attempt without an end was killed with it."""
    record = Attempts.read(job)
    record.code = None
    for number, one in enumerate(record.attempts, 1):
        if one.code is None:
            _gather(job, number)
            one.code, one.cause, one.step = INTERRUPTED, "killed with its supervisor", last_step(job.run_folder)
            one.ended = max(one.began, (job.files / "attempts.json").stat().st_mtime)
    return record


def last_step(folder: Path | None) -> int:
    """Return the last step in a run's metrics; 0 where there is none."""
    rows = read_rows(folder / "metrics.jsonl")[0] if folder else []
    return int(rows[-1].get("step", 0)) if rows else 0


def _cause(text: str) -> str:
    """Return the line of a command's output that says best why it failed: the last that names an error."""
    lines = [bare for line in text.splitlines() if (bare := line.strip(" │")) and not bare.startswith(("╭", "╰"))]
    return next((line for line in reversed(lines) if "Error" in line), lines[-1] if lines else "it said nothing")


def _set_aside(folder: Path | None, failed: int) -> None:
    """Make room for the next attempt: a folder without a checkpoint gets another name, else gathered logs go."""
    if folder is None or not (folder / "config.json").exists():
        return
    if not whole_checkpoints(folder / "checkpoints"):
        folder.rename(folder.with_name(f"{folder.name}.attempt-{failed}"))
    for path in (folder / "logs").glob("*.log"):
        path.unlink()


def _gather(job: Job, number: int) -> None:
    """Copy into the run folder what was said in an attempt: by each node, and by each actor, named by its node."""
    if job.run_folder is None or not job.run_folder.is_dir():
        return
    own, logs = job.files / f"attempt-{number}", job.run_folder / "logs"
    own.mkdir(parents=True, exist_ok=True)  # of one that was killed at once
    shutil.copytree(own, logs / own.name, dirs_exist_ok=True)
    for path in logs.glob("*.log"):
        with path.open(errors="replace") as file:
            node = HOME.search(file.readline())
        shutil.copy2(path, logs / own.name / "-".join([*(node.groups() if node else ()), path.name]))


def _sum_up(job: Job, record: Attempts) -> None:
    """Write GPU hours and cost into the run's summary."""
    folder = job.run_folder or job.files
    hours = sum(max(one.ended - one.began, 0.0) for one in record.attempts) / 3600  # one killed has no end
    gpu_hours = hours * job.profile.nodes * job.profile.gpus_per_node
    figures = {"attempts": len(record.attempts), "gpu_hours": gpu_hours}
    if job.profile.price_per_gpu_hour:
        figures["cost"] = gpu_hours * job.profile.price_per_gpu_hour
    with contextlib.suppress(OSError, ValueError):
        write_whole(folder / "summary.json", json.dumps(read_summary(folder) | figures, indent=2) + "\n")


def _say(text: str) -> None:
    print(f"areal-lite launch: {text}", flush=True)


if __name__ == "__main__":
    sys.exit(supervise(parse_section(read_yaml(Path(sys.argv[1]), holding="a job"), Job)))
