"""What users and machines do to a run: Ctrl-C, killed processes, hung ones. Each run is a command at a terminal.

Whatever happens, the run ends or goes on as it says, keeps its books (I2), never hangs (I6), and leaves no process.
"""

import contextlib
import math
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from loop_builders import (
    GROUPS,
    PARITY,
    check_books,
    loop_config,
    saved_step,
    trained_groups,
    write_prompts,
    write_recipe,
)
from places import SUPPORT
from train_builders import save_tiny_model
from user_run import UserRun, alive

from areal_lite.record.checkpoints import damage
from areal_lite.record.run_files import read_summary

pytestmark = [pytest.mark.loop, pytest.mark.usefixtures("adopted_orphans")]

TOTAL = 1000


def start(loop_folder: Path, name: str, *, run: dict[str, Any], **sections: dict[str, Any]) -> UserRun:
    """Type `areal-lite train recipe.yaml run.dir=...`."""
    settings = {"log_samples": GROUPS, **run}
    config = loop_config(loop_folder, run=settings, weights={"timeout_s": 10, "parity_every": 0}, **sections)
    recipe, folder = write_recipe(loop_folder / f"{name}.yaml", config), loop_folder / name
    return UserRun(["areal-lite", "train", recipe.name, f"run.dir={folder.name}"], run_folder=folder)


def typed(command: str, *, folder: Path) -> UserRun:
    """Type a line into a shell."""
    return UserRun(["bash", "-c", command], run_folder=folder)


def scale(run: UserRun, *, rollout: int) -> None:
    # No `UserRun`, which would end all that starts meanwhile: a copied worker of the run is no child of the run.
    words = [Path(sys.executable).with_name("areal-lite"), "scale", run.folder.path, f"rollout={rollout}"]
    subprocess.run([*words, "--timeout", "300"], check=True)


def steps(run: UserRun) -> list[int]:
    return [row["step"] for row in run.folder.read("metrics.jsonl")]


def lost(run: UserRun) -> dict[str, dict[str, Any]]:
    return {event["worker"]: event for event in run.folder.read("events.jsonl") if event["kind"] == "lost"}


def trained_since_it_is_back(run: UserRun, worker: str) -> set[str]:
    """Groups that a worker has generated since it came back, and that are trained."""
    events = run.folder.read("events.jsonl")
    rejoined = (event["time"] for event in events if event["kind"] == "rejoined" and event["worker"] == worker)
    back = max(rejoined, default=math.inf)
    groups = [event for event in events if event["kind"] == "group" and event["lane"] == worker]
    return {event["group"] for event in groups if event["start"] >= back} & set(trained_groups(run.folder))


@pytest.fixture(scope="module")
def interrupted(loop_folder: Path, adopted_orphans: None) -> UserRun:
    """A run of many steps, after Ctrl-C in its first steps."""
    settings = {"steps": TOTAL, "stall_timeout_s": 20, "report": True}
    slow = {"function": f"{SUPPORT / 'loop_verifiers.py'}:takes_its_time", "processes": 2}  # others need the processors
    with start(loop_folder, "interrupted", run=settings, verifier=slow) as run:
        run.wait_for_steps(3)
        run.press_ctrl_c()
        run.ends_with(130)
    return run


def test_ctrl_c_finishes_the_step_and_saves(interrupted: UserRun) -> None:
    """The terminal sends SIGINT to the whole process group: only the controller may act on it.

    Seen failing with an interrupted run that counts as done (exit code 0, and no way to go on is printed), and with one
    that leaves no report.
    """
    stopped_at = len(steps(interrupted))
    assert 3 <= stopped_at < TOTAL
    assert saved_step(interrupted.folder) == stopped_at
    summary = read_summary(interrupted.folder.path)
    assert (summary["status"], summary["stopped_by"]) == ("interrupted", "Ctrl-C")
    check_books(interrupted.folder, total=stopped_at)
    assert re.search(
        r"reward_last.*\nreport: .*report.html\nstopped. Resume with:", interrupted.output, flags=re.DOTALL
    )
    assert "interrupted" in (interrupted.folder.path / "report.html").read_text()


@pytest.mark.usefixtures("copied")
def test_the_printed_command_goes_on_and_lost_workers_come_back(interrupted: UserRun) -> None:
    """Two rollout workers are added. Of the three one is killed, the engine of another hangs; the verifier is killed.

    Each is started beside the run. A rollout worker joins with the trainer's weights, and what it makes is trained.
    Then queue and trainer are killed: the run goes back to its checkpoint with new ones, and keeps the workers. One is
    dismissed, and the only verifier hangs, for which the run does not go back. Then Ctrl-C, while Ray's raylet hangs.

    Seen failing with a run that ends with a `StallError`, with one that never ends, as Ray waits for the raylet, and
    with a negative speed after the restart.
    """
    (command,) = re.findall(r"^\s*(areal-lite resume .*)$", interrupted.output, flags=re.MULTILINE)
    resumed_at = len(steps(interrupted))
    changes = "run.steps=5000 weights.parity_every=1 run.checkpoint_every=1"
    with typed(f"{command.rstrip()} {changes}", folder=interrupted.folder.path) as run:
        run.wait_for_steps(resumed_at + 1)
        scale(run, rollout=3)
        for name in ("rollout/1", "rollout/2"):
            run.wait_until(lambda name=name: f"{name} has joined" in run.output, f"start of {name}")
        killed, verifiers = run.tree(run.actor("rollout/0")), run.tree(run.actor("verifier/0"))
        assert min(len(killed), len(verifiers)) > 1
        for pid in [*killed, verifiers[0]]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        run.wait_until(lambda: {"rollout/0", "verifier/0"} <= lost(run).keys(), "notice of those that were killed")
        hung = run.tree(run.actor("rollout/1"))
        os.kill(run.engine_core("rollout/1"), signal.SIGSTOP)
        run.wait_until(lambda: "rollout/1" in lost(run), "notice of rollout/1")
        run.wait_until(lambda: not any(map(alive, [*killed, *verifiers, *hung])), "end of the lost workers' processes")
        for name in ("rollout/0", "rollout/1", "verifier/0"):
            run.wait_until(lambda name=name: f"{name} is back" in run.output, f"return of {name}")
        for name in ("rollout/0", "rollout/1"):
            run.wait_until(lambda name=name: trained_since_it_is_back(run, name), f"trained groups of {name}")
        before, workers = len(steps(run)), [run.actor(name) for name in ("rollout/0", "rollout/2", "verifier/0")]
        # Both are found first: once one is dead, the run may end the other before it is looked for.
        for pid in [run.actor(name) for name in ("trainer/0", "queue")]:
            os.kill(pid, signal.SIGKILL)
        run.wait_until(lambda: "back at step" in run.output, "new queue and trainer")
        run.wait_for_steps(before + 3)
        assert [run.actor(name) for name in ("rollout/0", "rollout/2", "verifier/0")] == workers
        dismissed = run.tree(run.actor("rollout/2"))
        scale(run, rollout=2)
        run.wait_until(lambda: "starting none, dismissing rollout/2" in run.output, "word on rollout/2")
        run.wait_until(lambda: not any(map(alive, dismissed)), "end of rollout/2")
        stopped, times = run.actor("verifier/0"), run.output.count("verifier/0 is back")
        os.kill(stopped, signal.SIGSTOP)
        run.wait_until(lambda: run.output.count("verifier/0 is back") > times, "another verifier")
        run.wait_until(lambda: not alive(stopped), "end of the hung verifier")
        assert "its process hangs: no report for" in lost(run)["verifier/0"]["reason"]
        run.wait_for_steps(len(steps(run)) + 2)
        (raylet,) = [pid for pid in run.processes() if psutil.Process(pid).name() == "raylet"]
        os.kill(raylet, signal.SIGSTOP)
        run.press_ctrl_c()
        run.ends_with(130)
        assert saved_step(run.folder) == len(steps(run))
        assert lost(run).keys() == {"rollout/0", "rollout/1", "verifier/0"}
        assert all(f"{name} died" in run.output for name in lost(run))
        rows = run.folder.read("metrics.jsonl")
        assert max(row["parity_max_abs_logprob_diff"] for row in rows[resumed_at:]) < PARITY
        assert min(row["gen_tokens_per_s"] for row in rows) >= 0, "engines reset their counts at each start"
        assert any("restarting" in row["workers"] for row in rows[resumed_at:])
        assert "restarting" not in rows[-1]["workers"]
        (restarted,) = [event for event in run.folder.read("events.jsonl") if event["kind"] == "restarted"]
        assert restarted["step"] >= before - 1, "only the step under way is lost"
        check_books(run.folder, total=len(rows))


def test_ctrl_c_over_and_over_while_engines_start_ends_at_once(loop_folder: Path) -> None:
    """Once does too (test_signals.py); the next come as what was started is ended, and as Ray is left.

    Seen failing with exit code 1; and with Ray's agents left behind.
    """
    with start(loop_folder, "early", run={"steps": 1000}) as run:
        run.wait_until(lambda: "queue is ready" in run.output, "a first actor")
        while run.is_running:
            run.press_ctrl_c()
            time.sleep(0.2)
        run.ends_with(130)
        assert "Traceback" not in run.output


@pytest.mark.usefixtures("copied")
def test_a_dead_trainer_rank_ends_the_run_by_name(loop_folder: Path) -> None:
    """Rank 1 is killed; rank 0 fails too, and must not be blamed. They work on the same rows, each with half the heads.

    Steps are saved beside the next ones, as fast as the disk takes them: the last that was saved whole stays.

    Seen failing without the look for a dead rank in `Ranks.blame`.
    """
    settings = {"steps": 1000, "checkpoint_every": 1, "checkpoint_beside": True, "max_restarts": 0}
    (folder := loop_folder / "two-heads").mkdir()
    model = {"path": save_tiny_model(folder, max_context=128, num_key_value_heads=2)}
    with start(loop_folder, "rank", run=settings, model=model, trainer={"ranks": 2, "mesh": {"tensor": 2}}) as run:
        run.wait_for_steps(4)
        run.wait_until(lambda: bool(list(run.folder.checkpoints.glob("step-*"))), "a checkpoint")
        os.kill(run.actor("trainer/1"), signal.SIGKILL)
        run.ends_with(1)
        assert "RankDied: trainer/1 died" in run.output
        assert "logs/trainer-1.log" in run.output
        assert f"areal-lite resume {run.folder.path}" in run.output
        assert saved_step(run.folder) >= 1
        assert not damage(run.folder.newest_checkpoint())
        assert read_summary(run.folder.path)["status"].startswith("failed: RankDied: trainer/1 died")
        assert "Traceback" not in run.output


@pytest.mark.usefixtures("copied")
def test_a_last_worker_killed_or_hung_and_a_notice_to_all_leave_the_run_saved(loop_folder: Path) -> None:
    """The only worker's engine is killed, and not started again: the run saves, and ends.

    Resumed, it hangs instead: the run says who, saves, begins again at this step, and waits for another engine.

    The engine is stopped while a batch is waited for: in synchronous training no hand-over is under way once a prompt
    has begun, and the workflow holds that prompt up. In the end every process gets SIGTERM at once, as by `scancel`,
    which would end Ray's processes before anything is saved.

    Seen failing without the save in `Controller._save_what_is_whole`, where vLLM's start lets SIGTERM through to the
    engine, and where the next signal cuts a rescue short.
    """
    rollout = {"slots": 1, "workflow": f"{SUPPORT / 'loop_workflows.py'}:held_up", "turn_timeout_s": 5}
    data = {"path": str(write_prompts(loop_folder / "held_up.jsonl", 200, gate=str(gate := loop_folder / "gate")))}
    settings = {"steps": 1000, "stall_timeout_s": 15, "max_worker_restarts": 0}
    more: dict[str, Any] = {"rollout": rollout, "data": data, "queue": {"max_staleness": 0}}
    with start(loop_folder, "last", run=settings, **more) as run:
        run.wait_for_steps(2)
        os.kill(run.engine_core("rollout/0"), signal.SIGKILL)
        run.ends_with(1)
        assert "HandoverError: no rollout worker is left; the last one, rollout/0" in run.output
        assert read_summary(run.folder.path)["status"].startswith("failed: HandoverError")
        before = len(steps(run))
        assert saved_step(run.folder) == before
        assert f"areal-lite resume {run.folder.path}" in run.output
    command = f"areal-lite resume {run.folder.path} run.max_worker_restarts=1"
    with typed(command, folder=run.folder.path) as resumed:
        resumed.wait_for_steps(before + 1)
        gate.mkdir()
        resumed.wait_until((gate / "waits").exists, "a batch that is waited for")
        os.kill(resumed.engine_core("rollout/0"), signal.SIGSTOP)
        gate.rename(loop_folder / "open")
        resumed.wait_until(lambda: "back at step" in resumed.output, "a new beginning")
        assert re.search(r"late: rollout/0 \(rollout\) holds \d+ leases, the oldest for \d+ s", resumed.output)
        stopped_at = len(steps(resumed))
        assert saved_step(resumed.folder) == stopped_at > before, "nothing is lost"
        resumed.wait_for_steps(stopped_at + 2)
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
            for pid in resumed.processes():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)
        resumed.ends_with(130)
        assert re.search("saved step-\\d+ after SIG(TERM|HUP|USR1)", resumed.output), (
            resumed.output
        )  # the one seen first
        assert "Traceback" not in resumed.output
        assert read_summary(resumed.folder.path)["status"] == "interrupted"
        assert saved_step(resumed.folder) == len(steps(resumed))
        check_books(resumed.folder, total=len(steps(resumed)))
