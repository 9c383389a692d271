"""The supervisor of a job: runs its command, retries after a failure, and leaves no process on any node.

A process of its own: `python -m areal_lite.launch.clusters.attempts RECORD`, on the head or on a machine that reaches
the nodes. For each attempt:

    end what an earlier attempt left → start Ray on every node (`ray_nodes.py`) → run the command on the head
        → wait until it ends, a node is lost, or a signal asks to stop → end the command, then Ray

Ctrl-C, and a batch system's notice (SIGTERM, SIGHUP, SIGUSR1), reach the command as an interrupt, so that the run
saves; a second Ctrl-C ends it at once.
"""

import contextlib
import itertools
import json
import os
import shlex
import shutil
import signal
import sys
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from areal_lite.actors.process import HOME
from areal_lite.config.offline import load_any_config
from areal_lite.config.reading import override, parse_section, read_yaml
from areal_lite.errors import ArealLiteError, StallError
from areal_lite.events import now
from areal_lite.launch.clusters.fit import recipe_of
from areal_lite.launch.clusters.job import Job, Status, find_kind
from areal_lite.launch.clusters.ray_nodes import LOCAL, RayNodes, start_script
from areal_lite.launch.clusters.remote import Remote, end_process, python_of, script
from areal_lite.launch.run.signals import NOTICES
from areal_lite.launch.run.view import Stream
from areal_lite.record.checkpoints import whole_checkpoints
from areal_lite.record.run_files import iterate_rows, read_summary, write_whole

INTERRUPTED = 130
_POLL_S = 0.25
_SAME_STEP = 3
_LONGEST_PAUSE_S = 600.0
_LOST_GRACE_S = 15.0
"""How long the command may take to report the loss of a node in its own words."""


class Attempt(BaseModel):
    """One run of the command."""

    began: float
    """Seconds since the epoch."""
    ended: float = 0.0
    code: int | None = None
    """Exit code of the command; None while it runs."""
    step: int = 0
    """Last trainer step in the run's metrics."""
    cause: str = ""
    """Why it failed."""


class Attempts(BaseModel):
    """The history of a job; `attempts.json` beside its log."""

    attempts: list[Attempt] = []
    state: str = "waiting for its nodes"
    """Where the job stands, one sentence."""
    code: int | None = None
    """Its exit code, once there will be no further attempt."""

    @classmethod
    def read(cls, job: Job) -> "Attempts":
        """Read a job's record; an empty one where there is none."""
        path = job.files / "attempts.json"
        return cls.model_validate_json(path.read_text()) if path.is_file() else cls()

    def save(self, job: Job) -> None:
        """Write it, whole or not at all."""
        with contextlib.suppress(OSError):  # a full disk does not end the job
            write_whole(job.files / "attempts.json", json.dumps(self.model_dump(), indent=2) + "\n")

    def status(self) -> Status:
        """Return where the job stands."""
        return Status(self.state, code=self.code)


def verdict(attempts: Sequence[Attempt], *, max_attempts: int) -> str | None:
    """Return why there is no further attempt, or None for one more; attempts that were stopped do not count.

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
        return f"stopped at step {last.step}" + (f": {last.cause}" if last.cause else "")
    failed = [one for one in attempts if one.code not in (None, INTERRUPTED)]  # None: its supervisor was killed
    if len(failed) >= _SAME_STEP and {one.step for one in failed[-_SAME_STEP:]} == {last.step}:
        return f"failed {_SAME_STEP} times at step {last.step}: {last.cause}"
    if len(failed) >= max_attempts:
        return f"failed at step {last.step}, attempt {len(failed)} of launch.max_attempts={max_attempts}: {last.cause}"
    return None


def driver_script(job: Job, *, attempt: int, env: Mapping[str, str] = {}) -> str:
    """Return the script of the command itself.

    Args:
        attempt: From 1; a later one resumes from the run folder's latest checkpoint, where there is one. Until the
            job has saved one itself, `run.resume_from` still counts.
        env: Of the Ray cluster that was started for it.
    """
    words, profile, folder = job.words, job.profile, job.run_folder
    joined = find_kind(job.kind).joined(job)
    settings = {}
    if profile.nodes > 1:
        ports = profile.port_range  # the first half is Ray's
        settings = {"run.network": profile.network, "run.ports": f"{ports[len(ports) // 2]}-{ports[-1]}"}
    if folder is not None and attempt > 1 and (saved := whole_checkpoints(folder / "checkpoints")):
        words = [word for word in words if not word.startswith(("run.dir=", "run.resume="))]
        began = next((one.began for one in Attempts.read(job).attempts), now())
        if saved[max(saved)].stat().st_mtime > began:
            words = [word for word in words if not word.startswith("run.resume_from=")]
        settings["run.resume"] = str(folder)
    elif folder is not None and not any(word.startswith(("run.dir=", "run.resume=")) for word in words):
        settings["run.dir"] = str(folder)
    given = {word.partition("=")[0] for word in words}
    more = [override(key, value) for key, value in settings.items() if value is not None and key not in given]
    command = [python_of(job), "-P", "-m", "areal_lite.launch.commands.main", *map(shlex.quote, [*words, *more])]
    if joined is not None:
        wait = [python_of(job), "-P", "-m", "areal_lite.launch.clusters.joined"]
        names = shlex.quote(",".join(profile.env))
        command = [*wait, str(profile.nodes), f"{profile.start_timeout_s:g}", names, *command]
    return script(job, env=joined or env, command=command)


def attempt_scripts(job: Job) -> dict[str, str]:
    """Return the scripts of a job's first attempt, for people: how each node is reached, and what runs there.

    Addresses, the token and, outside an allocation, names of nodes are known only later.
    """
    shells = find_kind(job.kind).nodes(job)
    if not shells:
        return {"run.sh": driver_script(job, attempt=1)}
    ports = job.profile.port_range[:500]
    env = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "made-for-each-attempt"}
    scripts = {"nodes": "".join(f"{shlex.join([*words, 'bash -s'])}\n" for words in shells.values())}
    scripts["head.sh"] = start_script(job, ports=ports, head="", peer="SECOND_HOST", env=env)
    if len(shells) > 1:
        scripts["worker.sh"] = start_script(job, ports=ports, head=f"HEAD:{ports[0]}", peer="HEAD", env=env)
    scripts["run.sh"] = driver_script(job, attempt=1, env={**env, "RAY_ADDRESS": f"HEAD:{ports[0]}"})
    return scripts


def supervise(job: Job) -> int:
    """Run a job to its end and return the exit code, which is 0 only when the command succeeded."""
    config = load_any_config(*recipe_of(job.words)[1:]).launch
    record = _reopened(job)
    job.files.mkdir(parents=True, exist_ok=True)  # a job whose files were shipped has no such folder yet
    (job.files / "pid").write_text(f"{os.getpid()}\n")
    with catch_signals() as asked:
        while True:
            number = len(record.attempts) + 1
            _print(f"attempt {number}")
            attempt = Attempt(began=now())
            record.attempts.append(attempt)
            record.state = f"attempt {number} has been running since {time.ctime()}"
            record.save(job)
            code, attempt.cause = _attempt(job, number, asked)
            attempt.step, attempt.ended = last_step(job.run_folder), now()
            attempt.code = INTERRUPTED if asked and code else code
            _gather(job, number)
            if outcome := verdict(record.attempts, max_attempts=config.max_attempts):
                break
            failures = sum(one.code != INTERRUPTED for one in record.attempts)
            pause = min(config.pause_s * 2 ** (failures - 1), _LONGEST_PAUSE_S)
            record.state = (
                f"attempt {number} failed at step {attempt.step}: {attempt.cause}; the next one in {pause:g} s"
            )
            record.save(job)
            _print(record.state)
            _wait(pause, asked)
            if asked:
                attempt.code = INTERRUPTED
                outcome = f"stopped before another attempt, at step {attempt.step}"
                break
    record.state, record.code = outcome, attempt.code
    record.save(job)
    _sum_up(job, record)
    _print(outcome)
    return attempt.code


def _attempt(job: Job, number: int, asked: Sequence[int]) -> tuple[int, str]:
    """Start Ray, run the command, end everything; returns the exit code and the cause of a failure."""
    logs = job.files / f"attempt-{number}"
    try:
        logs.mkdir(parents=True, exist_ok=True)
        if left := end_leftovers(job):
            raise StallError(f"processes of an earlier attempt must end before another, got {'; '.join(left)}")
        nodes = RayNodes(job, find_kind(job.kind).nodes(job), logs=logs)
        try:
            nodes.form(lambda: bool(asked))
            if asked:
                return INTERRUPTED, "stopped before the command started"
            if nodes.env:
                _print(f"Ray on {len(nodes.processes)} nodes, head {nodes.env['RAY_ADDRESS']}")
            if number > 1:
                _set_aside(job.run_folder, number - 1)
            script = driver_script(job, attempt=number, env=nodes.env)
            return _watch(nodes, nodes.run(script), asked)
        finally:
            for problem in nodes.end():
                _print(f"not ended: {problem}")
    except (ArealLiteError, OSError) as error:  # OSError: ssh or srun is missing, or the disk is full
        return 1, str(error)


def _watch(nodes: RayNodes, driver: Remote, asked: Sequence[int]) -> tuple[int, str]:
    """Wait for the command; a lost node ends it, even if the command does not notice by itself."""
    text, shown, forwarded = "", 0, 0
    lost, lost_at = "", 0.0
    while True:
        code = driver.code  # read before its output, so that none is missed
        if driver.pid is not None or code is not None:
            text = driver.output().rstrip("\ufffd")  # a half-written character
            print(text[shown:], end="", flush=True)
            shown = len(text)
        if code is not None:
            if lost:
                return code or 1, lost
            return code, "" if code in (0, INTERRUPTED) else _cause(text, code)
        if not lost and (lost := nodes.lost()):
            lost_at = time.monotonic()
            _print(lost)
        if lost and time.monotonic() > lost_at + _LOST_GRACE_S:
            return 1, lost
        if len(asked) > forwarded and driver.pid is not None:  # before that there is no process to signal
            # Ray signals the processes of a job itself: this is then a first Ctrl-C after a notice, and harmless.
            forwarded += 1
            driver.interrupt()
        _wait(_POLL_S, asked)


@contextlib.contextmanager
def catch_signals() -> Iterator[list[int]]:
    """Yield a list that grows by each Ctrl-C, and by a batch system's first notice."""
    asked: list[int] = []

    def handle(number: int, frame: Any) -> None:
        # A notice may come to every process, and once more from this one's parent.
        if number == signal.SIGINT or not asked:
            asked.append(number)

    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, *NOTICES)}
    signal.pthread_sigmask(signal.SIG_UNBLOCK, before)  # `launch` has blocked them
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _wait(seconds: float, asked: Sequence[int]) -> None:
    """Sleep until the time is over or a signal arrives."""
    count, until = len(asked), time.monotonic() + seconds
    while len(asked) == count and (left := until - time.monotonic()) > 0:
        time.sleep(min(left, _POLL_S))


def end_leftovers(job: Job) -> list[str]:
    """End processes that the logs name: left when a supervisor was killed, or a node was out of reach.

    Returns:
        What went wrong. A node that is no longer the job's belongs to the batch system.
    """
    shells = find_kind(job.kind).nodes(job)
    head, found = next(iter(shells.values()), LOCAL), []
    for log in sorted(job.files.glob("attempt-*/*.log"), key=lambda log: log.stem.endswith("-ray")):  # commands first
        node, _, what = log.stem.rpartition("-")
        if what == "driver" or node in shells:
            found.append(end_process(job, shells.get(node, head), log=log))
    return [problem for problem in found if problem]


def _reopened(job: Job) -> Attempts:
    """Read the record of a job, which a batch system may have restarted: an attempt without an end was killed."""
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
    last = deque(iterate_rows(folder / "metrics.jsonl") if folder else (), maxlen=1)
    return int(last[0]["step"]) if last else 0


def _cause(text: str, code: int) -> str:
    """Return what ended a command: a signal, or the line of its output that explains most, the last with an error."""
    if 128 < code < 255:  # 255 is ssh's own
        return f"ended by signal {code - 128}"
    lines = [bare for line in text.splitlines() if (bare := line.strip(" │")) and not bare.startswith(("╭", "╰"))]
    return next((line for line in reversed(lines) if "Error" in line), lines[-1] if lines else "it printed nothing")


def _set_aside(folder: Path | None, failed: int) -> None:
    """Make room for the next attempt: rename a folder without a checkpoint, else delete logs that were copied."""
    if folder is None or not (folder / "config.json").exists():
        return
    if not whole_checkpoints(folder / "checkpoints"):
        names = (f"{folder.name}.attempt-{number}" for number in itertools.count(failed))
        folder.rename(next(path for path in map(folder.with_name, names) if not path.exists()))
    for path in (folder / "logs").glob("*.log"):
        path.unlink()


def _gather(job: Job, number: int) -> None:
    """Copy an attempt's logs into the run folder: each node's, and each actor's with its node in the name."""
    if job.run_folder is None or not job.run_folder.is_dir():
        return
    own, logs = job.files / f"attempt-{number}", job.run_folder / "logs"
    kept = logs / job.name / own.name
    with contextlib.suppress(OSError):  # a full disk does not end the job
        own.mkdir(parents=True, exist_ok=True)  # of one that was killed at once
        shutil.copytree(own, kept, dirs_exist_ok=True)
        for path in logs.glob("*.log"):
            with path.open(errors="replace") as file:
                node = HOME.search(file.readline())
            shutil.copy2(path, kept / "-".join([*(node.groups() if node else ()), path.name]))


def _sum_up(job: Job, record: Attempts) -> None:
    """Write GPU hours into the run's summary."""
    folder = job.run_folder or job.files
    hours = sum(max(one.ended - one.began, 0.0) for one in record.attempts) / 3600  # one killed has no end
    gpu_hours = hours * job.profile.nodes * job.profile.gpus_per_node
    figures = {"attempts": len(record.attempts), "gpu_hours": gpu_hours}
    with contextlib.suppress(OSError, ValueError):
        write_whole(folder / "summary.json", json.dumps(read_summary(folder) | figures, indent=2) + "\n")


def _print(text: str) -> None:
    print(f"areal-lite launch: {text}", flush=True)


if __name__ == "__main__":
    sys.stdout = Stream(sys.stdout)
    sys.exit(supervise(parse_section(read_yaml(Path(sys.argv[1]), holding="a job"), Job)))
