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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from areal_lite.actors.process import HOME
from areal_lite.config.offline import load_any_config
from areal_lite.config.reading import parse_section, read_yaml
from areal_lite.config.sections import LaunchConfig
from areal_lite.errors import ArealLiteError, StallError
from areal_lite.launch.clusters.fit import recipe_of
from areal_lite.launch.clusters.job import Job, Status, find_kind
from areal_lite.launch.clusters.ray_nodes import RayNodes
from areal_lite.launch.clusters.remote import Remote, end_process, python_of, script
from areal_lite.launch.run.signals import NOTICES
from areal_lite.record.checkpoints import whole_checkpoints
from areal_lite.record.run_folder import RunFolder, read_rows, read_summary, write_whole

INTERRUPTED = 130
_POLL_S = 0.25
_SAME_STEP = 3
_LONGEST_PAUSE_S = 600.0
_LOST_GRACE_S = 15.0
"""How long the command may take to say what the loss of a node meant to it."""
_LOCAL = ("bash", "-c")


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
    processes: dict[str, int] = field(default_factory=dict)
    """Id of each process that is still to be ended, by node; the command's as `driver`. Those out of reach stay."""
    outcome: str = ""
    """One sentence, once there will be no further attempt."""

    @classmethod
    def read(cls, job: Job) -> "Attempts":
        """Read a job's record; an empty one where there is none."""
        path = job.files / "attempts.json"
        raw = json.loads(path.read_text()) if path.is_file() else {}
        return cls(**{**raw, "attempts": [Attempt(**one) for one in raw.get("attempts", [])]})

    def save(self, job: Job) -> None:
        """Write it, whole or not at all."""
        job.files.mkdir(parents=True, exist_ok=True)
        write_whole(job.files / "attempts.json", json.dumps(asdict(self), indent=2) + "\n")

    def status(self) -> Status:
        """Say where the job stands."""
        if not self.attempts:
            return Status("waiting for its nodes")
        last = self.attempts[-1]
        if self.outcome:
            return Status(self.outcome, code=last.code)
        if last.code is None:
            return Status(f"attempt {len(self.attempts)} is under way since {time.ctime(last.began)}")
        return Status(f"attempt {len(self.attempts)} failed at step {last.step} ({last.cause}); another one follows")


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


def pause_s(failures: int, *, first_s: float) -> float:
    """Return the pause before the next attempt: doubled after each failure, at most ten minutes.

    >>> [pause_s(n, first_s=10) for n in (1, 2, 3, 9)]
    [10.0, 20.0, 40.0, 600.0]
    """
    return float(min(first_s * 2 ** (failures - 1), _LONGEST_PAUSE_S))


def driver_script(job: Job, *, attempt: int, address: str | None, env: Mapping[str, str] | None = None) -> str:
    """Return the script of the command itself.

    Args:
        attempt: From 1; a later one goes on from the run folder's newest checkpoint, where there is one.
        address: host:port of the Ray cluster that was formed for it; None = the profile's, or none.
        env: Of the cluster.
    """
    _, _, overrides = recipe_of(job.words)
    words, profile = list(job.words), job.profile
    given = {word.partition("=")[0] for word in overrides}
    ours = {"run.env": json.dumps(profile.env) if profile.env else None}
    if profile.nodes > 1:
        ports = profile.port_range  # the first half is Ray's
        ours |= {"run.network": profile.network, "run.ports": f"{ports[len(ports) // 2]}-{ports[-1]}"}
    folder = job.run_folder
    if folder is not None and attempt > 1 and whole_checkpoints(folder / "checkpoints"):
        words = [word for word in words if not word.startswith(("run.dir=", "run.resume=", "run.resume_from="))]
        ours["run.resume"] = str(folder)
    elif folder is not None and not given & {"run.dir", "run.resume"}:
        ours["run.dir"] = str(folder)
    words += [
        f"{key}={value}" for key, value in ours.items() if value is not None and key not in given - {"run.resume"}
    ]
    if job.kind == "ray":
        address = address or profile.ray.address
    address_env = {"RAY_ADDRESS": address} if address else {}
    command = [python_of(job), "-m", "areal_lite.cli.main", *map(shlex.quote, words)]
    if job.kind == "ray" and profile.nodes > 1:
        wait = [python_of(job), "-m", "areal_lite.launch.clusters.joined"]
        command = [*wait, str(profile.nodes), f"{profile.start_timeout_s:g}", *command]
    return script(job, command, {**(env or {}), **address_env})


def supervise(job: Job) -> int:
    """Run a job to its end and return the exit code, which is 0 only when the command has done all."""
    config = load_any_config(*recipe_of(job.words)[1:]).launch if job.run_folder is not None else LaunchConfig()
    record, asked = _reopened(job), _Asked()
    (job.files / "pid").write_text(f"{os.getpid()}\n")
    with asked:
        while True:
            number = len(record.attempts) + 1
            _say(f"attempt {number}")
            attempt = Attempt(began=time.time())
            record.attempts.append(attempt)
            record.save(job)
            code, attempt.cause = _attempt(job, number, record, asked)
            attempt.step, attempt.ended = last_step(job.run_folder), time.time()
            attempt.code = INTERRUPTED if asked and code else code
            _gather(job, number)
            if outcome := verdict(record.attempts, max_attempts=config.max_attempts):
                break
            failures = sum(one.code != INTERRUPTED for one in record.attempts)
            pause = pause_s(failures, first_s=config.pause_s)
            record.save(job)
            _say(f"attempt {number} failed at step {attempt.step}: {attempt.cause}; the next one in {pause:g} s")
            asked.wait(pause)
            if asked:
                attempt.code, outcome = INTERRUPTED, f"stopped before another attempt, at step {attempt.step}"
                break
    record.outcome = outcome
    record.save(job)
    _sum_up(job, record)
    _say(outcome)
    assert attempt.code is not None
    return attempt.code


def _attempt(job: Job, number: int, record: Attempts, asked: "_Asked") -> tuple[int, str]:
    """Form the cluster, run the command, end everything; returns the exit code and the cause of a failure."""
    logs = job.files / f"attempt-{number}"
    logs.mkdir(parents=True, exist_ok=True)
    nodes: RayNodes | None = None
    driver: Remote | None = None

    def started() -> dict[str, int]:
        processes = {**(nodes.processes if nodes else {}), **({"driver": driver} if driver else {})}
        return {name: process.pid for name, process in processes.items() if process.pid is not None}

    def note() -> None:
        if (found := started()) != record.processes:
            record.processes = found
            record.save(job)

    try:
        if left := end_leftovers(job):
            raise StallError(f"processes of an earlier attempt must end before another, got {'; '.join(left)}")
        record.processes = {}
        if shells := find_kind(job.kind).nodes(job):
            nodes = RayNodes(job, shells, logs=logs)
            nodes.form(lambda: bool(asked), note)
            if asked:
                return INTERRUPTED, "stopped while the nodes joined"
            _say(f"Ray on {len(shells)} nodes, head {nodes.address}")
        if number > 1:
            _set_aside(job.run_folder, number - 1)
        text = driver_script(
            job, attempt=number, address=nodes.address if nodes else None, env=nodes.env if nodes else None
        )
        head, shell = next(iter(shells.items()), (os.uname().nodename, _LOCAL))
        driver = Remote(head, shell, text, log=logs / f"{head}-driver.log")
        # Ray sends the signal of a job's stop to all of its processes: the command has that first one already.
        told = 1 if job.kind == "ray" and job.ships and not asked else 0
        return _watch(driver, nodes, asked, note, told=told)
    except (ArealLiteError, OSError) as error:  # the latter: ssh, srun or nsenter is not there
        return 1, str(error)
    finally:
        record.processes |= started()
        ended = {"driver": driver.end(job.name)} if driver else {}
        for name, problem in {**ended, **(nodes.end() if nodes else {})}.items():
            if problem is None:
                record.processes.pop(name, None)
            else:
                _say(f"not ended: {problem}")


def _watch(
    driver: Remote, nodes: RayNodes | None, asked: "_Asked", note: Callable[[], None], *, told: int
) -> tuple[int, str]:
    """Wait for the command; a node that is lost ends it, also where it does not notice by itself."""
    text, shown, handed_on, lost, lost_at = "", 0, told, "", 0.0
    while True:
        code = driver.code  # before its output, so that the last words are among it
        if driver.pid is not None or code is not None:
            text = driver.output()
            sys.stdout.write(text[shown:])
            sys.stdout.flush()
            shown = len(text)
        note()
        if code is not None:
            return (code or (1 if lost else 0)), lost or ("" if code in (0, INTERRUPTED) else _cause(text))
        if nodes is not None and not lost and (lost := nodes.lost() or ""):
            lost_at = time.monotonic()
            _say(lost)
        if lost and time.monotonic() > lost_at + _LOST_GRACE_S:
            return 1, lost
        if asked.count > handed_on:
            handed_on += 1
            driver.signal("INT")
        asked.wait(_POLL_S)


class _Asked:
    """How often the user, or the batch system, has asked to stop; a context manager that catches the signals."""

    def __init__(self) -> None:
        self.count = 0

    def __bool__(self) -> bool:
        return self.count > 0

    def __enter__(self) -> "_Asked":
        self._before = {number: signal.signal(number, self._handle) for number in (signal.SIGINT, *NOTICES)}
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def wait(self, seconds: float) -> None:
        """Sleep, but no longer than until somebody asks."""
        count, until = self.count, time.monotonic() + seconds
        while self.count == count and (left := until - time.monotonic()) > 0:
            time.sleep(min(left, _POLL_S))

    def _handle(self, number: int, frame: Any) -> None:
        # A notice may come to every process, and once more from who started this one.
        self.count = self.count + 1 if number == signal.SIGINT else max(self.count, 1)


def end_leftovers(job: Job) -> list[str]:
    """End what is left on the nodes, by the record: after a supervisor was killed, or a node was out of reach.

    Returns:
        What went wrong. Nodes that are no longer the job's are left to who has taken them away.
    """
    record = Attempts.read(job)
    shells = find_kind(job.kind).nodes(job)
    head = next(iter(shells.values()), _LOCAL)
    found = [
        end_process(node, shells.get(node, head), pid, job.name, "TERM" if node == "driver" else "INT")
        for node, pid in reversed(record.processes.items())
        if node in {"driver", *shells}
    ]
    return [problem for problem in found if problem]


def _reopened(job: Job) -> Attempts:
    """Read the record of a job that a batch system starts once more; an attempt without an end was killed with it."""
    record = Attempts.read(job)
    record.outcome = ""
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
    lines = [line.strip() for line in text.splitlines() if line.strip()]
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
    own = job.files / f"attempt-{number}"
    logs = RunFolder(job.run_folder).logs
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
