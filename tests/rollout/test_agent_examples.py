"""The agents of examples/agents: one on OpenAI's SDK and one on curl do the same."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
from agent_builders import trained
from places import ROOT

from areal_lite.config.plugins import find_function
from areal_lite.rollout.commands import run_command

FOLDER = ROOT / "examples" / "agents"


@pytest.mark.parametrize(
    "agent",
    [
        find_function(f"{FOLDER}/calculator.py:agent", kind="workflow"),
        functools.partial(run_command, command=str(FOLDER / "calculator.sh"), memory_mb=4096),
    ],
)
@pytest.mark.parametrize(("says", "reward"), [("#12", 1.0), ("=2#2", 0.0), ("7#12 13+1", 0.0)])
def test_the_calculator_answers_a_turn_that_ends_with_a_question(
    agent: Callable[..., Any], says: str, reward: float
) -> None:
    """Its words never train, all others do. Seen failing with a prompt sent without them."""
    sample, _ = trained(agent, ["3+4?", ";7+5?", says], template=None)
    assert sample.score is not None
    assert sample.score.reward == reward
    assert [m["content"] for m in sample.messages] == ["3+4?", "7", ";7+5?", "12", says]
    assert sample.branches == ()


def test_sums_come_with_solutions_that_ask_rightly_and_forget_every_carry_else() -> None:
    """Seen failing with carries kept."""
    make = find_function(f"{FOLDER}/calculator.py:rows", kind="source")
    rows = {split: list(make(split)) for split in ("train", "eval")}
    assert not {row["question"] for row in rows["train"]} & {row["question"] for row in rows["eval"]}
    for row in rows["eval"]:
        for step in "".join(turn["content"] for turn in row["demonstration"]).partition("#")[0].split(";"):
            left, right, total = map(int, step.replace("?", "+").replace("=", "+").split("+"))
            lost = 0 if "?" in step or left % 10 + right < 10 else 10
            assert total == left + right - lost
