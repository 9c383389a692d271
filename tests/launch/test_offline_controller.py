"""Saves, restarts, stops and failures of a run, by the controller of an offline run with a rank that is scripted."""

import errno
import os
import re
import signal
import threading
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_ray import Reference
from fake_ray import failing as failing_call
from offline_runs import OfflineRun

from areal_lite.errors import CheckpointError, FruitlessError, HandoverError, QueueError, RankDied, StallError
from areal_lite.launch.run import controller as controller_module
from areal_lite.launch.run.controller import Interrupted
from areal_lite.launch.run.plan import Node
from areal_lite.record import checkpoints
from areal_lite.record.run_files import read_json, read_summary

Start = Callable[..., OfflineRun]


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Start:
    return lambda **run: OfflineRun(tmp_path, monkeypatch, **run)


def failing(*failures: Any) -> Callable[..., None]:
    """A hook that raises one after another; None lets the call pass."""
    left = list(failures)

    def hook(*_: Any) -> None:
        if left and (error := left.pop(0)) is not None:
            raise error

    return hook


def looked_at(times: int, error: Exception | None = None) -> Callable[..., Any]:
    """A hook: the first call is answered, or fails, at the last of so many looks; later ones are answered at once."""
    left, failures = [times], [error] if error else []

    def is_ready() -> bool:
        left[0] -= 1
        return left[0] <= 0

    return lambda *_: failing_call(failures.pop(), is_ready=is_ready) if failures else is_ready


def test_a_trained_step_has_its_row_even_if_its_evaluation_fails(start: Start) -> None:
    """The step is saved, and a resume continues after it. Seen failing with the row written afterwards."""
    run = start(eval_every=1, max_restarts=0)
    run.rank.hooks["evaluate"] = failing(None, StallError("late: trainer/1"))
    with pytest.raises(StallError, match="late: trainer/1"):
        run.run()
    assert run.steps == run.saved == [1]


def test_a_last_evaluation_that_fails_is_made_by_a_resume(start: Start) -> None:
    """Seen failing with a resume that ends without it."""
    run = start(max_restarts=0)
    run.rank.hooks["evaluate"] = failing(None, RankDied("trainer/1 died"))
    with pytest.raises(RankDied):
        run.run()
    run.resume()
    assert run.run()["eval"].keys() == {"0", "6"}


def test_a_row_that_cannot_be_shown_is_written_once(start: Start) -> None:
    """Seen failing with a second one, by the save of the step."""
    run = start()
    run.rank.hooks["step"] = lambda *_: run.output.close()
    with pytest.raises(ValueError, match="closed file"):
        run.run()
    assert run.steps == [1]


@pytest.mark.parametrize("is_there", [True, "late", False])
def test_the_manifest_holds_what_the_ranks_hashed(
    start: Start, is_there: bool | str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trainer's files and the exported model's, which may show late; one that only a rank sees is an error.

    Seen failing with every file hashed by the controller, and with storage that shows a file a second later.
    """
    monkeypatch.setattr(checkpoints, "LATE_S", 60.0 if is_there else 0.1)
    run = start(checkpoint_every=0)

    def write(folder: Path) -> Reference:
        folder.mkdir()
        if is_there:
            threading.Timer(0.5 if is_there == "late" else 0.0, (folder / "shard").touch).start()
        return Reference(lambda: {str(folder / "shard"): {"size": 0, "sha256": "the rank's"}})

    run.rank.hooks |= {"save": write, "export": write}
    if not is_there:
        with pytest.raises(CheckpointError, match="trainer/shard, which a trainer rank wrote, got no such file here"):
            run.run()
        return
    run.run()
    manifest = read_json(run.folder.newest_checkpoint() / "manifest.json")
    assert [manifest[f"{part}/shard"]["sha256"] for part in ("trainer", "model")] == ["the rank's"] * 2


@pytest.mark.parametrize(
    ("steps", "minutes", "saved"),
    [(0, 10, [3, 6]), (2, 10, [2, 4, 6]), (4, 10, [3, 4, 6]), (2, 0, [2, 4, 6]), (0, 0, [6])],
)
def test_checkpoints_come_by_steps_and_by_minutes_since_the_last(
    start: Start, steps: int, minutes: int, saved: list[int]
) -> None:
    """Six steps of four minutes; the end saves the last. Seen failing with a time that is never set again."""
    run = start(checkpoint_every=steps, checkpoint_every_minutes=minutes, stall_timeout_s=1000.0)

    def step(*_: Any) -> None:
        run.clock.now += 240

    run.rank.hooks["step"] = step
    run.run()
    assert run.saved == saved


def test_a_full_disk_ends_no_run_before_its_end(start: Start) -> None:
    """Neither rows and summary nor a checkpoint on the way. Seen failing with each of these raised."""
    run = start()
    run.rank.hooks["save"] = failing(OSError(errno.ENOSPC, "No space left on device"))
    for name in ("metrics.jsonl", ".summary.json.tmp"):
        (run.folder.path / name).symlink_to("/dev/full")
    assert run.run()["status"] == "done"
    assert run.saved == [4, 6]


@pytest.mark.parametrize(
    ("during", "takes_s", "saved"),
    [("step", 29, [1, 2]), ("step", 31, [1]), ("save", 0, [1, 2]), ("evaluate", 9, [1, 2]), ("head", 29, [1, 2])],
)
def test_a_notice_leaves_time_to_save_and_no_more(start: Start, during: str, takes_s: float, saved: list[int]) -> None:
    """In a step, a save or an evaluation. What is late is given up; the loss of Ray's head is a notice as well.

    Seen failing with a wait that checks nothing but its watchdog, and with the export of a model, which takes time.
    """
    run = start(checkpoint_every=1, eval_every=1 if during == "evaluate" else 0)

    def slow(method: str) -> Callable[..., Any]:
        def hook(*_: Any) -> Any:
            if run.rank.log[-1] != 2:
                return None
            begun = run.clock.now
            if during == "head":
                run.places.is_head_lost = True
            elif method == during:
                os.kill(os.getpid(), signal.SIGUSR1)
            return lambda: run.clock.now >= begun + (takes_s if method in ("step", during) else 0)

        return hook

    run.rank.hooks = {method: slow(method) for method in ("step", "save", "evaluate")}
    with pytest.raises(Interrupted, match=str(run.folder.path)):
        run.run()
    assert run.saved == saved
    assert "export" not in run.rank.calls
    why = "the loss of Ray's head process (GCS)" if during == "head" else "SIGUSR1"
    assert why in run.output.getvalue()
    assert re.search(rf"step(-0+| ){saved[-1]}\b", run.output.getvalue())
    assert read_summary(run.folder.path)["stopped_by"] == why


def test_ctrl_c_twice_ends_at_once(start: Start) -> None:
    """While a rank hangs. Seen failing with a handler that never raises: the run took its time to save and sum up."""
    run = start()
    run.rank.hooks["step"] = lambda *_: lambda: os.kill(os.getpid(), signal.SIGINT)  # at each look, and never ready
    with pytest.raises(KeyboardInterrupt):
        run.run()
    assert "press Ctrl-C again" in run.output.getvalue()
    assert run.rank.calls.count("save") == 0


@pytest.mark.parametrize("during", ["step", "save"])
def test_a_notice_at_the_end_leaves_the_export_to_a_resume(start: Start, during: str) -> None:
    """Seen failing with the status "done", after which no resume exports."""
    run = start()
    run.rank.hooks[during] = notice_at(run, 6)
    with pytest.raises(Interrupted):
        run.run()
    assert "export" not in run.rank.calls
    run.resume()
    assert run.run()["status"] == "done"
    assert run.rank.log[-1] == "step-000006"
    assert "export" in run.rank.calls


@pytest.mark.parametrize("is_notice", [True, False])
def test_a_run_with_more_steps_keeps_its_model_until_it_has_trained_one(start: Start, is_notice: bool) -> None:
    """Seen failing with the same step saved again, without the model."""
    run = start()
    run.rank.hooks |= {"export": Path.mkdir, "evaluate": lambda: Reference(dict)}
    run.run()
    run.resume(steps=7)
    run.rank.hooks["evaluate"] = notice_at(run, "step-000006") if is_notice else failing(ZeroDivisionError())
    with pytest.raises(Interrupted if is_notice else ZeroDivisionError):
        run.run()
    assert (run.folder.newest_checkpoint() / "model").is_dir()


def notice_at(run: OfflineRun, place: Any) -> Callable[..., None]:
    """A hook that gives notice at a step, or after the load of a checkpoint."""

    def hook(*_: Any) -> None:
        if run.rank.log[-1] == place:
            os.kill(os.getpid(), signal.SIGTERM)

    return hook


def test_a_run_restarts_from_its_last_checkpoint_as_long_as_it_advances(start: Start) -> None:
    """Each step has one row. Seen failing without the count reset by a checkpoint, and with old rows kept."""
    run, died = start(), RankDied("trainer/1 died")
    order = [died, None, None, None, died, None, QueueError("gone"), None, None, StallError("late")]
    run.rank.hooks["step"] = failing(*order)
    assert run.run()["status"] == "done"
    one, two, again, four = ["start", 1], ["start", 1, 2, 3, 4], ["step-000002", 3, 4], ["step-000004", 5, 6]
    assert run.rank.log == [*one, *two, *again, "step-000002", 3, 4, 5, *four]
    assert run.steps == [1, 2, 3, 4, 5, 6]
    events = [event for name in ("events", "events.orphaned") for event in run.folder.read(f"{name}.jsonl")]
    restarts = sorted((event for event in events if event["kind"] == "restarted"), key=lambda event: event["time"])
    assert {(event["step"], event["reason"]) for event in restarts} == {
        (0, "trainer/1 died"),
        (2, "trainer/1 died"),
        (2, "gone"),
        (4, "late"),
    }


@pytest.mark.parametrize(
    ("method", "error", "times"),
    [
        ("step", RankDied("rank"), 3),
        ("step", FruitlessError("no batch"), 1),
        ("step", HandoverError("no engine is left"), 1),
        ("export", RankDied("no memory"), 3),
    ],
)
def test_a_run_ends_if_it_does_not_advance_or_would_not(
    start: Start, method: str, error: Exception, times: int
) -> None:
    """Step 3 fails each time, or the export, before which the last step is saved again: that is no progress.

    Seen failing with restarts without end, of either, and with one for what a restart cannot cure.
    """
    run, tried = start(), list[str]()

    def fail(*_: Any) -> None:
        if method == "export" or run.rank.log[-1] == 3:
            tried.append(method)
            raise error

    run.rank.hooks[method] = fail
    with pytest.raises(type(error), match=str(error)):
        run.run()
    assert len(tried) == times


@pytest.mark.parametrize("lane", ["trainer/0", "rollout/1"])
def test_an_unreachable_node_of_a_rank_is_no_reason_for_a_restart(start: Start, lane: str) -> None:
    """It would be waited for. Seen failing with a restart, and without one where a worker was there once."""
    run = start()
    run.places.placement.settle(lane, Node(address="127.0.0.1", port=1, cores=1, gpus=0, free_gpus=0))
    run.rank.hooks["step"] = failing(None, None, RankDied("rank"))
    with pytest.raises(RankDied) if lane == "trainer/0" else nullcontext():
        run.run()
    assert run.rank.log[:4] == ["start", 1, 2, 3]
    assert len(run.rank.log) == (4 if lane == "trainer/0" else 9)


def test_steps_are_trained_while_one_is_saved_and_only_the_end_waits(start: Start) -> None:
    """A save that falls due meanwhile is skipped. Only the last save uses the state itself instead of a copy.

    Seen failing with a save that is waited for, at once or at step 4, with two at once, and with a silent wait.
    """
    run = start(checkpoint_beside=True)
    run.rank.hooks["save"] = looked_at(30)
    during: dict[int, list[str]] = {}

    def step(*_: Any) -> None:
        during[run.rank.log[-1]] = [path.name for path in run.folder.checkpoints.iterdir()]

    run.rank.hooks["step"] = step
    assert run.run()["status"] == "done"
    assert run.rank.log == ["start", 1, 2, 3, 4, 5, 6]
    assert [during[number] for number in (3, 4, 5, 6)] == [[".step-000002.tmp"]] * 4
    assert (run.rank.copied, run.saved) == ([True, False], [2, 6])
    assert [event["step"] for event in run.folder.read("events.jsonl") if event["kind"] == "checkpoint"] == [2, 6]
    text = run.output.getvalue()
    assert text.count("step 4 is not saved: an earlier save is still being written: its manifest") == 1
    assert text.count("waiting for the save of step 2 (run.save_timeout_s=600) ...") == 1


@pytest.mark.parametrize(
    "error", [StallError("late: trainer/1 in save"), OSError(errno.EIO, "broken"), RankDied("trainer/1 died")]
)
def test_a_save_that_fails_beside_the_steps_ends_nothing(start: Start, error: Exception) -> None:
    """Seen failing with an error that is raised in the step that is trained meanwhile."""
    run = start(checkpoint_beside=True)
    run.rank.hooks["save"] = looked_at(3, error)
    assert run.run()["status"] == "done"
    assert run.rank.log == ["start", 1, 2, 3, 4, 5, 6]
    assert f"the save of step 2 failed: {error}" in run.output.getvalue()
    assert run.saved == [4, 6]


@pytest.mark.parametrize("is_notice", [False, True])
def test_a_rank_that_still_hangs_in_a_save_is_asked_for_no_other(start: Start, is_notice: bool) -> None:
    """A save due meanwhile is skipped; an end after a notice does not wait. Seen failing with another snapshot."""
    run = start(checkpoint_beside=True)
    run.rank.hooks["save"] = looked_at(3, StallError("late: trainer/1 in save"))

    def on_step(row: Any) -> None:
        run.rank.doing = "in save since 9 s" if row["step"] in (3, 4) or (is_notice and row["step"] > 4) else ""
        if is_notice and row["step"] == 5:
            os.kill(os.getpid(), signal.SIGTERM)

    words = "an earlier save is still being written: trainer/0 in save since 9 s"
    if is_notice:
        with pytest.raises(Interrupted) as stopped:
            run.run(on_step)
        assert str(stopped.value.__cause__).endswith(words)
        assert (run.rank.calls.count("snapshot"), stopped.value.is_resumable) == (1, False)
    else:
        assert run.run(on_step)["status"] == "done"
        assert f"step 4 is not saved: {words}" in run.output.getvalue()
        assert run.saved == [6]


def test_the_manifest_of_a_checkpoint_has_a_deadline(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen failing without one: a disk that hangs held the run forever (I6)."""
    run, hung = start(save_timeout_s=0.1, max_restarts=0), threading.Event()
    monkeypatch.setattr(controller_module, "seal", lambda _: hung.wait(20.0))
    monkeypatch.setattr(controller_module, "wait", lambda futures, _: waited(run, futures))
    with pytest.raises(StallError, match=r"manifest of .*step-000002.* within run\.save_timeout_s=0\.1 s"):
        run.run()
    hung.set()


def waited(run: OfflineRun, futures: Any) -> Any:
    run.clock.now += 0.25
    return type("Waited", (), {"not_done": set(futures)})


@pytest.mark.parametrize("stop", [signal.SIGINT, signal.SIGTERM])
def test_a_stop_during_a_save_leaves_both_checkpoints(start: Start, stop: signal.Signals) -> None:
    """Seen failing with an end that leaves the first one unfinished."""
    run = start(checkpoint_beside=True, checkpoint_every=3)
    run.rank.hooks["save"] = looked_at(30)

    def on_step(row: Any) -> None:
        if row["step"] == 4:
            os.kill(os.getpid(), stop)

    with pytest.raises(Interrupted):
        run.run(on_step)
    assert run.saved == [3, 5]


def test_a_restart_waits_for_a_save_beside_the_steps(start: Start) -> None:
    """And begins there. Seen failing with a look at what is there already."""
    run = start(checkpoint_beside=True)
    run.rank.hooks |= {"save": looked_at(30), "step": failing(None, None, RankDied("trainer/1 died"))}
    assert run.run()["status"] == "done"
    assert run.rank.log == ["start", 1, 2, 3, "step-000002", 3, 4, 5, 6]
    assert run.saved == [2, 4, 6]


def test_a_notice_while_a_run_restarts_ends_it_at_once(start: Start) -> None:
    """Everything there is is saved. Seen failing with a start that runs to its end."""
    run = start()
    run.rank.hooks["step"] = failing(None, None, RankDied("rank"))

    def begin(*_: Any) -> None:
        if run.rank.log.count("start") == 2:
            os.kill(os.getpid(), signal.SIGTERM)

    run.rank.hooks["start"] = begin
    with pytest.raises(KeyboardInterrupt):
        run.run()
    assert run.rank.log == ["start", 1, 2, 3, "start"]


@pytest.mark.parametrize("failure", [StallError("still missing: trainer/1"), RankDied("trainer/1 did not start")])
def test_a_restart_that_takes_too_long_is_not_tried_again(start: Start, failure: Exception) -> None:
    """One whose process died is. Seen failing with minutes of waiting for a node that is gone, three times over."""
    run = start()
    run.rank.hooks |= {"step": failing(None, None, RankDied("rank")), "start": failing(None, *[failure] * 9)}
    with pytest.raises(type(failure), match=str(failure)):
        run.run()
    assert run.rank.calls.count("start") == (2 if isinstance(failure, StallError) else 3)


@pytest.mark.parametrize("answer", [False, np.False_])
def test_a_callback_that_returns_false_ends_the_run_saved(start: Start, answer: Any) -> None:
    """Seen failing with numpy's False ignored."""
    run = start(checkpoint_every=0)
    with pytest.raises(Interrupted):
        run.run(lambda row: answer)
    assert run.saved == run.steps[-1:] == [2]


@pytest.mark.parametrize("error", [ZeroDivisionError("in a callback"), SystemExit("of a callback")])
def test_what_a_callback_raises_ends_the_run_saved(start: Start, error: BaseException) -> None:
    """Once the current step is trained; the caller gets what was raised.

    Seen failing with it raised where the callback is called: in a step, without a checkpoint or a summary.
    """
    run, seen = start(checkpoint_every=0), list[int]()

    def on_step(row: Any) -> None:
        seen.append(row["step"])
        raise error

    with pytest.raises(type(error), match="a callback"):
        run.run(on_step)
    assert seen == [1]
    assert (run.steps, run.saved) == ([1, 2], [2])
    assert read_summary(run.folder.path)["status"] == f"failed: {type(error).__name__}: {error}"
