"""What a verifier worker says about held-out completions."""

import asyncio
from types import SimpleNamespace
from typing import Any

from areal_lite.actors.verifier import VerifierActor
from areal_lite.types import Prompt, Score
from areal_lite.verify.protocol import Reply, failed


def test_a_held_out_score_is_the_total_with_its_parts_and_metrics() -> None:
    """Seen failing with the total alone, in a run whose evaluations had no parts."""
    scored = Reply(1.0, step_rewards=[(3, 0.5)], parts={"right": 1.0}, metrics={"words": 2.0})
    replies = {"a": scored, "b": failed("timeout", "")}

    async def score(prompt: Prompt, texts: list[str], **_: Any) -> list[Reply]:
        return [replies[text] for text in texts]

    actor: Any = VerifierActor.__new__(VerifierActor)
    actor._verifiers = SimpleNamespace(score=score)
    prompts = [Prompt(prompt_id="p/0/1", text="", token_ids=(1,), answer="")] * 2
    assert asyncio.run(actor.score(prompts, ["a", "b"], [(), ()])) == [
        Score(reward=1.5, parts={"right": 1.0}, metrics={"words": 2.0}),
        Score(failure="timeout"),
    ]
