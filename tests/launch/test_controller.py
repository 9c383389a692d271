"""The controllers' order of things, with processes that are only told about."""

import errno
import io
import itertools
import json
import os
import re
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from offline_builders import offline_config
from rich.console import Console
from run_folders import new_run_folder

from areal_lite.config.recipe import parse_config
from areal_lite.errors import FruitlessError, HandoverError, QueueError, RankDied, StallError
from areal_lite.launch.run import controller, online, parity, signals
from areal_lite.launch.run.collector import Collector
from areal_lite.launch.run.controller import Interrupted
from areal_lite.launch.run.evaluation import Evaluations
from areal_lite.launch.run.offline import OfflineController
from areal_lite.launch.run.online import OnlineController
from areal_lite.launch.run.placement import Placement
from areal_lite.launch.run.ranks import Ranks
from areal_lite.launch.run.view import View
from areal_lite.record.metrics import METRICS
from areal_lite.record.run_folder import RunFolder
from areal_lite.watchdog import Watchdog

FIGURES = {"loss": 0.5, "accuracy": 0.9, "tokens": 12.0, "lr": 1e-3, "grad_norm": 1.0, "step_skipped": 0.0}
STATS = {metric.name: 1 for metric in METRICS if metric.reduction} | {"age_histogram": {0: 30}, "age_max": 0}


def no_places(config: Any) -> Any:
    """No process is started here."""
    return SimpleNamespace(config=config, placement=Placement([], []), head_is_lost=lambda: False)


class FakeRanks(Ranks):
    """Notes what was asked with which deadline."""

    def __init__(self, config: Any) -> None:
        self._places = no_places(config)
        self.asked: list[tuple[Any, ...]] = []
        self.doing: dict[str, str] = {}

    def busy(self) -> dict[str, str]:
        return self.doing

    def asking(self, method: str, *args: Any, timeout_s: float, wait_s: float = 0.0) -> Iterator[list[Any]]:
        self.asked.append((method, *args, timeout_s))
        yield [7]


class FakeCluster:
    """A queue with a batch, and nobody else."""

    def __init__(self) -> None:
        self.completed: list[str] = []
        self.verifiers = dict[str, Any]()
        self.restarts = SimpleNamespace(changes=[])
        self.joining, self.log = list[str](), list[Any]()
        self.is_halted = self.awaits_publication = False
        self.noted, self.replaced = list[str](), dict[str, int]()
        self.engines = SimpleNamespace(handles={})
        self.publish = None
        self.queue = SimpleNamespace(
            take=lambda **_: {"rewards": {"reward_mean": 0.5}},
            batch_groups=lambda **_: [],
            status=lambda: {"refused": 0, "counts": {"trained": 4}},
            complete_step=lambda batch_id: self.completed.append(batch_id),
        )

    def mark_batch_taken(self, batch_id: str = "") -> None:
        self.noted.append(batch_id)

    def copy_queue(self) -> None:
        self.noted.append("copy")

    def check_workers(self) -> None:
        pass

    def watch_workers(self) -> None:
        pass

    def admit_ready_engines(self) -> list[str]:
        self.awaits_publication = False
        joining, self.joining = self.joining, []
        self.log += [f"take {name} in" for name in joining]
        return joining

    def activate(self, names: list[str]) -> None:
        self.is_halted = False
        self.log += [f"{name} asks for work" for name in names]

    def states(self) -> dict[str, int]:
        return {"healthy": 2}

    def memory_mb(self) -> dict[str, int]:
        return {"controller": 200}

    def collect(self) -> tuple[list[Any], dict[str, Any]]:
        return [], {}


@pytest.fixture
def offline(tmp_path: Path) -> OfflineController:
    run = {"dir": str(tmp_path / "run"), "eval_every": 1, "start_timeout_s": 321.0}
    config = offline_config(tmp_path, run=run)
    folder, view = new_run_folder(config), View(config, console=Console(file=io.StringIO()))
    places = no_places(config)
    controller = OfflineController(folder=folder, places=places, model_folder=tmp_path / "model", view=view)
    controller._ranks = FakeRanks(config)
    return controller


@pytest.fixture
def rl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> OnlineController:
    config = parse_config({"run": {"dir": str(tmp_path / "run"), "steps": 5}, "weights": {"parity_every": 1}})
    folder, view = new_run_folder(config), View(config, console=Console(file=io.StringIO()))
    run: dict[str, Any] = {"folder": folder, "places": no_places(config), "model_folder": tmp_path, "view": view}
    controller = OnlineController(prompts={}, eval_prompts=[], **run)
    cluster: Any = FakeCluster()
    controller._cluster = cluster
    controller._collector = Collector(cluster, recorder=controller._recorder, view=view, logs="", own=[])
    controller._evaluations = Evaluations(
        cluster, [], recorder=controller._recorder, lane=controller._controller_lane, view=view
    )
    vars(controller)["_ask"] = lambda method, *_, waiting_for: [dict(STATS) if method == "step" else []]
    monkeypatch.setattr(online, "hand_over", lambda *_, stamp_ledger, **__: stamp_ledger())
    return controller


def rows(folder: Path) -> list[dict[str, Any]]:
    return RunFolder(folder / "run").read("metrics.jsonl")


def test_the_row_of_a_step_is_written_by_the_next_wait(rl: OnlineController, tmp_path: Path) -> None:
    """Writing asks everybody how it goes, which the trainer must not wait for; the parity stands in the step's own row,
    what is measured later in the next.

    Seen failing with the row written before the comparison.
    """
    measured = parity.Difference(mean=1e-6, p99=1e-6, max=1e-6)
    vars(rl._parity)["after_publication"] = lambda *_, **__: rl._report_parity(measured)
    assert rl._step()
    assert rows(tmp_path) == []
    rl._tick()
    rl._recorder.parity(mean=1e-6, p99=1e-6, max=2e-6)
    rl._tick()
    assert [(row["step"], row["parity_max_abs_logprob_diff"]) for row in rows(tmp_path)] == [(1, 1e-6)]
    assert all(rows(tmp_path)[0][name] >= 0 for name in ("trainer_wait_s", "train_s", "publish_s"))


def test_the_queue_is_copied_with_its_batch_and_its_end_is_told(
    rl: OnlineController, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seen failing with a batch that is not noted, a wait without a copy, and a report that is told again."""
    said: list[str] = []
    monkeypatch.setattr(rl._view, "print", lambda text, **_: said.append(text))
    cluster: Any = rl._cluster
    assert rl._step()
    assert (cluster.noted, cluster.trained) == (["step-1"], "step-1")
    cluster.replaced = {"leases_kept": 16, "leases_lost": 1, "finished": 50, "waiting": 2}
    rl._tick()
    rl._tick()
    assert cluster.noted == ["step-1", "copy", "copy"]
    told = "queue is back: workers kept 16 groups and dropped 1; 50 finished ones are kept, 2 are generated again"
    assert [text for text in said if "queue" in text] == [told]


def test_what_trains_too_little_or_teaches_nothing_is_said_once(
    rl: OnlineController, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """On the terminal, in the event log and in the summary. Seen failing with a warning a step, and with the first one
    alone.
    """
    said: list[str] = []
    monkeypatch.setattr(rl._view, "print", lambda text, **_: said.append(text))
    lost = {"tokens_by_quarter": {"257-1024": [[9] * 4, [1, 9, 9, 9]]}}
    stats = STATS | lost | {"varied_groups_fraction": 0.0}
    vars(rl)["_ask"] = lambda method, *_, waiting_for: [dict(stats) if method == "step" else []]
    for _ in range(12):
        rl._step()
        rl._tick()
    first, second = (text for text in said if "of quarter 1 of the" in text or "nothing to learn from" in text)
    rl._recorder.feed(rl._controller_lane.drain())
    rl._summarize("done", failed=True)
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["warnings"] == [f"step 10: {first}", f"step 10: {second}"]


def test_a_step_whose_hand_over_fails_is_complete_and_has_its_row(
    rl: OnlineController, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is trained all the same, so the rescue saves it. Seen failing with the step left open."""

    def fail(*_: Any, **__: Any) -> None:
        raise HandoverError("no rollout worker is left")

    monkeypatch.setattr(online, "hand_over", fail)
    with pytest.raises(HandoverError):
        rl._step()
    rl._tick()  # as the rescue does first
    assert rl._cluster.completed == ["step-1"]
    assert rl._at_boundary
    assert [row["step"] for row in rows(tmp_path)] == [1]


@pytest.mark.parametrize(("doing", "asked"), [("", ["snapshot", "save"]), ("in step step-8 since 31 s (wait)", [])])
def test_a_failed_run_is_not_saved_while_a_rank_hangs(
    rl: OnlineController, monkeypatch: pytest.MonkeyPatch, doing: str, asked: list[str]
) -> None:
    """An actor with two threads answers beside the one that hangs. Seen failing with any answer to `ping` taken."""
    ranks = FakeRanks(rl._config)
    ranks.doing = {"trainer/1": doing} if doing else {}
    rl._ranks, rl._version = ranks, 7
    rl._cluster.queue.save = lambda: b""
    rl._rescue(StallError("late: trainer/1"))
    assert [method for method, *_ in ranks.asked] == asked


def test_a_start_that_fails_leaves_a_summary_that_says_why(rl: OnlineController, tmp_path: Path) -> None:
    """Before there is a queue to ask. Seen failing with an AttributeError in place of the reason."""
    del rl._cluster.queue
    rl._rescue(StallError("still missing: queue"))
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["status"], summary["ledger"]) == ("failed: StallError: still missing: queue", {})


def test_groups_that_end_without_ever_making_a_batch_are_no_progress(rl: OnlineController) -> None:
    """The watchdog sees the ledger move, for ever (I6). Seen running on without the check.

    Where a workflow is to blame, its own words are told: seen failing with the reason alone and advice for verifiers.
    """
    failed = itertools.count(0, step=100)

    def status() -> dict[str, Any]:
        now = next(failed)
        counts = {"failed": now, "rejected": 0, "stale": 0, "failed(exception:NameError)": now}
        return {"refused": 0, "counts": counts, "progress": now, "missing": 4, "workers": {}}

    rl._cluster.queue.take = lambda **_: None
    rl._cluster.queue.status = status
    with pytest.raises(StallError, match=r"got none of .*failed\(exception:NameError\).*areal-lite verify"):
        rl._step()
    errors = {"workflow:ValueError": "workflow:ValueError: no level 7"}
    rl._cluster.collect = lambda: ([], {"rollout/0": {"errors": errors}})  # type: ignore[method-assign]
    with pytest.raises(StallError, match=r"episodes: workflow:ValueError: no level 7 .*rollout-\*.log.*eval"):
        rl._step()


def test_a_worker_that_is_ready_again_joins_at_the_next_publication(
    rl: OnlineController, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It receives weights, and asks for work only afterwards. Seen failing with `activate` before the weights."""
    cluster: Any = rl._cluster
    monkeypatch.setattr(online, "hand_over", lambda *_, version, stamp_ledger, **__: cluster.log.append(version))
    cluster.joining = ["rollout/0"]
    rl._step()
    rl._step()
    assert cluster.log == ["take rollout/0 in", 1, "rollout/0 asks for work", 2]


def test_a_run_without_engines_waits_for_a_start_under_way_and_publishes_for_it(
    rl: OnlineController, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under the version that is there, as no step is trained; the start has a deadline of its own, the wait none.

    Seen failing with the watchdog left on, and without the publication.
    """
    cluster: Any = rl._cluster
    monkeypatch.setattr(online, "hand_over", lambda *_, version, stamp_ledger, **__: cluster.log.append(version))
    clock = itertools.count(0.0, step=5.0)
    rl._version, rl._watchdog = 3, Watchdog(12.0, clock=lambda: next(clock))
    ticks = itertools.count()

    def watch_workers() -> None:
        tick = next(ticks)
        assert tick < 20, "nobody publishes"
        if tick == 9:
            cluster.joining, cluster.awaits_publication = ["rollout/0"], True

    def take(**_: Any) -> Any:
        return {"rewards": {"reward_mean": 0.5}} if "rollout/0 asks for work" in cluster.log else None

    cluster.is_halted, cluster.check_workers, cluster.queue.take = True, watch_workers, take
    counts = {"failed": 0, "rejected": 0, "stale": 0, "trained": 4}
    cluster.queue.status = lambda: {"refused": 0, "counts": counts, "progress": 1, "missing": 4, "workers": {}}
    rl._step()
    assert cluster.log == ["take rollout/0 in", 3, "rollout/0 asks for work", 4]


def test_a_trained_step_has_its_row_even_where_its_evaluation_fails(offline: OfflineController, tmp_path: Path) -> None:
    """The rescue saves that step, and a resumed run goes on behind it. Seen failing with the row written afterwards."""

    def ask(method: str, *_: Any, waiting_for: str) -> list[Any]:
        if method == "evaluate":
            raise StallError("late: trainer/1")
        return [FIGURES]

    vars(offline)["_ask"] = ask
    with pytest.raises(StallError, match="late: trainer/1"):
        offline._step()
    offline._tick()  # as the rescue does first
    assert [(row["step"], row["loss"]) for row in rows(tmp_path)] == [(1, 0.5)]


def test_a_checkpoint_is_read_under_the_deadline_of_a_start(offline: OfflineController, tmp_path: Path) -> None:
    """A long read shows no progress. Seen failing with it under the watchdog of `prepare`."""
    asked = []
    vars(offline)["_ask"] = lambda method, *_, waiting_for: asked.append(method) or [{}]
    offline._prepare(tmp_path / "step-000007")
    assert offline._ranks.asked == [("load", tmp_path / "step-000007" / "trainer", 321.0)]
    assert offline._version == 7
    assert asked == ["prepare", "evaluate"]


@pytest.mark.parametrize(
    ("steps", "minutes", "saved"), [(0, 10, [3]), (2, 10, [2, 4]), (4, 10, [3, 4]), (2, 0, [2, 4]), (0, 0, [])]
)
def test_checkpoints_come_by_steps_and_by_minutes_since_the_last(
    offline: OfflineController, monkeypatch: pytest.MonkeyPatch, steps: int, minutes: int, saved: list[int]
) -> None:
    """Six steps of four minutes; the last is saved by the end of the run. Seen failing with the time never set anew."""
    changed = {"checkpoint_every": steps, "checkpoint_every_minutes": minutes, "keep_checkpoints": 9, "eval_every": 0}
    run = offline._config.run.model_copy(update=changed)
    offline._config = offline._config.model_copy(update={"run": run})
    offline._saved_at, now = 0.0, 0.0
    monkeypatch.setattr(controller, "time", SimpleNamespace(monotonic=lambda: now))
    vars(offline).update(_ask=lambda *_, waiting_for: [FIGURES], _evaluate=lambda: None)
    for _ in range(6):
        now += 240
        offline._step()
    assert [int(path.name.removeprefix("step-")) for path in sorted(offline._folder.checkpoints.iterdir())] == saved


def test_a_full_disk_ends_no_run_before_its_end(
    offline: OfflineController, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither what people read nor a checkpoint on the way. Seen failing with each of these raised."""

    def fail(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    def asking(method: str, *args: Any, timeout_s: float, wait_s: float) -> Iterator[list[Any]]:
        if method == "save" and args[0].parent.name == ".step-000002.tmp":
            fail()
        return FakeRanks.asking(ranks, method, *args, timeout_s=timeout_s)

    changed = {"checkpoint_every": 2, "eval_every": 0, "keep_checkpoints": 9}
    offline._config = offline._config.model_copy(update={"run": offline._config.run.model_copy(update=changed)})
    ranks: Any = offline._ranks
    vars(ranks)["asking"] = asking
    vars(offline._recorder._trackers[0])["show"] = fail
    vars(offline._view._console.file)["_stream"] = SimpleNamespace(write=fail, flush=fail, isatty=lambda: False)
    for name in ("metrics.jsonl", ".summary.json.tmp"):
        (tmp_path / "run" / name).symlink_to("/dev/full")
    processes = SimpleNamespace(kill=lambda: None, stop=lambda: None)
    vars(offline).update(_spawn=lambda _: processes, _start=lambda _: None, _prepare=lambda _: None)
    vars(offline).update(_ask=lambda *_, waiting_for: [FIGURES], _evaluate=lambda: None)
    monkeypatch.setattr(controller, "seal", lambda _: None)
    assert offline.run()["status"] == "done"
    assert sorted(path.name for path in offline._folder.checkpoints.iterdir()) == ["step-000004", "step-000006"]


class SlowRanks(FakeRanks):
    """A rank whose step takes a while, in which a batch system may give notice."""

    def __init__(self, config: Any, *, takes_s: float, when: dict[str, signal.Signals]) -> None:
        super().__init__(config)
        self.takes_s, self.when, self.now, self.begun = takes_s, when, 0.0, 0.0
        self.version = 0
        self.handles = {"trainer/0": SimpleNamespace(work=SimpleNamespace(remote=self.begin))}

    def begin(self, method: str) -> str:
        self.version += method == "step"
        self.begun = self.now
        self.notice(method)
        return method

    def notice(self, method: str) -> None:
        if self.version == 2 and method in self.when:
            os.kill(os.getpid(), self.when.pop(method))

    def wait(self, calls: Any, timeout_s: float) -> list[str]:
        self.now += timeout_s
        if self.now - self.begun < (self.takes_s if self.version == 2 else 0):
            return ["trainer/0"]
        calls.values["trainer/0"] = FIGURES if calls.pending.pop("trainer/0") == "step" else {}
        return []

    def progress(self) -> tuple[int, ...]:
        return (int(4 * self.now),)

    def asking(self, method: str, *args: Any, timeout_s: float, wait_s: float = 0.0) -> Iterator[list[Any]]:
        self.notice(method)
        return super().asking(method, *args, timeout_s=timeout_s)


@pytest.mark.parametrize(
    ("during", "takes_s", "saved"),
    [("step", 29, [1, 2]), ("step", 31, [1]), ("save", 0, [1, 2]), ("evaluate", 9, [1, 2]), ("head", 29, [1, 2])],
)
def test_a_run_that_is_given_notice_saves_in_time_and_can_be_told_to_go_on(
    offline: OfflineController, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, during: str, takes_s: float, saved: Any
) -> None:
    """In the middle of a step, of a save or of an evaluation; what is late is given up, and what was kept is said.

    The loss of Ray's head process is a notice as well.

    Seen failing with a wait that looks at nothing but its watchdog, and with the export of a model that takes time.
    """
    changed = {"checkpoint_every": 1, "eval_every": 1 if during == "evaluate" else 0}
    offline._config = offline._config.model_copy(update={"run": offline._config.run.model_copy(update=changed)})
    ranks = SlowRanks(offline._config, takes_s=takes_s, when={during: signal.SIGUSR1})
    monkeypatch.setattr(signals, "time", SimpleNamespace(monotonic=lambda: ranks.now))
    processes = SimpleNamespace(kill=lambda: None)
    vars(offline).update(_ranks=ranks, _spawn=lambda _: processes, _start=lambda _: None, _prepare=lambda _: None)
    places = SimpleNamespace(
        **vars(offline._places) | {"head_is_lost": lambda: during == "head" and ranks.version == 2}
    )
    offline._places = places  # type: ignore[assignment]
    with pytest.raises(Interrupted, match=str(tmp_path / "run")):
        offline.run()
    assert [int(path.name.removeprefix("step-")) for path in sorted(offline._folder.checkpoints.iterdir())] == saved
    assert {method for method, *_ in ranks.asked} == {"snapshot", "save"}
    said = offline._view._console.file.getvalue()  # type: ignore[attr-defined]
    assert ("the loss of Ray's head process" if during == "head" else "SIGUSR1") in said
    assert re.search(rf"step(-0+| ){saved[-1]}\b", said)
    stopped_by = json.loads((tmp_path / "run" / "summary.json").read_text())["stopped_by"]
    assert stopped_by == ("the loss of Ray's head process (GCS)" if during == "head" else "SIGUSR1")
    for number in signals.NOTICES:  # which the end of a process that was told to end ignores
        signal.signal(number, signal.SIG_DFL)


def falling(offline: OfflineController, monkeypatch: pytest.MonkeyPatch, failures: list[tuple[int, Exception]]) -> Any:
    """Have steps fail, each once, in a run of six that is saved at every second; returns what was tried, from where."""
    changed = {"checkpoint_every": 2, "eval_every": 0, "max_restarts": 2, "steps": 6}
    offline._config = offline._config.model_copy(update={"run": offline._config.run.model_copy(update=changed)})
    log: list[Any] = []

    def ask(method: str, *_: Any, waiting_for: str) -> list[Any]:
        offline._tick()  # as every wait does first
        if method != "step":
            return [{}]
        log.append(offline._version + 1)
        if failures and failures[0][0] == log[-1]:
            raise failures.pop(0)[1]
        return [FIGURES]

    def prepare(checkpoint: Path | None) -> None:
        log.append(checkpoint.name if checkpoint else "start")
        offline._version = int(checkpoint.name.removeprefix("step-")) if checkpoint else 0

    processes = SimpleNamespace(kill=lambda: None, stop=lambda: None)
    vars(offline).update(_ask=ask, _spawn=lambda _: processes, _start=lambda _: None, _prepare=prepare)
    monkeypatch.setattr(controller, "seal", lambda _: None)
    return log


def test_a_run_goes_back_to_its_last_checkpoint_again_and_again_while_it_gets_on(
    offline: OfflineController, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every step has one row. Seen failing without the count set anew by a checkpoint, and with rows kept."""
    died = RankDied("trainer/1 died")
    log = falling(offline, monkeypatch, [(1, died), (4, died), (4, QueueError("gone")), (5, StallError("late"))])
    assert offline.run()["status"] == "done"
    one, two, again, four = ["start", 1], ["start", 1, 2, 3, 4], ["step-000002", 3, 4], ["step-000004", 5, 6]
    assert log == [*one, *two, *again, "step-000002", 3, 4, 5, *four]
    assert [row["step"] for row in rows(tmp_path)] == [1, 2, 3, 4, 5, 6]
    told = [event for name in ("events", "events.orphaned") for event in offline._folder.read(f"{name}.jsonl")]
    restarts = sorted((event for event in told if event["kind"] == "restarted"), key=lambda event: event["time"])
    assert [(event["step"], event["reason"]) for event in restarts] == [
        (0, "trainer/1 died"),
        (2, "trainer/1 died"),
        (2, "gone"),
        (4, "late"),
    ]


@pytest.mark.parametrize(
    ("failures", "tried"),
    [
        ([(3, RankDied("rank"))] * 3, 3),
        ([(3, FruitlessError("no batch"))], 1),
        ([(3, HandoverError("no engine is left"))], 1),
    ],
)
def test_a_run_ends_where_it_does_not_get_on_or_would_not(
    offline: OfflineController, monkeypatch: pytest.MonkeyPatch, failures: list[tuple[int, Exception]], tried: int
) -> None:
    error = failures[-1][1]
    log = falling(offline, monkeypatch, list(failures))
    with pytest.raises(type(error), match=str(error)):
        offline.run()
    assert log.count(3) == tried


class WritingRanks(FakeRanks):
    """Writes a checkpoint only when it is told to, or fails to."""

    def __init__(self, config: Any, *, looks: int = 10**9, error: Exception | None = None) -> None:
        """Take note of how often a save is looked at before it ends, and of how the first one does."""
        super().__init__(config)
        self.looks, self.error = looks, error

    def asking(self, method: str, *args: Any, timeout_s: float, wait_s: float = 0.0) -> Iterator[list[Any]]:
        self.asked.append((method, *args[:1], timeout_s))
        if method == "save":
            error, self.error = self.error, None
            for _ in range(self.looks):
                yield []
            if error is not None:
                raise error
            args[0].mkdir()
        yield [7]


def saving_beside(
    offline: OfflineController, monkeypatch: pytest.MonkeyPatch, ranks: WritingRanks, **run: Any
) -> list[Any]:
    """Have a run of six steps be saved at every second, beside the others; returns what was tried and said."""
    log = falling(offline, monkeypatch, [])
    changed = {"checkpoint_beside": True, "keep_checkpoints": 9} | run
    offline._config = offline._config.model_copy(update={"run": offline._config.run.model_copy(update=changed)})
    monkeypatch.setattr(offline._view, "print", lambda text, **_: log.append(text))
    monkeypatch.setattr(controller, "_SETTLE_S", 0.0)
    offline._ranks = ranks
    return log


def saved_steps(offline: OfflineController) -> list[int]:
    return [int(path.name.removeprefix("step-")) for path in sorted(offline._folder.checkpoints.iterdir())]


def test_steps_are_trained_while_one_is_saved_and_only_the_end_waits(
    offline: OfflineController, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A save that falls due meanwhile is left out. A checkpoint is told of when it is there; the last is nobody's copy.

    Seen failing with a save that is waited for, at once or at step 4, with two at once, and with an end that waits
    without a word.
    """
    ranks = WritingRanks(offline._config, looks=30)
    log = saving_beside(offline, monkeypatch, ranks)
    there: list[tuple[int, list[str]]] = []
    step = offline._step

    def watched_step() -> bool:
        there.append((offline._version + 1, sorted(path.name for path in offline._folder.checkpoints.iterdir())))
        return step()

    vars(offline)["_step"] = watched_step
    assert offline.run()["status"] == "done"
    assert [word for word in log if isinstance(word, int)] == [1, 2, 3, 4, 5, 6]
    assert there[2:] == [(number, [".step-000002.tmp"]) for number in (3, 4, 5, 6)]
    copies = [args[0] for method, *args in ranks.asked if method == "snapshot"]
    assert copies == [True, False]
    assert saved_steps(offline) == [2, 6]
    events = [event["step"] for event in offline._folder.read("events.jsonl") if event["kind"] == "checkpoint"]
    assert events == [2, 6]
    left_out = "step 4 is not saved: an earlier save is still being written: its manifest"
    waits = "waiting for the save of step 2 (run.save_timeout_s=600) ..."
    assert [log.count(words) for words in (left_out, waits)] == [1, 1]


@pytest.mark.parametrize(
    "error", [StallError("late: trainer/1 in save"), OSError(errno.EIO, "broken"), RankDied("trainer/1 died")]
)
def test_a_save_that_fails_beside_the_steps_is_of_its_step_and_ends_nothing(
    offline: OfflineController, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """Seen failing with an error that is raised in the step that is trained meanwhile."""
    log = saving_beside(offline, monkeypatch, WritingRanks(offline._config, looks=2, error=error))
    assert offline.run()["status"] == "done"
    assert [word for word in log if isinstance(word, int)] == [1, 2, 3, 4, 5, 6]
    assert f"the save of step 2 failed: {error}" in log
    assert saved_steps(offline) == [4, 6]


def test_a_save_that_was_given_up_and_still_hangs_keeps_no_step_waiting(
    offline: OfflineController, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those due meanwhile are left out. Seen failing with a snapshot asked of a rank that is writing still."""
    ranks = WritingRanks(offline._config, looks=2, error=StallError("late: trainer/1 in save"))
    answers = iter([{}, {"trainer/1": "in save since 9 s"}])
    monkeypatch.setattr(ranks, "busy", lambda: next(answers, {}), raising=False)
    log = saving_beside(offline, monkeypatch, ranks)
    assert offline.run()["status"] == "done"
    assert "step 4 is not saved: an earlier save is still being written: trainer/1 in save since 9 s" in log
    assert saved_steps(offline) == [6]


def test_an_end_does_not_wait_again_for_a_save_that_was_given_up_and_still_hangs(
    offline: OfflineController, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a notice there is no time for it. Seen failing with a snapshot asked of the rank that is writing still."""
    ranks = WritingRanks(offline._config, looks=2, error=StallError("late: trainer/1 in save"))
    saving_beside(offline, monkeypatch, ranks)

    def on_step(row: Any) -> None:
        ranks.doing = {"trainer/1": "in save since 9 s"} if row["step"] == 3 else ranks.doing
        if row["step"] == 5:
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(Interrupted) as stopped:
        offline.run(on_step)
    assert str(stopped.value.__cause__).endswith("an earlier save is still being written: trainer/1 in save since 9 s")
    assert [method for method, *_ in ranks.asked] == ["snapshot", "save"]
    for number in signals.NOTICES:  # which the end of a process that was told to end ignores
        signal.signal(number, signal.SIG_DFL)


def test_the_manifest_of_a_checkpoint_has_a_deadline(
    offline: OfflineController, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seen failing without one: a disk that hangs held the run for ever (I6)."""
    saving_beside(offline, monkeypatch, WritingRanks(offline._config, looks=0), save_timeout_s=0.1)
    hung = threading.Event()
    monkeypatch.setattr(controller, "seal", lambda _: hung.wait(5.0))
    with pytest.raises(StallError, match=r"manifest of .*step-000000.* within run\.save_timeout_s=0\.1 s"):
        offline._save()
    assert not hung.is_set()
    hung.set()


def test_a_save_beside_the_steps_has_a_deadline_that_names_who_is_late() -> None:
    """Whoever looks; until then nothing is waited for. Seen failing without one."""
    ranks = Ranks.__new__(Ranks)
    handle = SimpleNamespace(work=SimpleNamespace(remote=lambda *_: "never"))
    vars(ranks).update(handles={"trainer/1": handle}, wait=lambda calls, _: list(calls.pending))
    vars(ranks)["describe"] = lambda late: f"{', '.join(late)} in save since 9 s (write)"
    saving = ranks.asking("save", "folder", timeout_s=0.05)
    assert next(saving) == []
    with pytest.raises(StallError, match=r"must save within 0\.05 s; late: trainer/1 in save since 9 s"):
        for _ in saving:
            pass


@pytest.mark.parametrize("stop", [signal.SIGINT, signal.SIGTERM])
def test_who_stops_a_run_amid_a_save_gets_both_checkpoints(
    offline: OfflineController, monkeypatch: pytest.MonkeyPatch, stop: signal.Signals
) -> None:
    """Seen failing with an end that leaves the first one unfinished."""
    saving_beside(offline, monkeypatch, WritingRanks(offline._config, looks=30), checkpoint_every=3)

    def on_step(row: Any) -> None:
        if row["step"] == 4:
            os.kill(os.getpid(), stop)

    with pytest.raises(Interrupted):
        offline.run(on_step)
    assert saved_steps(offline) == [3, 5]
    for number in signals.NOTICES:  # which the end of a process that was told to end ignores
        signal.signal(number, signal.SIG_DFL)


@pytest.mark.parametrize(("error", "back_at", "saved"), [(None, 2, [2, 4, 6]), (RankDied("trainer/1 died"), 0, [2, 6])])
def test_a_run_goes_back_once_a_save_beside_it_is_over(
    offline: OfflineController, monkeypatch: pytest.MonkeyPatch, error: Exception | None, back_at: int, saved: list[int]
) -> None:
    """To the step that is saved by then, or to the one before. Seen failing with a look at what is there already."""
    log = saving_beside(offline, monkeypatch, WritingRanks(offline._config, looks=30, error=error))
    fails: list[Exception] = [RankDied("trainer/1 died")]
    ask: Callable[..., list[Any]] = offline._ask

    def failing(method: str, *args: Any, waiting_for: str) -> list[Any]:
        if method == "step" and offline._version == 2 and fails:
            raise fails.pop()
        return ask(method, *args, waiting_for=waiting_for)

    vars(offline)["_ask"] = failing
    assert offline.run()["status"] == "done"
    assert f"back at step {back_at}" in log
    assert saved_steps(offline) == saved


@pytest.mark.parametrize("why", ["Ctrl-C", "on_step"])
def test_what_stopped_a_run_is_its_last_word_and_in_the_summary(
    offline: OfflineController, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    """Seen failing with batch systems' notices alone, and with a Ctrl-C for both."""
    falling(offline, monkeypatch, [])

    def on_step(row: Any) -> bool:
        if why == "Ctrl-C" and row["step"] == 1:
            os.kill(os.getpid(), signal.SIGINT)
        return why == "Ctrl-C"

    with pytest.raises(Interrupted):
        offline.run(on_step)
    said = offline._view._console.file.getvalue()  # type: ignore[attr-defined]
    assert said.endswith(f"saved step-000002 after {why}\n")
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["status"], summary["stopped_by"]) == ("interrupted", why)


def test_a_node_that_is_out_of_reach_is_not_waited_for(
    offline: OfflineController, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = falling(offline, monkeypatch, [(3, RankDied("rank"))])
    placement = SimpleNamespace(out_of_reach=lambda: ["node-2"], with_nodes=lambda error: error)
    monkeypatch.setattr(offline, "_places", SimpleNamespace(placement=placement, head_is_lost=lambda: False))
    with pytest.raises(RankDied):
        offline.run()
    assert log == ["start", 1, 2, 3]


def test_an_export_that_always_fails_ends_the_run(offline: OfflineController, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last step is saved again each time, which is no progress. Seen going on for ever."""
    falling(offline, monkeypatch, [])
    exports = []

    def asking(method: str, *args: Any, timeout_s: float, wait_s: float) -> Iterator[list[Any]]:
        if method == "export":
            exports.append(args)
            raise RankDied("no memory")
        yield [7]

    vars(offline._ranks)["asking"] = asking
    with pytest.raises(RankDied, match="no memory"):
        offline.run()
    assert len(exports) == 3


def test_a_notice_while_a_run_goes_back_ends_it_at_once(
    offline: OfflineController, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All there is is saved. Seen failing with a start that goes on to its end."""
    log = falling(offline, monkeypatch, [(3, RankDied("rank"))])

    def start(checkpoint: Path | None) -> None:
        if checkpoint is not None:
            os.kill(os.getpid(), signal.SIGTERM)
            log.append("started all the same")

    vars(offline)["_start"] = start
    with pytest.raises(KeyboardInterrupt):
        offline.run()
    assert log == ["start", 1, 2, 3]
    for number in signals.NOTICES:  # which the end of a process that was told to end ignores
        signal.signal(number, signal.SIG_DFL)


@pytest.mark.parametrize("failure", [StallError("still missing: trainer/1"), RankDied("trainer/1 did not start")])
def test_a_start_that_takes_too_long_is_not_tried_again(
    offline: OfflineController, monkeypatch: pytest.MonkeyPatch, failure: Exception
) -> None:
    """One whose process died is. Seen failing with minutes of waiting for a node that is gone, three times over."""
    falling(offline, monkeypatch, [(3, RankDied("rank"))])
    starts: list[Any] = []

    def start(checkpoint: Path | None) -> None:
        starts.append(checkpoint)
        if len(starts) > 1:
            raise failure

    vars(offline)["_start"] = start
    with pytest.raises(type(failure), match=str(failure)):
        offline.run()
    assert len(starts) == (2 if isinstance(failure, StallError) else 3)


@pytest.mark.parametrize("error", [ZeroDivisionError("in a callback"), SystemExit("of a callback")])
def test_what_a_callback_raises_ends_the_run_saved(
    offline: OfflineController, tmp_path: Path, error: BaseException
) -> None:
    """Once the step under way is trained; the caller gets what was raised.

    Seen failing with it raised where the callback is called: amid a step, without a checkpoint or a summary.
    """

    def ask(method: str, *_: Any, waiting_for: str) -> list[Any]:
        offline._tick()  # a wait, in which the step before is told of
        return [FIGURES]

    def on_step(row: Any) -> None:
        told.append(row["step"])
        raise error

    told: list[int] = []
    processes = SimpleNamespace(kill=lambda: None)
    vars(offline).update(_ask=ask, _spawn=lambda _: processes, _start=lambda _: None, _prepare=lambda _: None)
    offline._config = offline._config.model_copy(
        update={"run": offline._config.run.model_copy(update={"eval_every": 0})}
    )
    with pytest.raises(type(error), match="a callback"):
        offline.run(on_step)
    assert told == [1]
    assert [row["step"] for row in rows(tmp_path)] == [1, 2]
    assert offline._folder.newest_checkpoint().name == "step-000002"
    status = json.loads((tmp_path / "run" / "summary.json").read_text())["status"]
    assert status == f"failed: {type(error).__name__}: {error}"
