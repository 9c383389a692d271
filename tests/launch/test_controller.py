"""The controllers' order of things, with processes that are only told about."""

import io
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console
from run_folders import new_run_folder

from areal_lite.config.recipe import parse_config
from areal_lite.errors import HandoverError, StallError
from areal_lite.launch.run import online, parity
from areal_lite.launch.run.collector import Collector
from areal_lite.launch.run.evaluation import Evaluations
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
