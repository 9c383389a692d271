"""The verifiers of a recipe: which of them scores a row, how several add up, and that each has its own pool."""

import asyncio
from contextlib import asynccontextmanager

import pytest
from episode_builders import in_loop
from ledger_builders import make_sample
from pool_builders import make_prompt

from areal_lite.config.data import DataConfig
from areal_lite.config.verifier import RewardWatchConfig, VerifierConfig
from areal_lite.errors import VerifierError
from areal_lite.verify.protocol import Reply
from areal_lite.verify.verifier_set import VerifierSet, weighted_sum

SOURCE = """
import os, time
from areal_lite.verify import VerifyResult

def constant(prompt, completion, answer, *, value=1.0, **row):
    assert "verifier" not in row and "workflow" not in row
    return value

def parts(prompt, completion, answer, *, tag="t", **row):
    if completion == "bad":
        raise KeyError("kg")
    steps = [(len(completion), 1.0)]
    return VerifyResult(0.5, parts={tag: 2.0}, step_rewards=steps, feedback="hm", metrics={"n": 3})

def nothing(prompt, completion, answer, **row):
    return VerifyResult(None)

def turns(prompt, completion, answer, *, messages=(), **row):
    return len(messages)

def stuck(prompt, completion, answer, **row):
    time.sleep(600)
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "v.py"
    path.write_text(SOURCE)
    return path


@asynccontextmanager
async def running_set(*, watch=None, also=(), **options):
    watched = RewardWatchConfig(**(watch or {}))
    verifiers = VerifierSet(VerifierConfig(**{"timeout_s": 20.0, **options}), watch=watched, also=also)
    try:
        await verifiers.start()
        yield verifiers
    finally:
        await verifiers.close()


@in_loop
async def test_each_row_is_scored_by_the_verifier_it_names(file):
    """Seen failing with the row's column ignored, and with it passed on to the function."""
    expected = [
        ({}, 0.25),
        ({"verifier": "half", "workflow": "w"}, 0.5),
        ({"verifier": "exact"}, 1.0),
        ({"verifier": "nobody"}, "unknown_verifier:nobody"),
        ({"verifier": 3}, "unknown_verifier:3"),
        ({"verifier": f"{file}:constant"}, f"unknown_verifier:{file}:constant"),  # a row may not choose code
    ]
    named = {"half": {"function": f"{file}:constant", "arguments": {"value": 0.5}}}
    async with running_set(function=f"{file}:constant", arguments={"value": 0.25}, named=named) as verifiers:
        for row, result in expected:
            (reply,) = await verifiers.score(make_prompt("7", **row), ["7"])
            assert (reply.failure or reply.reward) == result
        assert set(verifiers.gauges()["verifiers"]) == {"v.py:constant", "half", "exact"}


@in_loop
async def test_several_verifiers_add_up_with_their_weights(file):
    """0.5 * 1 (math) + 2 * 0.5 (parts); a failed member fails the sample."""
    named = {"math": {"function": f"{file}:constant"}, "tags": {"function": f"{file}:parts"}}
    async with running_set(function={"math": 0.5, "tags": 2.0}, named=named) as verifiers:
        good, bad = await verifiers.score(make_prompt("7"), ["seven", "bad"])
    parts = {"math": 1.0, "tags": 0.5, "tags/t": 2.0}
    assert good == Reply(1.5, parts, ((5, 2.0),), "tags: hm", {"tags/n": 3.0})
    assert bad.failure == "tags:exception:KeyError"


def test_a_weighted_sum_orders_the_steps_of_all():
    """Seen failing with unweighted steps."""
    said = {"a": Reply(1.0, step_rewards=((9, 1.0), (2, 1.0))), "b": Reply(-1.0, step_rewards=((5, 1.0),))}
    total = weighted_sum(said, {"a": 2.0, "b": 0.5})
    assert (total.reward, total.step_rewards) == (1.5, ((2, 2.0), (5, 0.5), (9, 2.0)))


@pytest.mark.parametrize("reply", [Reply(3e38), Reply(1e38, step_rewards=((1, 1e38),))])
def test_a_sum_that_float32_cannot_hold_is_no_reward(reply):
    """2 * 3e38, and 2 * (1e38 + 1e38). Seen failing without `checked` in `weighted_sum`."""
    assert weighted_sum({"a": reply}, {"a": 2.0}).failure == "inf"


@in_loop
async def test_a_verifier_alone_in_a_sum_still_has_its_weight(file):
    async with running_set(function={f"{file}:constant": 0.5}) as verifiers:
        (reply,) = await verifiers.score(make_prompt("7"), ["x"])
    assert (reply.reward, reply.parts) == (0.5, {"v.py:constant": 1.0})


@in_loop
async def test_held_out_prompts_have_a_judge_of_their_own_or_are_scored_as_in_training(file):
    """Their own whatever their row says, and without arguments. Seen failing with the arguments of `function`."""

    async def rewards_with(**eval_function):
        options = {"function": f"{file}:constant", "arguments": {"value": 0.25}} | eval_function
        async with running_set(**options) as verifiers:
            return [
                (await verifiers.score(make_prompt("7", **row), ["x"], held_out=held_out))[0].reward
                for row, held_out in [({}, False), ({}, True), ({"verifier": "exact"}, True)]
            ]

    assert await rewards_with(eval_function=f"{file}:constant") == [0.25, 1.0, 1.0]
    assert await rewards_with() == [0.25, 0.25, 0.0]


@in_loop
async def test_messages_reach_the_function_where_there_are_any(file):
    said = [{"role": "assistant", "content": "4"}, {"role": "user", "content": "higher"}]
    async with running_set(function=f"{file}:turns") as verifiers:
        replies = await verifiers.score(make_prompt("7"), ["a", "b"], messages=[said, ()])
    assert [reply.reward for reply in replies] == [2.0, 0.0]


@in_loop
async def test_a_stuck_verifier_holds_up_nobody_elses_calls(file):
    """Seen failing with one pool for all."""
    named = {"stuck": {"function": f"{file}:stuck", "timeout_s": 600.0}}
    async with running_set(function="exact", named=named) as verifiers:
        waiting = asyncio.create_task(verifiers.score(make_prompt("7", verifier="stuck"), ["x"] * 4))
        while not verifiers.gauges()["verifiers"]["stuck"]["busy"]:
            await asyncio.sleep(0.01)
        replies = await asyncio.gather(*(verifiers.score(make_prompt("7"), ["7"] * 8) for _ in range(20)))
        assert not waiting.done()
        waiting.cancel()
        gauges = verifiers.gauges()
    assert [reply.reward for batch in replies for reply in batch] == [1.0] * 160
    assert (gauges["calls"], gauges["busy"]) == (160, 1)
    assert gauges["verifiers"]["exact"]["calls"] == 160
    assert gauges["verifiers"]["stuck"]["waiting"] == 3


@in_loop
async def test_watched_rewards_are_metrics_of_held_out_replies_and_of_a_share_of_the_groups(file):
    """Two of them, one of which fails at "bad"; the share is of 4,000 groups, and always the same ones.

    Seen failing with a failure as a 0, and with all groups.
    """
    groups = [f"train/0/{number}#1" for number in range(4000)]
    watched = {"truth": {"function": "exact"}, "other": {"function": f"{file}:parts", "arguments": {"tag": "u"}}}
    options = {"function": f"{file}:constant", "arguments": {"value": 0.25}}
    async with running_set(watch={"verifiers": watched, "share": 0.25}, **options) as verifiers:
        replies = await asyncio.gather(
            *(verifiers.judge(make_prompt("7"), make_sample(text=text)) for text in ("7", "bad"))
        )
        assert 900 < sum(map(verifiers.is_watched, groups)) < 1100
        gauges = verifiers.gauges()["verifiers"]
    assert [reply.reward for reply in replies] == [0.25, 0.25]
    assert [reply.metrics for reply in replies] == [{"watch/truth": 1.0, "watch/other": 1.5}, {"watch/truth": 0.0}]
    assert gauges["watch/other"]["failures"] == {"exception:KeyError": 1}
    async with running_set(function="exact") as verifiers:
        assert not any(map(verifiers.is_watched, groups))


@in_loop
async def test_a_verifier_that_a_source_chooses_starts_with_the_others():
    """`judge` without its base_url fails at once, not at the first row. Seen failing with `also` not looked at."""
    data = DataConfig(mix={"a": {"source": "arith"}, "b": {"source": "arith", "verifier": "judge"}})
    with pytest.raises(VerifierError, match=r"(?s)cannot be prepared with \{\}: .*base_url"):
        async with running_set(function="exact", also=data.chosen_verifiers):
            pass


# --- names and settings ---


def test_an_evaluation_alone_needs_only_its_own_verifier():
    config = VerifierConfig(
        function="reward_model", arguments={"model": "gone"}, eval_function="exact", named={"x": {"function": "a:b"}}
    )
    reduced = config.for_evaluation()
    assert (reduced.function, reduced.arguments, reduced.named) == ("exact", {}, {})
    assert VerifierConfig(function="exact").for_evaluation() == VerifierConfig(function="exact")


@in_loop
async def test_what_does_not_apply_is_no_fault_of_the_verifiers(file):
    """Seen failing with such calls counted: the run ended."""
    async with running_set(function=f"{file}:nothing", max_failure_share=0.1) as verifiers:
        for _ in range(8):
            replies = await verifiers.score(make_prompt("7"), ["x"] * 4)
            assert {reply.failure for reply in replies} == {"not_applicable"}
