"""Figures of several workers as one; losses and errors, each reported once."""

from types import SimpleNamespace
from typing import Any

from areal_lite.events import EventBuffer
from areal_lite.launch.run.collector import Collector
from areal_lite.launch.run.restarts import Change, State

FIRST = {
    "calls": 10, "timeouts": 1, "restarts": 2, "busy": 1, "waiting": 0,
    "failures": {"timeout": 1}, "latency_p50_s": 0.01, "latency_p95_s": 0.5,
}  # fmt: skip
SECOND = {
    "calls": 5, "timeouts": 0, "restarts": 0, "busy": 0, "waiting": 3,
    "failures": {"timeout": 1, "nan": 2}, "latency_p50_s": 0.02, "latency_p95_s": 0.3,
}  # fmt: skip


class Watched:
    """A collector of a cluster that reports what a test sets; keeps the printed lines and the written events."""

    def __init__(self) -> None:
        self.lines, self.events = list[str](), list[Any]()
        self.restarts = SimpleNamespace(changes=[], has_restarted=lambda name: name != "rollout/1")
        self.gauges: dict[str, Any] = {}
        cluster: Any = SimpleNamespace(restarts=self.restarts, collect=lambda: ([], self.gauges))
        self.recorder: Any = SimpleNamespace(feed=self.events.extend)
        view: Any = SimpleNamespace(print=lambda text, style="": self.lines.append(text))
        own = [EventBuffer("controller")]
        self.collector = Collector(cluster, recorder=self.recorder, view=view, logs="logs", own=own)

    def collect(self, gauges: dict[str, Any], *changes: Change) -> None:
        self.gauges = gauges
        self.restarts.changes += changes
        self.collector.collect(force=True)


def test_what_a_lost_worker_has_done_counts_on_beside_its_successor() -> None:
    """Its loss and its return are said and written once. Seen failing with counts that go back to 0, at any loss.

    A verifier's end is that of the run, and is told then. Seen failing with a line here, too.
    """
    watched = Watched()
    collector = watched.collector

    def collect(tokens: int | None, figures: dict[str, Any], *changes: Change) -> None:
        rollout = {} if tokens is None else {"tokens": tokens}
        watched.collect({"rollout/0": rollout, "verifier/0": {"verifiers": {"sum": figures}}}, *changes)

    collect(100, {**FIRST, "waiting": 3})
    collect(None, SECOND, *(Change(name, State.RESTARTING, "it died") for name in ("rollout/0", "verifier/0")))
    assert collector.tokens() == 100
    collect(7, SECOND, *(Change("rollout/0", state) for state in (State.JOINING, State.HEALTHY)))
    collect(7, SECOND, Change("rollout/1", State.HEALTHY))
    collect(None, SECOND, *(Change(name, State.DEAD, "it fails") for name in ("rollout/0", "verifier/2")))
    collect(3, SECOND)
    assert collector.tokens() == 110
    assert collector.figures()["verifiers"]["sum"] == {
        "calls": 15, "timeouts": 1, "restarts": 2, "busy": 0, "waiting": 3,
        "failures": {"timeout": 2, "nan": 2}, "latency_p50_s": 0.02, "latency_p95_s": 0.5,
    }  # fmt: skip
    failed = "such samples are dropped and counted; see logs/verifier-*.log"
    assert watched.lines == [
        f"a verification failed (timeout): {failed}",
        *(f"{name} died (it died); restarting" for name in ("rollout/0", "verifier/0")),
        f"a verification failed (nan): {failed}",
        "rollout/0 is back",
        "rollout/1 has joined",
        "rollout/0 died (it fails); the other workers continue",
    ]
    assert [(event["kind"], event["worker"]) for event in watched.events] == [
        ("lost", "rollout/0"), ("lost", "verifier/0"), ("joining", "rollout/0"),
        ("rejoined", "rollout/0"), ("rejoined", "rollout/1"), ("lost", "rollout/0"), ("lost", "verifier/2"),
    ]  # fmt: skip


def test_the_first_error_of_each_reason_is_said_once() -> None:
    """Seen failing with episodes and failed verifications that nobody hears of, and with a line for each worker."""
    watched = Watched()
    told = {f"rollout/{n}": {"errors": {"workflow:KeyError": f"workflow:KeyError: {n}"}} for n in range(2)}
    scoring = {"verifiers": {"sum": FIRST | {"failures": {"nan": 2}}, "watch/truth": SECOND}}
    for gauges in ({"verifier/0": scoring}, {"verifier/1": scoring, "rollout/0": told["rollout/0"]}, told):
        watched.collect(gauges)
    assert watched.collector.figures()["verifier_failures"] == {"nan": 4}
    assert watched.lines == [
        "a verification failed (nan): such samples are dropped and counted; see logs/verifier-*.log",
        "watch/truth failed (timeout, nan): its figures lack those samples; see logs/verifier-*.log",
        "an episode failed (workflow:KeyError: 0): such samples are dropped and counted; see logs/rollout-*.log",
    ]


def test_calls_served_unconstrained_are_counted_and_said_once() -> None:
    """Beside the share of the contexts that engines had in their caches. Seen failing with neither in a row."""
    watched = Watched()
    one = {"unconstrained": {"tool_choice": 2}, "context_tokens": 100, "cached_tokens": 40}
    two = {"unconstrained": {"tool_choice": 1, "temperature": 5}, "context_tokens": 100, "cached_tokens": 20}
    watched.collect({})
    before = watched.collector.figures()
    assert (before["prefix_cache_hit_fraction"], before["agent_calls_unconstrained"]) == (None, {})
    watched.collect({"rollout/0": one})
    watched.collect({"rollout/0": one, "rollout/1": two})
    found = watched.collector.figures()
    assert found["prefix_cache_hit_fraction"] == 0.3
    assert found["agent_calls_unconstrained"] == {"tool_choice": 3, "temperature": 5}
    (line,) = watched.lines
    assert line.startswith("agents' calls ask for tool_choice: they are served without")
