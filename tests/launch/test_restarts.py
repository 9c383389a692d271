"""Who is started again when: the policy, with a clock that is turned and processes that are only told about."""

import re
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from fake_ray import Reference, fake_time
from online_runs import Actors

from areal_lite.config.recipe import parse_config
from areal_lite.errors import EngineError, QueueError, QueueTimeout, RankDied, VerifierError
from areal_lite.launch.run import restarts as restarts_module
from areal_lite.launch.run.cluster import Cluster
from areal_lite.launch.run.restarts import Restarts, State
from areal_lite.sample_queue.access import Role

A, B, V = "rollout/0", "rollout/1", "verifier/0"
TIMEOUT_S = 60.0


class Starts:
    """Workers whose start takes a while, fails, never ends, or finds no node; `run` looks after them for a while."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, most: int, takes_s: float = 5.0) -> None:
        self.takes_s, self.fails, self.has_node = takes_s, False, True
        self.begun: list[tuple[float, str]] = []
        self.killed: list[Any] = []
        self.clock = fake_time(monkeypatch, restarts_module)
        monkeypatch.setattr(restarts_module, "kill", lambda *handles: self.killed.extend(filter(None, handles)))
        self.restarts = Restarts(self._spawn, most=most, start_timeout_s=TIMEOUT_S)

    def run(self, seconds: float) -> None:
        for _ in range(int(2 * seconds)):
            self.clock.now += 0.5
            self.restarts.poll()

    def times(self) -> list[float]:
        return [time for time, _ in self.begun]

    def _spawn(self, name: str) -> Any:
        if not self.has_node:
            return None
        began = self.clock.now
        self.begun.append((began, name))
        start = Reference(self._result, is_ready=lambda: self.clock.now >= began + self.takes_s)
        return SimpleNamespace(start=SimpleNamespace(remote=lambda: start))

    def _result(self) -> None:
        if self.fails:
            raise EngineError("no memory")


def test_a_worker_starts_again_after_longer_and_longer_until_it_was_too_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """After 1 to 60 s. Seen failing with a pause of 1 s each time, and with one of 64 s."""
    starts = Starts(monkeypatch, most=8, takes_s=0.0)
    restarts = starts.restarts
    for number, pause_s in enumerate((1, 2, 4, 8, 16, 32, 60, 60), start=1):
        lost_at = starts.clock.now
        restarts.lost(A, f"loss {number}")
        assert restarts.states == {A: State.RESTARTING}
        starts.run(70)
        assert starts.times()[-1] == lost_at + pause_s
        assert restarts.states == {A: State.JOINING}
        assert restarts.take("rollout").keys() == {A}
        restarts.back(A)
        assert restarts.states == {}
    restarts.lost(A, "loss 9")
    assert not restarts.awaits("rollout")
    assert restarts.dead == {A: "loss 9"}
    restarts.lost(B, "its first")
    assert restarts.states == {A: State.DEAD, B: State.RESTARTING}
    told = [state for worker, state, _ in restarts.changes if worker == A]
    assert told == [*[State.RESTARTING, State.JOINING, State.HEALTHY] * 8, State.DEAD]


def test_who_was_to_serve_a_queue_that_is_gone_starts_once_more_and_that_is_not_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Seen failing with a worker that is dead of another's death."""
    starts = Starts(monkeypatch, most=1)
    restarts = starts.restarts
    restarts.lost(A, "died")
    starts.run(2)
    restarts.restart_pending()
    assert restarts.states == {A: State.RESTARTING}
    starts.run(6)
    assert (starts.times(), len(starts.killed)) == ([1.0, 2.5], 1)
    assert restarts.ready("rollout") == [A]


def test_an_hour_of_work_clears_the_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run of weeks outlives more deaths than a worker that cannot live. Seen failing with a count for good."""
    starts = Starts(monkeypatch, most=1, takes_s=0.0)
    for worked_s, state in [(0, State.RESTARTING), (3601, State.RESTARTING), (3599, State.DEAD)]:
        starts.clock.now += worked_s
        starts.restarts.lost(A, "died")
        assert starts.restarts.states == {A: state}
        starts.run(2)
        for name in starts.restarts.take("rollout"):
            starts.restarts.back(name)


@pytest.mark.parametrize(
    ("fails", "takes_s", "reason"),
    [
        (True, 5.0, "it did not start: EngineError: no memory"),
        (False, 1e9, "it did not start within run.start_timeout_s=60 s"),
    ],
)
def test_a_start_that_fails_or_never_ends_is_ended_and_counts(
    monkeypatch: pytest.MonkeyPatch, fails: bool, takes_s: float, reason: str
) -> None:
    """Seen failing with a start that is waited for without a deadline."""
    starts = Starts(monkeypatch, most=2, takes_s=takes_s)
    starts.fails = fails
    starts.restarts.lost(A, "died")
    starts.run(200)
    assert len(starts.begun) == len(starts.killed) == 2
    assert starts.restarts.dead == {A: reason}
    assert starts.restarts.handles == {}


# --- the workers of a run ---


class Fleet(Actors):
    """A cluster that serves with two rollout workers and a verifier, whose times pass at once."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, most: int) -> None:
        super().__init__(monkeypatch)
        run = {"max_worker_restarts": most, "stall_timeout_s": 600}
        places = self.places(parse_config({"run": run, "rollout": {"workers": 2}}))
        self.actors, self.is_reached = places.actors, True
        places.placement = SimpleNamespace(reaches=lambda _: self.is_reached)  # type: ignore[assignment]
        self.answers["access"] = lambda: dict.fromkeys(Role, "another")
        self.queue["save"] = lambda: b"state"
        self.queue["status"] = lambda: {"counts": Counter(ready=4, taken=2, waiting=1)}
        self.cluster = Cluster(places, queue_state=None, prompts={}, model_folder=Path())
        self.cluster.start(checkpoint=None, on_progress=lambda _: None)
        self.cluster.serve()
        self.requests.clear()
        for actor in self.actors.values():
            actor.calls.clear()

    @property
    def forgotten(self) -> list[str]:
        """Workers whose leases the queue was told to return."""
        return [values[0] for request, *values in self.requests if request == "forget"]

    def lose(self, worker: str, error: Exception | None = None) -> None:
        self.actors[worker].dies_of = error or ray.exceptions.RayActorError()

    def watch_workers(self, seconds: float = 0.0) -> None:
        self.clock.now += seconds
        self.cluster.check_workers()


def test_a_verifier_worker_that_died_works_again_at_once_and_a_rollout_worker_after_it_joined(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What they held goes back to the queue. One is killed by Ray's memory monitor, which is a death too.

    The collector prints one line for each loss, and nothing else does.

    Seen failing with `run` called before the hand-over, with a verifier that stays dead, with an error of the run, and
    with three lines for a loss.
    """
    fleet = Fleet(monkeypatch, most=1)
    cluster = fleet.cluster
    fleet.lose(A)
    fleet.lose(V, ray.exceptions.OutOfMemoryError("killed"))
    cluster.collect()
    fleet.watch_workers()
    assert sorted(fleet.forgotten) == [A, V]
    assert caplog.messages == []
    assert cluster.states() == {"healthy": 1, "restarting": 2}
    assert cluster.is_halted
    fleet.watch_workers(1)
    assert cluster.states() == {"healthy": 2, "joining": 1}
    assert cluster.verifiers[V].calls == ["start", "run"]
    assert not cluster.is_halted
    assert not cluster.awaits_publication
    joining = cluster.admit_ready_engines()
    assert joining == [A]
    assert cluster.engines.handles[A].calls == ["start"]
    cluster.activate(joining)
    assert cluster.engines.handles[A].calls == ["start", "run"]
    assert cluster.states() == {"healthy": 3}
    fleet.lose(V)
    with pytest.raises(VerifierError, match=r"verifier/0 ended: .*; log: logs/verifier-0.log"):
        fleet.watch_workers()


def test_a_verifier_that_is_of_no_use_is_not_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its process is well, the function is not. Seen failing with any end of a worker taken for a death."""
    fleet = Fleet(monkeypatch, most=3)
    fleet.lose(V, VerifierError("failed in 11 of its last 20 calls"))
    with pytest.raises(VerifierError, match=r"verifier/0 ended: VerifierError: failed in 11 of its last 20 calls"):
        fleet.watch_workers()


def test_a_worker_that_died_with_the_queue_is_not_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen failing with the queue told first, which it cannot be."""
    fleet = Fleet(monkeypatch, most=1)

    def forget(worker: str) -> None:
        raise QueueError("the sample queue died")

    fleet.cluster.queue = SimpleNamespace(forget=forget)  # type: ignore[assignment]
    for worker in (A, V):
        fleet.lose(worker)
        with pytest.raises(QueueError):
            fleet.watch_workers()
    assert fleet.cluster.restarts.states == {A: State.RESTARTING, V: State.RESTARTING}


@pytest.mark.parametrize("transport", ["ipc", "nccl"])
def test_over_ipc_ranks_load_their_models_once_the_engines_have_measured_their_memory(
    monkeypatch: pytest.MonkeyPatch, transport: str
) -> None:
    """Otherwise all start together. Seen failing with ranks that start with the engines over `ipc` too."""
    actors = Actors(monkeypatch)
    # A worker's start has no arguments, a rank's names the method.
    actors.answers["start"] = lambda *of_a_rank: of_a_rank or actors.log.append("a worker has started")
    config = parse_config({"run": {"device": "cuda"}, "weights": {"transport": transport}, "rollout": {"workers": 1}})
    cluster = Cluster(actors.places(config), queue_state=None, prompts={}, model_folder=Path())
    cluster.start(checkpoint=None, on_progress=lambda _: None)
    started, rank = actors.log.index("a worker has started"), actors.log.index(("trainer/0", "start"))
    assert (started < rank) == (transport == "ipc")


@pytest.mark.parametrize("is_trained", [False, True])
def test_a_queue_that_died_is_replaced_once_for_each_batch(monkeypatch: pytest.MonkeyPatch, is_trained: bool) -> None:
    """It knows the batch before workers come, and lends after. Seen failing with each of the three left out.

    A rank that died with it, a death before the first copy, and a node whose Ray starts nothing, are left to the
    controller. Seen failing with a queue that is waited for there.
    """
    fleet = Fleet(monkeypatch, most=3)
    cluster, requests, rank = fleet.cluster, fleet.requests, fleet.actors["trainer/0"]

    def die() -> None:
        fleet.lose("queue")
        try:
            fleet.watch_workers()
        finally:
            fleet.actors["queue"].dies_of = None

    for batch_id in ("", "step-2"):
        cluster.mark_batch_taken(batch_id)
        with pytest.raises(QueueError):
            die()
        fleet.clock.now += 10
        cluster.copy_queue()
    cluster.trained = "step-2" if is_trained else "step-1"
    fleet.is_reached = False
    with pytest.raises(QueueError):
        die()
    assert len(requests) == 1
    fleet.is_reached = True
    die()
    replay = ("complete_step", "step-2") if is_trained else ("take", "step-2", 0.0)
    assert requests == [("save",), ("move_to", "another"), replay, ("open_admission",)]
    assert [fleet.actors[name].calls[-1] for name in (A, B, V, "trainer/0")] == ["reconnect"] * 4
    assert cluster.replaced
    figures = {name: cluster.replaced[name] for name in ("leases_kept", "leases_lost", "waiting", "finished")}
    assert figures == {"leases_kept": 9, "leases_lost": 3, "waiting": 1, "finished": 6}
    cluster.copy_queue()
    with pytest.raises(QueueError):
        die()
    fleet.clock.now += 10
    cluster.mark_batch_taken("step-3")
    cluster.copy_queue()
    rank.dies_of = ray.exceptions.RayActorError()
    with pytest.raises(RankDied):
        die()


def test_workers_are_added_and_dismissed(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that was dead is started anew, and dies as often as a new one; what the dismissed hold goes back.

    Seen failing with a dismissed worker that is lost, and started again.
    """
    fleet = Fleet(monkeypatch, most=1)
    cluster = fleet.cluster
    for _ in range(2):
        fleet.lose(A)
        fleet.watch_workers()
        fleet.watch_workers(1)
        cluster.activate(cluster.admit_ready_engines())
    assert cluster.restarts.dead.keys() == {A}
    fleet.requests.clear()
    rollout, verifier = Role.ROLLOUT, Role.VERIFIER
    assert cluster.scale({rollout: 3, verifier: 2}) == ([A, "rollout/2", "verifier/1"], [])
    assert cluster.states() == {"healthy": 2, "joining": 3}
    fleet.watch_workers()
    joining = cluster.admit_ready_engines()
    assert joining == [A, "rollout/2"]
    cluster.activate(joining)
    assert cluster.states() == {"healthy": 5}
    assert cluster.scale({rollout: 1, verifier: 1}) == ([], [B, "rollout/2", "verifier/1"])
    fleet.watch_workers(10)
    assert sorted(fleet.forgotten) == [B, "rollout/2", "verifier/1"]
    assert cluster.states() == {"healthy": 2}
    assert cluster.engines.handles.keys() == {A}
    fleet.lose(A)
    fleet.watch_workers()
    assert cluster.states() == {"healthy": 1, "restarting": 1}
    assert cluster.scale({rollout: 1}) == ([], [])
    cluster.scale({rollout: 2})
    assert cluster.scale({rollout: 1}) == ([], [B])
    fleet.watch_workers(10)
    assert cluster.admit_ready_engines() == [A]


@pytest.mark.parametrize("hung", [B, V])
def test_a_worker_that_does_not_report_is_suspect_and_then_replaced(monkeypatch: pytest.MonkeyPatch, hung: str) -> None:
    """After `run.stall_timeout_s`. Until then steps of a second take at most 1.1 times as long as without it.

    Seen failing with a verifier that is waited for at every step, 3 s in place of 1, and never replaced.
    """
    fleet = Fleet(monkeypatch, most=3)
    cluster = fleet.cluster
    report = Reference(lambda: ([], {}), is_ready=lambda: False)
    {**cluster.engines.handles, **cluster.verifiers}[hung].collect = SimpleNamespace(remote=lambda: report)
    cluster.collect()
    assert cluster.states() == {"healthy": 2, "suspect": 1}
    report.is_ready = lambda: True
    cluster.collect()
    assert cluster.states() == {"healthy": 3}
    report.is_ready = lambda: False
    begun = fleet.clock.now
    for _ in range(steps := 540):
        fleet.clock.now += 1
        cluster.collect()
    assert fleet.clock.now - begun <= 1.1 * steps
    fleet.clock.now = begun + 597
    cluster.collect()
    assert cluster.states() == {"healthy": 2, "suspect": 1}
    fleet.clock.now += 5
    cluster.collect()
    assert cluster.states() == {"healthy": 2, "restarting": 1}
    assert re.match(
        rf"{hung} .*its process hangs: no report for 6.. s", " ".join(map(str, cluster.restarts.changes[-1]))
    )


def test_who_is_lost_while_another_loss_is_told_is_not_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A node takes a worker, the queue and another worker: the second is lost as the new queue is told of the first.

    Seen failing with an answer that is taken up twice, a KeyError that ends the run.
    """
    fleet = Fleet(monkeypatch, most=3)
    cluster = fleet.cluster
    fleet.lose(A)
    fleet.lose(B)

    def forget(worker: str) -> None:
        if worker == A:
            cluster.engines.drop(B, "it did not connect to the new queue")

    cluster.queue = SimpleNamespace(forget=forget)  # type: ignore[assignment]
    fleet.watch_workers()
    assert cluster.states() == {"healthy": 1, "restarting": 2}


@pytest.mark.parametrize(("takes_s", "seen"), [(0.0, ["step-1", "step-2", "step-3"]), (6.0, ["step-1", "step-3"])])
def test_a_step_goes_on_while_the_queue_gives_no_copy(
    monkeypatch: pytest.MonkeyPatch, takes_s: float, seen: list[str]
) -> None:
    """It is asked no sooner than after 20 times what that took, where it took long also with the next batch.

    Seen failing with the error raised, with a queue that is asked at every look, and with one that is asked with every
    batch.
    """
    fleet, asked = Fleet(monkeypatch, most=3), list[str]()
    cluster, clock, batch_id = fleet.cluster, fleet.clock, ""
    clock.now = 1.0

    def save() -> bytes:
        asked.append(batch_id)
        clock.now += takes_s
        raise QueueTimeout("no answer")

    cluster.queue = SimpleNamespace(save=save)  # type: ignore[assignment]
    for batch_id in ("step-1", "step-2", "step-3"):
        cluster.mark_batch_taken(batch_id)
        cluster.copy_queue()
        cluster.copy_queue()
        clock.now += 20 * takes_s / 1.5
    assert asked == seen
