"""Evaluations beside a run: what is scored, in figures and in words, and what is lost."""

from types import SimpleNamespace
from typing import Any

import pytest
from fake_ray import Reference, fake_time

from areal_lite.launch.run.evaluation import Evaluations
from areal_lite.verify.protocol import Reply, failed


class Evaluated:
    """Evaluations of held-out problems with given replies, by one engine and one verifier, unless they are dead."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, replies: dict[str, Reply]) -> None:
        fake_time(monkeypatch)
        self.replies, self.lines, self.parts = replies, list[str](), list[list[Any]]()
        self.num_done = 99
        """Parts that the engine completes."""
        self.before: dict[int, dict[str, str]] = {}
        self.events: list[dict[str, Any]] = []
        self.kept: dict[int, float] = {}
        engine = SimpleNamespace(evaluate=SimpleNamespace(remote=self._evaluate))
        verifier = SimpleNamespace(score=SimpleNamespace(remote=self._score))
        self.engines, self.verifiers = {"rollout/0": engine}, {"verifier/0": verifier}
        cluster: Any = SimpleNamespace(engines=SimpleNamespace(handles=self.engines), verifiers=self.verifiers)
        recorder: Any = SimpleNamespace(evaluations=self.before, evaluation=self._keep)
        lane: Any = SimpleNamespace(emit=lambda kind, **result: self.events.append(result))
        view: Any = SimpleNamespace(print=lambda text, style="": self.lines.append(text))
        prompts: Any = [SimpleNamespace(prompt_id=name) for name in replies]
        self.evaluations = Evaluations(cluster, prompts, recorder=recorder, lane=lane, view=view)

    def _evaluate(self, prompts: list[Any]) -> Reference:
        self.parts.append(prompts)
        is_done = len(self.parts) <= self.num_done
        return Reference(lambda: [None] * len(prompts), is_ready=lambda: is_done)

    def _score(self, prompts: list[Any], samples: list[Any]) -> Reference:
        return Reference(lambda: [self.replies[prompt.prompt_id] for prompt in prompts])

    def _keep(self, step: int, accuracy: float, **_: Any) -> None:
        self.kept[step] = accuracy


def test_a_held_out_figure_has_its_standard_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of rewards 0, 0, 1, 1: 0.5 over the root of 4; of 1 and 1: none. Seen failing with the root left out.

    After an evaluation that was no accuracy, it is none either. Seen failing with a name from its own rewards alone.
    Parts and metrics are means over the replies that have some.
    """
    replies = {name: Reply(float(name[0] == "b"), parts={"right": 1.0}) for name in ("a/0", "a/1", "b/0", "b/1")}
    replies["a/0"] = Reply(0.0, parts={"right": 0.0}, metrics={"calls": 3.0})
    run = Evaluated(monkeypatch, replies)
    run.before |= {0: {}, 10: {"called": "mean reward"}}
    run.evaluations.begin(20)
    for _ in range(2):
        run.evaluations.poll()
    (found,) = run.events
    assert (found["parts"], found["metrics"]) == ({"right": 0.75}, {"calls": 3.0})
    assert found["standard_errors"] == {"a": 0.0, "b": 0.0, "accuracy": 0.25}
    assert found["called"] == "mean reward"


def test_an_evaluation_that_finds_no_worker_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """All may be restarting. Seen failing without a line, and with StopIteration for a verifier."""
    run = Evaluated(monkeypatch, {"a/0": Reply(1.0)})
    engines = dict(run.engines)
    run.engines.clear()
    run.evaluations.begin(3)
    run.engines |= engines
    run.verifiers.clear()
    run.evaluations.begin(4)
    run.evaluations.poll()
    assert not run.evaluations
    assert run.lines == [
        "the evaluation of step 3 was lost: no rollout worker is there",
        "the evaluation of step 4 was lost: no verifier worker is there",
    ]


def test_an_evaluation_in_which_nothing_was_scored_is_no_accuracy_of_0(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen failing as `0.000 (0 problems`."""
    run = Evaluated(monkeypatch, dict.fromkeys(("a/0", "a/1"), failed("timeout", "late")))
    run.evaluations.begin(20)
    for _ in range(2):
        run.evaluations.poll()
    assert run.lines == ["held-out mean reward at step 20: none of 2 completions could be scored"]


@pytest.mark.parametrize("num_done", [0, 2])
def test_an_evaluation_cut_short_keeps_what_is_done(monkeypatch: pytest.MonkeyPatch, num_done: int) -> None:
    """Two of three parts of 40 problems, or none. Seen failing with all of it lost, however long it had taken.

    One that falls due meanwhile is skipped: seen failing without a line.
    """
    run = Evaluated(monkeypatch, {f"eval/{number}": Reply(1.0) for number in range(40)})
    run.num_done = num_done
    run.evaluations.begin(5)
    run.evaluations.begin(6)
    assert run.lines.pop() == "the evaluation of step 6 is skipped: that of step 5 is still running"
    run.evaluations.poll()
    run.evaluations.cut_short()
    assert not run.evaluations
    done = sum(map(len, run.parts[:num_done]))
    line = f"held-out accuracy at step 5: 1.000 ({done} problems, versions [], {40 - done} not evaluated)"
    assert run.lines == [line] * bool(num_done)
    assert run.kept == ({5: 1.0} if num_done else {})
