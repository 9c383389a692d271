"""Figures of several workers as one, and an evaluation in words."""

from types import SimpleNamespace
from typing import Any

import pytest
from fake_ray import FakeRay, Reference
from ledger_builders import FakeClock

from areal_lite.actors import calls as calls_module
from areal_lite.events import EventBuffer
from areal_lite.launch.run.collector import Collector, _together
from areal_lite.launch.run.evaluation import Evaluations, in_words
from areal_lite.launch.run.restarts import Change, State
from areal_lite.verify.protocol import Reply

FIRST = {
    "calls": 10, "timeouts": 1, "restarts": 2, "busy": 1, "waiting": 0,
    "failures": {"timeout": 1}, "latency_p50_s": 0.01, "latency_p95_s": 0.5,
}  # fmt: skip
SECOND = {
    "calls": 5, "timeouts": 0, "restarts": 0, "busy": 0, "waiting": 3,
    "failures": {"timeout": 1, "nan": 2}, "latency_p50_s": 0.02, "latency_p95_s": 0.3,
}  # fmt: skip


def test_counts_add_up_and_the_worst_latency_stands() -> None:
    assert _together([FIRST, SECOND]) == {
        "calls": 15, "timeouts": 1, "restarts": 2, "busy": 1, "waiting": 3,
        "failures": {"timeout": 2, "nan": 2}, "latency_p50_s": 0.02, "latency_p95_s": 0.5,
    }  # fmt: skip


def test_what_a_lost_worker_has_done_counts_on_beside_its_successor() -> None:
    """Its loss and its return are said and written once. Seen failing with counts that go back to 0.

    A verifier's end is that of the run, and is told then. Seen failing with a line here, too.
    """
    said, written = list[str](), list[Any]()
    cluster: Any = SimpleNamespace(restarts=SimpleNamespace(changes=[], has_restarted=lambda name: name != "rollout/1"))
    recorder: Any = SimpleNamespace(feed=written.extend)
    view: Any = SimpleNamespace(print=lambda text, style="": said.append(text))
    collector = Collector(cluster, recorder=recorder, view=view, logs="logs", own=[EventBuffer("controller")])

    def collect(tokens: int | None, figures: dict[str, Any], *changes: Change) -> None:
        cluster.restarts.changes += changes
        gauges = {
            "rollout/0": {} if tokens is None else {"tokens": tokens},
            "verifier/0": {"verifiers": {"sum": figures}},
        }
        cluster.collect = lambda: ([], gauges)
        collector.collect(force=True)

    collect(100, {**FIRST, "waiting": 3})
    collect(None, SECOND, *(Change(name, State.RESTARTING, "it died") for name in ("rollout/0", "verifier/0")))
    assert collector.tokens() == 100
    collect(7, SECOND, *(Change("rollout/0", state) for state in (State.JOINING, State.HEALTHY)))
    collect(7, SECOND, Change("rollout/1", State.HEALTHY))
    collect(7, SECOND, *(Change(f"{role}/2", State.DEAD, "it fails") for role in ("rollout", "verifier")))
    assert collector.tokens() == 107
    together = collector.verifiers()["verifiers"]["sum"]
    assert (together["calls"], together["waiting"], together["busy"]) == (15, SECOND["waiting"], SECOND["busy"])
    assert said == [
        *(f"{name} died (it died); restarting" for name in ("rollout/0", "verifier/0")),
        "rollout/0 is back",
        "rollout/1 has joined",
        "rollout/2 died (it fails); the other workers continue",
    ]
    assert [(event["kind"], event["worker"]) for event in written] == [
        ("lost", "rollout/0"), ("lost", "verifier/0"), ("joining", "rollout/0"),
        ("rejoined", "rollout/0"), ("rejoined", "rollout/1"), ("lost", "rollout/2"), ("lost", "verifier/2"),
    ]  # fmt: skip


def test_the_first_error_of_each_reason_is_said_once() -> None:
    """Seen failing with episodes that nobody hears of, and with a line for each worker that meets it."""
    said = list[str]()
    told = {f"rollout/{n}": {"errors": {"workflow:KeyError": f"workflow:KeyError: {n}"}} for n in range(2)}
    gauges = [{"verifier/0": {"failures": {"nan": 2}}}, {"rollout/0": told["rollout/0"]}, told]
    cluster: Any = SimpleNamespace(restarts=SimpleNamespace(changes=[]), collect=lambda: ([], gauges.pop(0)))
    nobody: Any = SimpleNamespace(feed=lambda _: None)
    view: Any = SimpleNamespace(print=lambda text, style="": said.append(text))
    collector = Collector(cluster, recorder=nobody, view=view, logs="logs", own=[])
    for _ in range(3):
        collector.collect(force=True)
    assert said == [
        "a verification failed (nan): such samples are dropped and counted; see logs/verifier-*.log",
        "an episode failed (workflow:KeyError: 0): such samples are dropped and counted; see logs/rollout-*.log",
    ]


def test_calls_served_unconstrained_are_counted_and_said_once() -> None:
    """Beside the share of the contexts that engines had in their caches. Seen failing with neither in a row."""
    said = list[str]()
    one = {"unconstrained": {"tool_choice": 2}, "context_tokens": 100, "cached_tokens": 40}
    two = {"unconstrained": {"tool_choice": 1, "temperature": 5}, "context_tokens": 100, "cached_tokens": 20}
    gauges = [{}, {"rollout/0": one}, {"rollout/0": one, "rollout/1": two}]
    cluster: Any = SimpleNamespace(restarts=SimpleNamespace(changes=[]), collect=lambda: ([], gauges.pop(0)))
    view: Any = SimpleNamespace(print=lambda text, style="": said.append(text))
    collector = Collector(cluster, recorder=SimpleNamespace(feed=lambda _: None), view=view, logs="", own=[])
    collector.collect(force=True)
    assert collector.engines() == {"prefix_cache_hit_fraction": None, "agent_calls_unconstrained": {}}
    for _ in range(2):
        collector.collect(force=True)
    counts = {"tool_choice": 3, "temperature": 5}
    assert collector.engines() == {"prefix_cache_hit_fraction": 0.3, "agent_calls_unconstrained": counts}
    assert len(said) == 1
    assert said[0].startswith("agents' calls ask for tool_choice: they are served without")


RESULT = {
    "step": 20,
    "accuracy": 0.25,
    "called": "accuracy",
    "by_source": {"a": 0.5, "b": 0.0},
    "parts": {},
    "metrics": {},
    "problems": 8,
    "failures": 0,
    "left_out": 0,
    "versions": [20],
}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, "held-out accuracy at step 20: 0.250 [a 0.500, b 0.000] (8 problems, versions [20])"),
        (
            {"by_source": {"a": 0.25}, "failures": 2, "called": "mean reward"},
            "held-out mean reward at step 20: 0.250 (8 problems, versions [20], 2 could not be scored)",
        ),
        (
            {"by_source": {"a": 0.25}, "parts": {"right": 0.5}, "metrics": {"words": 12.0}},
            "held-out accuracy at step 20: 0.250 (8 problems, versions [20]); right 0.500; words 12.000",
        ),
        (
            {"by_source": {"a": 0.25}, "left_out": 40},
            "held-out accuracy at step 20: 0.250 (8 problems, versions [20], 40 not evaluated)",
        ),
        (
            {"problems": 0, "failures": 9},
            "held-out mean reward at step 20: none of 9 completions could be scored",
        ),
    ],
)
def test_an_evaluation_in_words(changes: dict[str, Any], words: str) -> None:
    """An evaluation in which nothing was scored is no accuracy of 0. Seen failing as `0.000 (0 problems`."""
    assert in_words(RESULT | changes) == words


def test_a_held_out_figure_has_its_standard_error() -> None:
    """Of rewards 0, 0, 1, 1: 0.5 over the root of 4; of 1 and 1: none. Seen failing with the root left out.

    Where an earlier one was no accuracy, it is none either. Seen failing with a name from its own rewards alone. Parts
    and metrics are means over those who have some.
    """
    nobody: Any = None
    recorder: Any = SimpleNamespace(evaluations={0: {}, 10: {"called": "mean reward"}})
    rewards = {"a/0": 0.0, "a/1": 0.0, "b/0": 1.0, "b/1": 1.0}
    pairs: Any = [(SimpleNamespace(prompt_id=name), None) for name in rewards]
    replies = [Reply(reward, parts={"right": 1.0}) for reward in rewards.values()]
    replies[0] = Reply(0.0, parts={"right": 0.0}, metrics={"calls": 3.0})
    evaluations = Evaluations(nobody, [], recorder=recorder, lane=nobody, view=nobody)
    found = evaluations._result(pairs, replies)
    assert (found["parts"], found["metrics"]) == ({"right": 0.75}, {"calls": 3.0})
    assert found["standard_errors"] == {"a": 0.0, "b": 0.0, "accuracy": 0.25}
    assert found["called"] == "mean reward"


def test_an_evaluation_that_finds_no_worker_is_said_to_be_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """They may all be on their way back. Seen failing without a word, and with StopIteration for a verifier."""
    monkeypatch.setattr(calls_module, "ray", FakeRay(FakeClock()))
    said, engines = list[str](), dict[str, Any]()
    cluster: Any = SimpleNamespace(engines=SimpleNamespace(handles=engines), verifiers={})
    view: Any = SimpleNamespace(print=said.append)
    nobody: Any = None
    evaluations = Evaluations(cluster, [nobody], recorder=nobody, lane=nobody, view=view)
    evaluations.begin(3)
    engines["rollout/0"] = SimpleNamespace(evaluate=SimpleNamespace(remote=lambda _: Reference(lambda: [nobody])))
    evaluations.begin(4)
    evaluations.poll()
    assert not evaluations
    assert said == [
        "the evaluation of step 3 was lost: no rollout worker is there",
        "the evaluation of step 4 was lost: no verifier worker is there",
    ]


def test_an_evaluation_cut_short_keeps_what_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two of three parts of 40 problems. Seen failing with all of it lost, however long it had taken."""
    monkeypatch.setattr(calls_module, "ray", FakeRay(FakeClock()))
    monkeypatch.setattr(calls_module, "time", SimpleNamespace(monotonic=FakeClock()))
    said, kept, parts = list[str](), list[dict[str, Any]](), list[list[Any]]()

    def evaluate(prompts: list[Any]) -> Reference:
        parts.append(prompts)
        is_done = len(parts) < 3
        return Reference(lambda: [None] * len(prompts), is_ready=lambda: is_done)

    def score(prompts: list[Any], samples: list[Any]) -> Reference:
        return Reference(lambda: [Reply(1.0) for _ in prompts])

    engine, verifier = SimpleNamespace(evaluate=SimpleNamespace(remote=evaluate)), SimpleNamespace()
    verifier.score = SimpleNamespace(remote=score)
    handles, verifiers = {"rollout/0": engine}, {"verifier/0": verifier}
    cluster: Any = SimpleNamespace(engines=SimpleNamespace(handles=handles), verifiers=verifiers)
    recorder: Any = SimpleNamespace(
        evaluations={}, evaluation=lambda step, accuracy, **_: kept.append({step: accuracy})
    )
    view: Any = SimpleNamespace(print=lambda text, style="": said.append(text))
    prompts: Any = [SimpleNamespace(prompt_id=f"eval/{number}") for number in range(40)]
    evaluations = Evaluations(cluster, prompts, recorder=recorder, lane=EventBuffer("controller"), view=view)
    evaluations.begin(5)
    evaluations.poll()
    evaluations.cut_short()
    assert not evaluations
    done = len(parts[0]) + len(parts[1])
    assert said == [f"held-out accuracy at step 5: 1.000 ({done} problems, versions [], {40 - done} not evaluated)"]
    assert kept == [{5: 1.0}]
    parts.clear()
    parts += [[], []]  # now none gets done
    evaluations.begin(6)
    evaluations.poll()
    evaluations.cut_short()
    assert len(said) == 1
