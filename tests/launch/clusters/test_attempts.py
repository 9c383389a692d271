"""The supervisor with shell scripts in the place of Ray and the run: what it resumes, ends, records and returns."""

import contextlib
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from launch_builders import make_job, make_profile
from user_run import alive, wait_until

from areal_lite.errors import ConfigError, StallError
from areal_lite.launch.clusters import attempts, joined, ray_nodes, remote
from areal_lite.launch.clusters.attempts import Attempt, Attempts, catch_signals, end_leftovers, supervise, verdict
from areal_lite.launch.clusters.job import Job
from areal_lite.launch.clusters.profile import Profile
from areal_lite.launch.clusters.ray_nodes import RayNodes
from areal_lite.launch.clusters.remote import Remote, end_process, script
from areal_lite.launch.clusters.supervised import Local

LOCAL = ("bash", "-c")
SSH = {"hosts": ["one", "two"], "shell": "env NODE={host}"}
READY = "echo 'areal-lite address 10.0.0.1'; echo 'Ray runtime started.'"


def tried(code: int, step: int = 0) -> Attempt:
    return Attempt(began=0, ended=1, code=code, step=step, cause="it broke")


@pytest.mark.parametrize(
    ("made", "allowed", "words"),
    [
        ([tried(0)], 1, "done after 1 attempt"),
        ([Attempt(began=0, ended=1, code=130, step=4)], 5, "stopped at step 4"),
        ([tried(130, 4)], 5, "stopped at step 4: it broke"),
        ([tried(1, 3)], 1, "failed at step 3, attempt 1 of launch.max_attempts=1: it broke"),
        ([tried(1, 3), *[tried(1, 4)] * 3], 9, "failed 3 times at step 4: it broke"),
        ([tried(2)], 2, None),
        ([tried(130, 2), tried(1, 3)], 2, None),
        ([tried(1, 3), tried(130, 3), tried(1, 3)], 9, None),
    ],
)
def test_whether_there_is_another_attempt(made: Sequence[Attempt], allowed: int, words: str | None) -> None:
    """Seen failing with the same step counted over all attempts instead of the last three."""
    assert verdict(made, max_attempts=allowed) == words


def job_of(
    folder: Path,
    command: str,
    monkeypatch: pytest.MonkeyPatch,
    *,
    kind: str = "local",
    words: str = "",
    named: str = "train arith_cpu",
    **changed: Any,
) -> Job:
    """Record a job whose command is a line of shell; `$ATTEMPT` counts."""

    def stand_in(job: Job, *, attempt: int, **_: object) -> str:
        return script(job, command=["bash", "-c", shlex.quote(f"ATTEMPT={attempt}; {command}")])

    monkeypatch.setattr(attempts, "driver_script", stand_in)
    monkeypatch.setattr(attempts, "_POLL_S", 0.02)
    own = {"nodes": 2, "ssh": SSH} if kind == "ssh" else {"gpus_per_node": 8}
    profile = Profile.model_validate({"start_timeout_s": 120, **own, **changed})
    settings = words or "launch.max_attempts=3 launch.pause_s=0.01"
    return make_job(kind, f"{named} {settings}", folder=str(folder), profile=profile).save()


@pytest.mark.parametrize("named", ["train arith_cpu", "eval some/model --recipe arith_cpu"])
def test_every_command_is_tried_again(named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen failing for `eval`, and where another run's folder had the name for the one that is set aside."""
    for name in ("run-1", "run-1.attempt-1"):
        (tmp_path / "runs" / name).mkdir(parents=True)
        (tmp_path / "runs" / name / "config.json").touch()
    assert supervise(job_of(tmp_path, "[ $ATTEMPT = 2 ]", monkeypatch, named=named)) == 0


def test_a_command_that_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen failing with the code 247, and with the last step as the cause."""
    job = job_of(tmp_path, "echo step 9; kill -9 $$", monkeypatch, words="launch.max_attempts=1")
    assert supervise(job) == 137
    assert Attempts.read(job).attempts[0].cause == "ended by signal 9"


STEP = 'mkdir -p runs/run-1/logs; echo "{\\"step\\": $ATTEMPT}" >> runs/run-1/metrics.jsonl; '


def test_it_goes_on_until_the_command_is_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    line = STEP + "echo '{}' > runs/run-1/summary.json; sleep 0.2; echo TrainerError: rank $ATTEMPT; [ $ATTEMPT = 3 ]"
    job = job_of(tmp_path, line, monkeypatch)
    assert supervise(job) == 0
    record = Attempts.read(job)
    assert [(one.code, one.step, one.cause) for one in record.attempts] == [
        (1, 1, "TrainerError: rank 1"),
        (1, 2, "TrainerError: rank 2"),
        (0, 3, ""),
    ]
    assert record.status().code == 0
    summary = json.loads((tmp_path / "runs/run-1/summary.json").read_text())
    wall = sum(one.ended - one.began for one in record.attempts)
    assert summary["gpu_hours"] == pytest.approx(wall * 8 / 3600)
    assert len(list((tmp_path / "runs/run-1/logs").glob("run-1/attempt-*/*-driver.log"))) == 3
    assert "failed at step 1: TrainerError: rank 1; the next one in 0.01 s" in capfd.readouterr().out


def test_a_job_that_is_started_once_more_goes_on_with_its_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Slurm does after a requeue. Seen failing with GPU hours below zero, and with the old outcome in the status."""
    job = job_of(tmp_path, STEP + "echo '{}' > runs/run-1/summary.json", monkeypatch, words="launch.max_attempts=1")
    Attempts(attempts=[Attempt(began=time.time() - 9)], state="stopped at step 0", code=130).save(job)
    assert supervise(job) == 0
    record = Attempts.read(job)
    assert [one.code for one in record.attempts] == [130, 0]
    assert record.state == "done after 2 attempts"
    assert json.loads((tmp_path / "runs/run-1/summary.json").read_text())["gpu_hours"] > 9 * 8 / 3600 - 1e-6


def test_a_full_disk_does_not_end_a_job(tmp_path: Path) -> None:
    """Nor does a log that cannot be written. Seen failing with the run ended at the first line of output."""
    (tmp_path / "python").write_text("#!/bin/sh\necho step 1\n")
    (tmp_path / "python").chmod(0o755)
    profile = Profile(enter=f"export PATH={tmp_path}:$PATH")
    job = make_job("local", "train arith_cpu", folder=str(tmp_path), profile=profile).save()
    for path in (
        job.files / "attempts.json",
        tmp_path / "runs/run-1/logs/run-1/attempt-1" / f"{os.uname().nodename}-driver.log",
    ):
        path.mkdir(parents=True)
    command = [sys.executable, "-m", "areal_lite.launch.clusters.attempts", str(job.record)]
    with open("/dev/full", "w") as full:
        assert subprocess.run(command, stdout=full, check=False).returncode == 0


def interrupt_when(path: Path) -> threading.Thread:
    def wait() -> None:
        wait_until(path.exists, str(path))
        os.kill(os.getpid(), signal.SIGINT)
        path.with_name("go").touch()

    thread = threading.Thread(target=wait)
    thread.start()
    return thread


@pytest.mark.parametrize(
    ("enter", "line"), [("", "touch begun; "), ("touch begun; sleep 1", "")], ids=["in the command", "before it"]
)
def test_ctrl_c_is_handed_on_and_there_is_no_other_attempt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, enter: str, line: str
) -> None:
    """Seen failing with SIGTERM, which the command does not survive to save, and with a stop before it that is lost."""
    trap = "trap 'echo saved > saved; exit 130' INT; "
    job = job_of(tmp_path, f"{trap}{line}for i in $(seq 300); do sleep 0.1; done", monkeypatch, enter=enter)
    thread = interrupt_when(tmp_path / "begun")
    assert supervise(job) == 130
    thread.join()
    assert (tmp_path / "saved").exists()
    assert Attempts.read(job).status().words == "stopped at step 0"


def test_a_notice_that_comes_twice_does_not_end_the_run_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor does a second `--stop`; and Slurm tells every process, and its script this one.

    Seen failing with each counted: the second cut the save; and with a `--stop` that was a Ctrl-C.
    """
    me = f"{os.getpid()}@{psutil.Process().create_time():.2f}@{os.uname().nodename}"
    job = job_of(tmp_path, "true", monkeypatch).model_copy(update={"id": me})
    with catch_signals() as asked:
        Local().stop(job)
        Local().stop(job)
        assert len(asked) == 1
        os.kill(os.getpid(), signal.SIGINT)
        assert len(asked) == 2


@pytest.mark.slow
def test_what_could_not_be_ended_is_ended_before_the_next_attempt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A node is out of reach when an attempt ends. Seen failing with its process forgotten, and left running."""
    shell = tmp_path / "shell"
    shell.write_text('#!/bin/bash\n[ "$1" = two -a -e off ] && { echo no route >&2; exit 255; }\nshift; exec "$@"\n')
    shell.chmod(0o755)
    fake_ray(monkeypatch, worker=f"{READY}; sleep 60")
    monkeypatch.chdir(tmp_path)
    words, ssh = "launch.max_attempts=2 launch.pause_s=0", SSH | {"shell": f"{shell} {{host}}"}
    job = job_of(tmp_path, "touch off; exit 1", monkeypatch, kind="ssh", words=words, ssh=ssh)
    assert supervise(job) == 1
    record = Attempts.read(job)
    (log,) = job.files.glob("attempt-*/two-ray.log")
    assert record.attempts[1].cause == "processes of an earlier attempt must end before another, got two: no route"
    (tmp_path / "off").unlink()
    assert end_leftovers(job) == []
    wait_until(lambda: not alive(pid_in(log)), "end of the process left behind")


def test_logs_of_a_killed_supervisor_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen failing: the next attempt made room by deleting them."""
    job = job_of(tmp_path, "true", monkeypatch, words="launch.max_attempts=1")
    folder = tmp_path / "runs" / "run-1"
    (folder / "checkpoints" / "step-000001").mkdir(parents=True)
    (folder / "logs").mkdir()
    for path in ("config.json", "checkpoints/step-000001/meta.json", "logs/trainer-0.log"):
        (folder / path).write_text("{}\n")
    Attempts(attempts=[Attempt(began=time.time())]).save(job)
    assert supervise(job) == 0
    assert (folder / "logs" / "run-1" / "attempt-1" / "trainer-0.log").exists()
    assert not (folder / "logs" / "trainer-0.log").exists()


def test_a_supervisor_of_another_host_is_left_to_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen failing: it was said to be gone, and what it had started was ended."""
    job = job_of(tmp_path, "true", monkeypatch)
    began, here = psutil.Process().create_time(), os.uname().nodename
    Attempts(attempts=[Attempt(began=0)]).save(job)
    elsewhere = job.model_copy(update={"id": f"{os.getpid()}@{began:.2f}@elsewhere"})
    status = Local().status(elsewhere)
    assert status.code is None
    assert status.words.endswith("run this on elsewhere")
    with pytest.raises(ConfigError, match="do it on elsewhere"):
        Local().stop(elsewhere)
    after_a_set_clock = job.model_copy(update={"id": f"{os.getpid()}@{began + 2:.2f}@{here}"})
    assert Local().status(after_a_set_clock).code is None
    somebody_else_s = job.model_copy(update={"id": f"{os.getpid()}@{began - 60:.2f}@{here}"})
    assert "died" in Local().status(somebody_else_s).words


def test_a_command_on_a_ray_cluster_waits_for_its_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a list in the place of Ray's. Seen failing with a node that has lost its power, and is counted."""
    ray = {"address": "head:6379"}
    said = attempts.driver_script(make_job("ray", profile=make_profile(ray=ray)), attempt=1)
    assert (
        "exec python -P -m areal_lite.launch.clusters.joined 4 300 HF_HUB_OFFLINE python -P -m areal_lite.launch"
        in said
    )
    up, down = socket.create_server(("127.0.0.1", 0)), socket.socket()
    down.bind(("127.0.0.1", 0))
    node = {"Alive": True, "NodeManagerAddress": "127.0.0.1", "NodeManagerPort": up.getsockname()[1]}
    known = [node | {"NodeManagerHostname": host} for host in "abcd"]
    silent = node | {"NodeManagerHostname": "lost", "NodeManagerPort": down.getsockname()[1]}
    looks, became = iter([known[:1], known[:3], [*known, silent], known]), []
    monkeypatch.setenv("RAY_JOB_CONFIG_JSON_ENV_VAR", '{"metadata": {"a": "b"}}')
    monkeypatch.setenv("TOKEN", "val 7")
    fake = SimpleNamespace(init=lambda **_: None, nodes=lambda: next(looks), shutdown=lambda: None)
    fake.get_runtime_context = lambda: SimpleNamespace(gcs_address="head:6379")
    monkeypatch.setitem(sys.modules, "ray", fake)
    monkeypatch.setattr(os, "execvp", lambda file, words: became.append((file, words)))
    monkeypatch.setattr(joined, "_POLL_S", 0.01)
    joined.main("4", "60", "TOKEN", "train", "arith_cpu")
    assert became == [("train", ("train", "arith_cpu"))]
    settings = {"metadata": {"a": "b"}, "runtime_env": {"env_vars": {"TOKEN": "val 7"}}}
    assert json.loads(os.environ["RAY_JOB_CONFIG_JSON_ENV_VAR"]) == settings
    assert list(looks) == []
    fake.nodes = lambda: [*known[:3], silent]
    sentence = (
        r"nodes=4 within .*=0.05, got 3 that answer, no answer from lost .*`ray start --address=head:6379` on the"
    )
    with up, down, pytest.raises(SystemExit, match=sentence):
        joined.main("4", "0.05", "", "train")


def fake_ray(monkeypatch: pytest.MonkeyPatch, *, worker: str) -> None:
    """Shell lines in the place of `ray start`; a worker's is `worker`."""

    def stand_in(job: Job, *, head: str, **_: object) -> str:
        line = worker if head else f"{READY}; sleep 60"
        return script(job, command=["bash", "-c", shlex.quote(line)])

    monkeypatch.setattr(ray_nodes, "start_script", stand_in)
    monkeypatch.setattr(remote, "_GRACE_S", 1)  # what sleeps in place of the command hears no SIGTERM, as a run does


def pid_in(log: Path) -> int:
    (pid,) = re.findall(r"^areal-lite pid (\d+)$", log.read_text(), re.MULTILINE)
    return int(pid)


@pytest.mark.parametrize(("slow_starts", "code"), [(2, 0), (3, 1)])
def test_ray_that_is_too_slow_is_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], slow_starts: int, code: int
) -> None:
    """Ray's limits are its own. Seen failing with an attempt that ended, on a busy machine."""
    slow = "echo 'Exception: The current node timed out during startup.'; exit 1"
    fake_ray(
        monkeypatch,
        worker=f"echo >> starts; [ $(wc -l < starts) -gt {slow_starts} ] || {{ {slow}; }}; {READY}; sleep 60",
    )
    job = job_of(tmp_path, "true", monkeypatch, kind="ssh", words="launch.max_attempts=1")
    assert supervise(job) == code
    assert capsys.readouterr().out.count("two is too busy, Ray was not ready within 30 s; retrying") == 2
    (log,) = job.files.glob("attempt-1/two-ray.log")
    pids = re.findall(r"^areal-lite pid (\d+)$", log.read_text(), re.MULTILINE)
    assert len(pids) == 3
    assert not any(alive(int(pid)) for pid in pids)


def test_of_two_starts_the_last_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen failing with the first process id of the log."""
    job = job_of(tmp_path, "true", monkeypatch)
    process = subprocess.Popen(["sleep", "60"], env=os.environ | {"AREAL_LITE_JOB": job.name})
    log = tmp_path / "two-ray.log"
    log.write_text(f"areal-lite pid 1\nareal-lite pid {process.pid}\n")
    try:
        assert remote.end_process(job, ray_nodes.LOCAL, log=log) is None
        assert process.wait(timeout=20) == -signal.SIGINT
    finally:
        process.kill()


def test_what_a_failed_start_of_ray_leaves_is_ended(tmp_path: Path) -> None:
    """Stands in for Ray: a raylet that has ended, whose agent would hold a port of the next start.

    Seen failing with children alone ended.
    """
    script = """
import runpy, subprocess
import ray.scripts.scripts

def main():
    subprocess.run(["bash", "-c", "sleep 600 >sleeps 2>&1 & echo $! >agent"], check=True)
    raise SystemExit("The current node timed out during startup")

ray.scripts.scripts.main = main
runpy.run_module("areal_lite.launch.clusters.ray_nodes", run_name="__main__")
"""
    ended = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert "timed out during startup" in ended.stderr
    agent = int((tmp_path / "agent").read_text())
    try:
        wait_until(lambda: not alive(agent), "end of the agent")
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(agent, signal.SIGKILL)


def test_a_node_that_is_lost_ends_the_job_and_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command itself hangs. Seen failing without the look at the nodes, and with the nodes left to themselves."""
    fake_ray(monkeypatch, worker=f"{READY}; until [ -e go ]; do sleep 0.1; done; echo raylet died; exit 3")
    monkeypatch.setattr(attempts, "_LOST_GRACE_S", 0.2)
    job = job_of(tmp_path, "touch go; exec sleep 60", monkeypatch, kind="ssh", words="launch.max_attempts=1")
    assert supervise(job) == 1
    (made,) = Attempts.read(job).attempts
    assert made.cause.startswith("node two was lost: its Ray ended")
    assert "raylet died" in made.cause
    logs = list(job.files.glob("attempt-1/*.log"))
    assert {log.stem for log in logs} == {"one-ray", "two-ray", "one-driver"}
    assert not any(alive(pid_in(log)) for log in logs)


REFUSED = "ssh: connect to host two port 22: Connection refused"


@pytest.mark.parametrize(
    ("worker", "up", "message"),
    [
        ("echo bad token; exit 1", "true", "on two it ended: .*bad token"),
        (
            READY,
            "false",
            rf"start_timeout_s=60, missing: two \({REFUSED}.*Fix: see whether it answers, `bash .* hostname`",
        ),
        (
            "echo 'areal_lite.errors.ConfigError: port 7'; echo more; exit 1",
            "true",
            "it ended: ConfigError: port 7; log",
        ),
        (f"{READY}; sleep 60", "[ -e up ]", None),
    ],
)
def test_a_node_that_does_not_join_is_named_and_one_that_is_late_is_tried_again(
    worker: str, up: str, message: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seen failing with an attempt that ends at the first connection that a booting host refuses."""
    fake_ray(monkeypatch, worker=worker)
    monkeypatch.setattr(ray_nodes, "_RETRY_S", 0.1)
    monkeypatch.chdir(tmp_path)
    job = job_of(tmp_path, "true", monkeypatch, kind="ssh", start_timeout_s=60.0)
    ssh = ("bash", "-c", f'{up} || {{ echo "{REFUSED}"; touch up; exit 255; }}; exec "$@"', "ssh")
    if up == "false":  # no time is left once the host has refused
        late = SimpleNamespace(monotonic=lambda: time.monotonic() + 60 * Path("up").exists(), sleep=time.sleep)
        monkeypatch.setattr(ray_nodes, "time", late)
    nodes = RayNodes(job, {"one": LOCAL, "two": ssh}, logs=tmp_path)
    try:
        if message:
            with pytest.raises(StallError, match=message):
                nodes.form(lambda: False)
        else:
            nodes.form(lambda: False)
            assert nodes.lost() == ""
    finally:
        assert nodes.end() == []
    assert all(process.code is not None for process in nodes.processes.values())


def test_only_processes_of_the_job_are_ended(tmp_path: Path) -> None:
    """Seen failing without the look at the environment: a process id may be another's by now."""
    stranger = subprocess.Popen(["sleep", "60"])
    try:
        (log := tmp_path / "here-driver.log").write_text(f"areal-lite pid {stranger.pid}\n")
        assert end_process(make_job(), LOCAL, log=log) is None
        assert stranger.poll() is None
    finally:
        stranger.kill()
        stranger.wait()


def test_the_token_is_in_no_list_of_processes(tmp_path: Path) -> None:
    job = make_job(folder=str(tmp_path), profile=Profile())
    text = script(job, command=["sleep", "60"], env={"RAY_AUTH_TOKEN": "secret-7"})
    held = Remote(job, LOCAL, text, log=tmp_path / "here-ray.log")
    try:
        while held.pid is None:
            assert held.code is None
            time.sleep(0.02)
        lines = [Path(path).read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline")]
        assert not any(b"secret-7" in line for line in lines)
    finally:
        assert held.end() is None


GO_BACK = "run.resume={folder} run.resume_from=step-2"


@pytest.mark.parametrize(
    ("attempt", "saved", "began", "words", "last"),
    [
        (1, False, 0.0, "", "run.dir={folder}"),
        (2, True, 0.0, "", "run.resume={folder}"),
        (2, True, 0.0, "run.dir={folder}", "run.resume={folder}"),
        (1, True, 0.0, GO_BACK, GO_BACK),
        (2, True, 0.0, GO_BACK, "run.resume={folder}"),
        (2, True, 4e9, GO_BACK, "run.resume_from=step-2 run.resume={folder}"),
    ],
)
def test_a_later_attempt_goes_on_where_there_is_a_checkpoint(
    attempt: int, saved: bool, began: float, words: str, last: str, tmp_path: Path
) -> None:
    """Seen failing with `resume_from` forgotten before the job itself had saved anything: it resumed elsewhere."""
    folder = tmp_path / "runs" / "run-1"
    if saved:
        (folder / "checkpoints" / "step-000002").mkdir(parents=True)
        (folder / "checkpoints" / "step-000002" / "meta.json").touch()
    text = f"train arith_cpu {words.format(folder=folder)}"
    job = make_job("local", text, folder=str(tmp_path), profile=Profile()).save()
    Attempts(attempts=[Attempt(began=began)]).save(job)
    said = attempts.driver_script(job, attempt=attempt)
    given = [word for word in shlex.split(said) if word.startswith(("run.dir=", "run.resume"))]
    assert " ".join(given) == last.format(folder=folder)
