"""Calls of actors: failures are data, who is late is known by name, and nothing is waited for twice."""

import functools
import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from fake_ray import FakePlaces, Reference, failing, fake_time
from ledger_builders import FakeClock

from areal_lite import node
from areal_lite.actors.calls import Calls, Poller, describe, has_died
from areal_lite.config.recipe import parse_config
from areal_lite.errors import EngineError, QueueError, RankDied, StallError, TrainerError
from areal_lite.launch.run import ranks as ranks_module
from areal_lite.launch.run.ranks import Ranks


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> FakeClock:
    return fake_time(monkeypatch, ranks_module)


def answering(value: Any) -> Reference:
    return Reference(lambda: value)


def silent() -> Reference:
    return Reference(lambda: None, is_ready=lambda: False)


def actor(*references: Reference, busy: str | None = "") -> Any:
    """Answers any method, with one reference after another, the last again and again; with None no ping."""
    following = itertools.chain(references, itertools.repeat(references[-1]))

    def remote(*_: Any, **__: Any) -> Reference:
        return next(following)

    method = SimpleNamespace(remote=remote)
    ping = SimpleNamespace(remote=lambda: silent() if busy is None else answering(busy))
    return SimpleNamespace(progress=method, work=method, ping=ping)


def test_answers_come_by_name_and_one_that_fails_takes_nothing_from_the_others() -> None:
    error = EngineError("the engine died")
    calls = Calls({"a": answering(1), "b": failing(error), "c": answering(3)})
    assert dict(calls.answers(5.0)) == {"a": None, "b": error, "c": None}
    assert calls.values == {"a": 1, "c": 3}
    assert calls.pending == {}


def test_who_is_late_is_waited_for_once(clock: FakeClock) -> None:
    late = silent()
    calls = Calls({"a": answering(1), "b": late, "c": silent()})
    assert dict(calls.answers(5.0)) == {"a": None}
    assert list(calls.pending) == ["b", "c"]
    assert clock.now == 5.0
    late.is_ready = lambda: True
    assert dict(calls.answers(5.0)) == {"b": None}


def test_an_actor_that_owes_an_answer_is_not_asked_again() -> None:
    """Else a hung one would collect a call a second. Seen failing with every actor asked every time."""
    owed = silent()
    asked = {"slow": actor(owed, failing(AssertionError("asked twice"))), "quick": actor(answering(1), answering(2))}
    poller = Poller("progress")
    assert poller.poll(asked, wait_s=1.0) == ({"quick": 1}, {})
    owed.answer, owed.is_ready = lambda: 7, lambda: True
    assert poller.poll(asked, wait_s=1.0) == ({"quick": 2, "slow": 7}, {})


def test_a_silent_actor_is_waited_for_once_and_its_silence_is_measured(clock: FakeClock) -> None:
    """Else one that hangs costs every step the wait for it. Seen failing with a wait at each poll."""
    owed = silent()
    asked = {"slow": actor(owed), "quick": actor(answering(1))}
    poller = Poller("progress")
    for _ in range(3):
        assert poller.poll(asked, wait_s=2.0) == ({"quick": 1}, {})
    assert clock.now == 2.0
    clock.now = 60.0
    assert poller.silent() == {"slow": 60.0}
    owed.is_ready = lambda: True
    poller.poll(asked, wait_s=2.0)
    assert poller.silent() == {}


MONITOR = """1 worker(s) were killed due to the node running low on memory. Memory on the node (IP: 10.0.0.2, ID: a6) \
was 15.29GB used / 16.00GB limit (0.955625)
Ray killed 1 worker(s) based on the killing policy
Top 10 memory users: PID\tMEM(GB)\tCOMMAND
25845\t9.12\tpython leak.py
27519\t0.06\tray::DashboardAgent
Refer to the documentation"""


def test_a_kill_by_rays_memory_monitor_is_a_death_with_its_cause() -> None:
    """Its error is no `RayActorError`. Seen failing with a run that ends although restarts are left."""
    killed = ray.exceptions.OutOfMemoryError(MONITOR)
    assert has_died(killed)
    assert not has_died(ray.exceptions.RayTaskError("start", "", EngineError("no memory")))
    with pytest.raises(RankDied, match=r"trainer/0 died: Ray's memory monitor killed it") as ended:
        make_ranks(rank_0=actor(failing(killed))).ask("work", timeout_s=5.0)
    for words in ("15.29GB used / 16.00GB limit", "9.12 GB, python leak.py", "RAY_memory_usage_threshold"):
        assert words in str(ended.value)
        assert words in describe(killed)
    with pytest.raises(EngineError, match=r"rollout/1 did not start: Ray's memory monitor killed it"):
        no_places().wait_until_started(Calls({"rollout/1": failing(killed)}), print)


def test_a_start_that_is_late_or_fails_is_told_by_name() -> None:
    said: list[str] = []
    wait = functools.partial(no_places().wait_until_started, report=said.append)
    starting = Calls({"queue": answering(None), "rollout/1": silent()})
    with pytest.raises(StallError, match=r"start_timeout_s=300 s; still missing: rollout/1. Fix: see logs"):
        wait(starting)
    assert said == ["queue is ready, waiting for rollout/1"]
    with pytest.raises(EngineError, match=r"rollout/1 did not start: no memory \(log: logs/rollout-1.log\)"):
        wait(Calls({"rollout/1": failing(EngineError("no memory"))}))
    # What a run goes back for is told apart. Seen failing with an engine to blame for the queue.
    for name, kind in {"queue": QueueError, "trainer/0": RankDied, "rollout/1": EngineError}.items():
        with pytest.raises(kind, match=rf"{name} did not start: its process ended \(log: logs/"):
            wait(Calls({name: failing(ray.exceptions.RayActorError())}))


def no_places() -> FakePlaces:
    return FakePlaces(parse_config({}))


def make_ranks(**handles: Any) -> Ranks:
    """Ranks whose actors are these."""
    config = parse_config({"trainer": {"ranks": len(handles)}})
    return Ranks(object, FakePlaces(config, lambda lane: handles[f"rank_{lane[-1]}"]))


def test_a_rank_that_died_is_blamed_though_another_failed_first() -> None:
    """Rank 0 fails, as rank 1 left it alone. Seen failing without the look for a dead rank."""
    dead = failing(ray.exceptions.RayActorError())
    gone = ray.exceptions.RayError("the connection was reset")
    ranks = make_ranks(rank_0=actor(failing(gone), answering(1)), rank_1=actor(silent(), dead))
    with pytest.raises(TrainerError, match=r"trainer/1 died: its process ended; log: logs/trainer-1.log"):
        ranks.ask("work", timeout_s=5.0)


def test_an_actor_that_dies_for_want_of_memory_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank at work, and whoever starts. Seen failing without the kernel's word in either."""
    monkeypatch.setattr(node, "_oom_kills", lambda: "oom_kill 1000000")
    dead = failing(ray.exceptions.RayActorError())
    with pytest.raises(RankDied, match=r"died: its process ended \(the kernel has killed .* for lack of memory"):
        make_ranks(rank_0=actor(dead)).ask("work", timeout_s=5.0)
    with pytest.raises(EngineError, match=r"start: its process ended \(the kernel has killed .* for lack of memory"):
        no_places().wait_until_started(Calls({"rollout/1": dead}), print)


def test_ranks_that_are_late_are_named_with_what_they_do() -> None:
    """One that does not even answer that is the one that hangs. Seen failing with the names alone."""
    waits = actor(silent(), busy="in work since 5 s (all_reduce)")
    ranks = make_ranks(rank_0=actor(answering(1)), rank_1=waits, rank_2=actor(silent(), busy=None))
    with pytest.raises(
        StallError, match=r"must work within 5 s; late: trainer/1 in work .*\(all_reduce\); trainer/2 do"
    ):
        ranks.ask("work", timeout_s=5.0)


def test_a_call_that_is_only_polled_has_a_deadline(clock: FakeClock) -> None:
    """A save beside the steps. Seen failing without one."""
    saving = make_ranks(rank_0=actor(silent(), busy="in save since 9 s")).asking("save", timeout_s=5.0)
    assert next(saving) == []
    clock.now = 6.0
    with pytest.raises(StallError, match=r"must save within 5 s; late: trainer/0 in save since 9 s"):
        next(saving)


def test_ctrl_c_is_heard_while_ranks_are_late() -> None:
    """A rank hung in the middle of a hand-over. Seen failing with one wait of the whole time: heard after it."""
    ranks, heard = make_ranks(rank_0=actor(silent())), list[float]()
    ranks.meanwhile = lambda: heard.append(ranks_module.time.monotonic())
    with pytest.raises(StallError):
        ranks.ask("work", timeout_s=210.0)
    assert heard[0] < 1
    assert len(heard) > 210
