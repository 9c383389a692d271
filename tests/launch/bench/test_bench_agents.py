"""Measuring agents: both sides hold the same dialogue, and what is aimed at is read from the right rows."""

import asyncio
from typing import Any

import pytest
from episode_builders import TOKENIZER, make_prompt
from scripted_engine import ScriptedEngine

from areal_lite.config.recipe import parse_config
from areal_lite.launch.bench.agents import AgentsBench, _Lender, _measure, summarise, targets

SETTINGS = AgentsBench(repeats=1, measured_s=0.3, warm_s=0.3, latencies_s=(0.0,), turns=3, turn_tokens=4)


class Counting(ScriptedEngine):
    """Notes how long contexts are, and what is asked of a turn."""

    def __init__(self) -> None:
        super().__init__(tokenizer=TOKENIZER, token_s=0.001, eos_id=-1)
        self.asked: set[tuple[int, int]] = set()

    async def generate(self, prompt_ids: Any, sampling: Any) -> Any:
        self.asked.add((len(prompt_ids), sampling.max_new_tokens))
        return await super().generate(prompt_ids, sampling)


@pytest.mark.parametrize("side", ["workflow", "agent", "socket"])
def test_both_sides_hold_the_same_dialogue(side: str) -> None:
    """Three turns of four tokens with the environment's character between them, and slots that are taken."""
    engine = Counting()
    config = parse_config(
        {"model": {"max_context": 96}, "rollout": {"slots": 4, "max_new_tokens": 15}, "queue": {"samples_per_group": 2}}
    )

    async def measured() -> tuple[float, float]:
        return await _measure(SETTINGS, config, (side, 0.0), engine=engine, lender=_Lender(make_prompt))

    rate, full = asyncio.run(measured())
    assert rate > 0
    assert 0 < full <= 1
    start = len(make_prompt().token_ids)
    assert engine.asked == {(start, 4), (start + 5, 4), (start + 10, 4)}


def test_an_agent_is_compared_in_each_repeat_and_slots_where_the_environment_is_slow() -> None:
    rows = summarise(
        {
            ("workflow", 0.0): [(100.0, 1.0), (50.0, 0.9)],
            ("agent", 0.0): [(90.0, 1.0), (50.0, 0.9)],
            ("workflow", 1.0): [(20.0, 0.9), (20.0, 0.9)],
            ("agent", 1.0): [(10.0, 0.7), (10.0, 0.9)],
        }
    )
    assert [row["over"] for row in rows] == [[], [0.9, 1.0], [], [0.5, 0.5]]
    cost, slots = targets(rows)
    assert (cost["at_least"], cost["low"], cost["high"]) == (0.9, 0.9, 1.0)
    assert (slots["at_least"], slots["low"], slots["high"]) == (0.8, 0.7, 0.9)
