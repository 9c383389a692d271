"""Episodes of several turns on an engine that says what the test wants: tokens, versions, room, checks, names."""

import contextlib
import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from episode_builders import TOKENIZER, UNCUT, Failing, Speaker, given_mask, ids, load, make_prompt, play, run, spans_of
from scripted_engine import ScriptedEngine

from areal_lite.errors import EngineError, EpisodeError, PluginError
from areal_lite.rollout.engine import Sampling
from areal_lite.rollout.runner import Workflows, complete_greedily
from areal_lite.types import Sample, Score, StepReward, StopReason
from areal_lite.wire import decode, encode

HERE = "test_workflows"

Messages = Sequence[Mapping[str, str]]


def larger(messages: Messages, row: Mapping[str, Any]) -> tuple[str, bool]:
    """An environment that answers `>>` forever."""
    return ">>", False


async def done_at_c(messages: Messages, row: Mapping[str, Any]) -> tuple[str, bool]:
    return "?" * len(messages), messages[-1]["content"] == "c"


def talk(step: str = "larger", **limits: Any) -> Workflows:
    return load("multi_turn", arguments={"step": f"{HERE}:{step}", "max_turns": 3, **limits})


# --- tokens, log-probabilities and versions ---


def test_spans_follow_the_weights_through_turns_and_given_tokens() -> None:
    """New weights inside the first turn, after its second token, and between the second turn and the third.

        a b $ | > > | c d $ | > > | e $
        0 0 1  -1-1   1 1 1  -1-1   2 2      with version 1 from token 2 on, 2 from token 6 on (given ones not counted)

    Seen failing with given tokens stamped with the version before them, with spans not shifted after given tokens, and
    with log-probabilities of the given tokens taken over from the turn before.
    """
    engine = Speaker(["ab", "cd", "e"], stamps={2: 1, 6: 2})
    sample = play(engine, talk())
    assert sample.token_ids.tolist() == ids("ab$>>cd$>>e$")
    assert spans_of(sample) == [(0, 0, 2), (1, 2, 3), (-1, 3, 5), (1, 5, 8), (-1, 8, 10), (2, 10, 12)]
    # The prompt has 4 tokens; the speaker's log-probability is minus the place in the context.
    assert sample.logprobs.tolist() == [-4, -5, -6, 0, 0, -9, -10, -11, 0, 0, -14, -15]
    assert sample.oldest_version == 0
    assert sample.stop_reason is StopReason.STOP
    assert sample.text == "ab>>cd>>e"
    assert [m["content"] for m in sample.messages] == ["ab", ">>", "cd", ">>", "e"]
    assert [m["role"] for m in sample.messages] == ["assistant", "environment"] * 2 + ["assistant"]


class Routing(Speaker):
    """Has experts for the last `known` tokens of each call but the very last: 100 times the call, plus the place."""

    known: Sequence[int | None]

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> Sample:
        number = len(self.contexts)
        sample = await super().generate(prompt_ids, sampling)
        known, places = self.known[number], np.arange(len(prompt_ids) + sample.num_tokens - 1, dtype=np.uint16)
        routes = None if known is None else (100 * number + places)[-known:, None, None]
        return dataclasses.replace(sample, routes=routes)


@pytest.mark.parametrize(
    ("known", "expected"),
    [
        ((99, 99, 99), [0, 1, 2, 3, 4, 5, 106, 107, 108, 109, 110, 211, 212, 213, 214]),
        ((2, 5, 4), [4, 5, 106, 107, 108, 109, 110, 211, 212, 213, 214]),
        ((99, 2, 99), [109, 110, 211, 212, 213, 214]),
        ((99, 99, None), None),
    ],
)
def test_routes_are_those_of_the_turn_that_first_has_a_token(
    known: Sequence[int | None], expected: list[int] | None
) -> None:
    """Four tokens of a prompt, then `ab$>>cd$>>e$`, the last of which is sent nowhere.

    Seen failing with the routes of a turn's own tokens alone, and with those in front of a gap.
    """
    engine = Routing(["ab", "cd", "e"])
    engine.known = known
    routes = play(engine, talk()).routes
    assert (None if routes is None else routes[:, 0, 0].tolist()) == expected


def test_an_environment_that_is_done_ends_the_episode_and_its_last_words_are_not_kept() -> None:
    """An async step, which gets every turn so far."""
    engine = Speaker(["ab", "c", "never"])
    sample = play(engine, talk("done_at_c"))
    assert sample.text == "ab?c"
    assert sample.messages[-1] == {"role": "assistant", "content": "c"}
    assert len(engine.contexts) == 2


def test_a_single_turn_is_the_engines_sample() -> None:
    """Every field as the engine gave it, one request, and no turns. Seen failing with `messages` filled."""
    sampling = Sampling(max_new_tokens=8, temperature=1.0, seed=100)
    plain = run(lambda: ScriptedEngine().generate((3, 4), sampling))
    prompt = dataclasses.replace(make_prompt(""), token_ids=(3, 4))
    sample = play(ScriptedEngine(), Workflows(), prompt, sampling=Sampling(max_new_tokens=8, temperature=1.0))
    assert sample.token_ids.dtype == plain.token_ids.dtype
    assert sample.logprobs.dtype == plain.logprobs.dtype
    np.testing.assert_array_equal(sample.token_ids, plain.token_ids)
    np.testing.assert_array_equal(sample.logprobs, plain.logprobs)
    assert (sample.spans, sample.stop_reason, sample.text) == (plain.spans, plain.stop_reason, plain.text)
    assert sample.messages == ()


# --- room ---


def test_a_turn_that_is_cut_off_ends_the_episode() -> None:
    """10 tokens: `abc$>>` leaves 4, of `defgh$` they are all. Seen failing with the environment asked once more."""
    asked = []

    async def step(messages: Messages, row: Mapping[str, Any]) -> tuple[str, bool]:
        asked.append(len(messages))
        return ">>", False

    engine, workflows = Speaker(["abc", "defgh", "never"]), talk()
    workflows.loaded["multi_turn"] = (workflows.loaded["multi_turn"][0], {"step": step})
    sample = play(engine, workflows, sampling=Sampling(max_new_tokens=10, temperature=1.0))
    assert asked == [1]
    assert [sampling.max_new_tokens for sampling in engine.samplings] == [10, 4]
    assert sample.token_ids.tolist() == ids("abc$>>defg")
    assert sample.stop_reason is StopReason.LENGTH


def test_a_turn_may_have_a_limit_of_its_own_and_stop_strings() -> None:
    """The environment replies after either. Seen failing with the episode ended at the limit of a turn."""
    sample = play(Speaker(["abcdefgh", "i;j", "k"]), talk(max_turn_tokens=4, stop=["c;", ";"]))
    assert sample.token_ids.tolist() == ids("abcd>>i;>>k$")
    assert (sample.messages[2]["content"], sample.stop_reason) == ("i;", StopReason.STOP)
    sample = play(Speaker(["abc;"]), talk(max_turn_tokens=8, max_turns=1, stop=";"))
    assert (sample.text, sample.stop_reason) == ("abc;", StopReason.STRING)


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ({"max_turns": 0}, "at least 1, got 0 and None"),
        ({"max_turn_tokens": 0}, "at least 1, got 3 and 0"),
        ({"stop": ["a", ""]}, r"at least one character, got \['a', ''\]"),
        ({"max_tokens": 3}, "unexpected keyword argument 'max_tokens'"),
    ],
)
def test_limits_of_turns_are_checked_at_the_start(limits: dict[str, Any], message: str) -> None:
    """Seen failing with the limits looked at in the episode."""
    with pytest.raises(PluginError, match=message):
        talk(**limits)


@pytest.mark.parametrize("limit", [5, 6])
def test_a_reply_that_leaves_no_room_ends_the_episode_as_cut_off(limit: int) -> None:
    """`abc$` and `>>` fill six tokens: no answer has room. The reply is dropped, as nothing trains after it.

    Seen failing with the stop reason of the last turn, `stop`.
    """
    engine = Speaker(["abc", "never"])
    sample = play(engine, talk(), sampling=Sampling(max_new_tokens=limit, temperature=1.0))
    assert sample.token_ids.tolist() == ids("abc$")
    assert sample.stop_reason is StopReason.LENGTH
    assert len(sample.messages) == 1
    assert len(engine.contexts) == 1


@pytest.mark.parametrize(("said", "step", "limit"), [("abc", "larger", 4), ("c", "done_at_c", 3)])
def test_a_last_turn_that_just_fits_is_not_cut_off(said: str, step: str, limit: int) -> None:
    """Four tokens for `abc$`, and the environment is not even asked; three for `c$` and words of an end, `?`.

    Seen failing with the last reply kept at the end, where it says that the room ended the episode.
    """
    exact = Sampling(max_new_tokens=limit, temperature=1.0)
    assert play(Speaker([said]), talk(step), sampling=exact).stop_reason is StopReason.STOP


def test_no_sample_is_longer_than_its_limit() -> None:
    """200 random episodes, some with a row's own limit. Seen failing with the whole room for each turn."""
    workflows = talk(max_turns=4)
    for seed in range(200):
        engine = ScriptedEngine(vocab_size=40, tokenizer=TOKENIZER)
        row = {"max_new_tokens": 7} if seed % 2 else {}
        sampling = Sampling(max_new_tokens=3 + seed % 40, temperature=1.0)
        prompt = make_prompt(f"{seed}?", **row)
        sample = play(engine, workflows, prompt, sampling=sampling)
        assert sample.num_tokens <= row.get("max_new_tokens", sampling.max_new_tokens)
        assert not given_mask(sample)[-1]


# --- what a workflow may return ---


async def makes_up(engine: Any, row: Mapping[str, Any]) -> list[Any]:
    turn = await engine.generate(engine.prompt_ids)
    return [dataclasses.replace(turn, text="a")]


async def leaves_out(engine: Any, row: Mapping[str, Any]) -> list[Any]:
    plan = await engine.generate(engine.prompt_ids)
    return [await engine.generate([*engine.prompt_ids, *plan.token_ids])]


async def swaps(engine: Any, row: Mapping[str, Any]) -> list[Any]:
    first = await engine.generate(engine.prompt_ids)
    given = engine.given(">")
    second = await engine.generate([*engine.prompt_ids, *first.token_ids, *given.token_ids])
    return [first, engine.given("<"), second]


async def returns_text(engine: Any, row: Mapping[str, Any]) -> Any:
    return (await engine.generate(engine.prompt_ids)).text


async def returns_given(engine: Any, row: Mapping[str, Any]) -> list[Any]:
    return [engine.given("hello")]


async def forgets_the_prompt(engine: Any, row: Mapping[str, Any]) -> list[Any]:
    return [await engine.generate(engine.encode("other"))]


async def overflows(engine: Any, row: Mapping[str, Any]) -> list[Any]:
    return [await engine.generate([*engine.prompt_ids, *engine.encode("x" * 100)])]


async def replies_to_nobody(engine: Any, row: Mapping[str, Any]) -> list[Any]:
    return [engine.reply([{"role": "assistant", "content": "made up"}], ">")]


async def raises(engine: Any, row: Mapping[str, Any]) -> list[Any]:
    raise KeyError("level")


async def scores_with_none(engine: Any, row: Mapping[str, Any]) -> Any:
    return [await engine.generate(engine.prompt_ids)], Score(reward=0.0, metrics=cast(Any, {"found": None}))


async def changes_logprobs(engine: Any, row: Mapping[str, Any]) -> list[Any]:
    turn = await engine.generate(engine.prompt_ids)
    turn.logprobs[0] = 0.0
    return [turn]


@pytest.mark.parametrize(
    ("workflow", "message"),
    [
        (makes_up, r"ValueError: turn 0, 'a', must be as engine.generate .* got a turn that it did not return"),
        (leaves_out, r"ValueError: turn 0, 'b', .* for the 4 tokens before it, got one generated after 6 tokens"),
        (swaps, r"ValueError: turn 2, 'b', .* for the 7 tokens before it, got one generated after 7 tokens"),
        (returns_text, r"TypeError: a workflow must return a list of turns, got 'a'"),
        (returns_given, r"ValueError: an episode must have a turn of the model's, got 1 turns"),
        (forgets_the_prompt, r"ValueError: engine.generate takes the whole context"),
        (overflows, r"ValueError: a turn needs room for a token, got room for 0 of 100"),
        (replies_to_nobody, r"ValueError: a reply must follow a message that the model produced, got 'made up'"),
        (raises, r"KeyError: 'level'"),
        (scores_with_none, r"ValueError: .* expected metrics\['found'\]: a number; got None"),
        (changes_logprobs, r"ValueError: .*read-only"),
    ],
)
def test_a_wrong_workflow_is_refused_with_a_reason(workflow: Any, message: str) -> None:
    """One that exits: test_workflow_worker.py.

    Seen failing without `_check_origin`: samples with log-probabilities of other contexts.
    """
    with pytest.raises(EpisodeError, match=f"workflow:{message}"):
        play(Speaker(["a", "b"]), load(f"{HERE}:{workflow.__name__}"))


def test_a_workflows_own_score_holds_numbers_like_a_verifiers() -> None:
    """As the queue reads it. Seen failing with a refusal: expected `float | null`, got `bool`."""

    async def scores(engine: Any, row: Mapping[str, Any]) -> Any:
        turn = await engine.generate(engine.prompt_ids)
        figures: Any = {"reward": np.bool_(turn.text == "a"), "parts": {"right": True}, "metrics": {1: 2}}
        return [turn], Score(step_rewards=(StepReward(token=0, value=0.5),), **figures)

    sample = play(Speaker(["a"]), Workflows(default="own", loaded={"own": (scores, {})}))
    score = decode(encode(sample), Sample).score
    assert (score.total, score.parts, score.metrics) == (1.5, {"right": 1.0}, {"1": 2.0})


def test_given_tokens_may_come_first_and_turns_may_follow_each_other() -> None:
    """What a custom workflow may do; neighbours of one version are one span, given tokens at the end are cut off.

    Seen failing with the ids of numpy arrays on their way to an engine, which takes integers.
    """

    async def episode(engine: Any, row: Mapping[str, Any]) -> list[Any]:
        hint = engine.given("h")
        first = await engine.generate([*engine.prompt_ids, *hint.token_ids], max_new_tokens=1)
        second = await engine.generate([*engine.prompt_ids, *hint.token_ids, *first.token_ids])
        return [hint, first, second, engine.given(ids("no"))]

    engine = Speaker(["ab", "c"])
    sample = play(engine, Workflows(default="own", loaded={"own": (episode, {})}))
    assert sample.token_ids.tolist() == ids("hac$")
    assert {type(token_id) for token_id in engine.contexts[1]} == {int}
    assert spans_of(sample) == [(-1, 0, 1), (0, 1, 4)]
    assert sample.stop_reason is StopReason.STOP


def test_a_refused_request_is_the_engines_and_a_dead_engine_cannot_be_hidden() -> None:
    """Seen failing with every error attributed to the workflow, and with a hidden death."""

    async def hides(engine: Any, row: Mapping[str, Any]) -> list[Any]:
        turns = [await engine.generate(engine.prompt_ids)]
        with contextlib.suppress(EngineError):
            turns.append(await engine.generate([*engine.prompt_ids, *turns[0].token_ids]))
        return turns

    with pytest.raises(EpisodeError, match=r"^generation:ValueError: prompt too long"):
        play(Failing([], ValueError("prompt too long")), Workflows())
    engine = Failing(["a"], None, EngineError("the engine-core process died"))
    with pytest.raises(EngineError, match="process died"):
        play(engine, Workflows(default="own", loaded={"own": (hides, {})}), sampling=UNCUT)


# --- as recipes and data rows name them ---


def test_a_workflow_comes_from_a_file_and_gets_row_and_arguments(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "async def episode(engine, row, *, times):\n"
        "    segments, context = [], list(engine.prompt_ids)\n"
        "    for _ in range(times):\n"
        "        segments.append(await engine.generate(context))\n"
        "        segments.append(engine.given(row['answer'] + row['prompt'] + str(sorted(row))))\n"
        "        context += [*segments[-2].token_ids, *segments[-1].token_ids]\n"
        "    return segments\n"
    )
    workflows = load(f"{tmp_path / 'mine.py'}:episode", arguments={"times": 2})
    prompt = make_prompt("7?", answer="x", level=1, verifier="math", workflow=None)
    assert play(Speaker(["a", "b"]), workflows, prompt).text == "ax7?['answer', 'level', 'prompt']b"


def test_a_row_chooses_among_known_workflows_and_those_of_the_recipe() -> None:
    """A name of the recipe's wins over a known one; anything else is refused, code above all."""
    twice = {"function": "multi_turn", "arguments": {"step": f"{HERE}:larger", "max_turns": 2}}
    workflows = load(workflows={"twice": twice})
    assert play(Speaker(["a", "b"]), workflows, make_prompt(workflow="twice")).text == "a>>b"
    assert play(Speaker(["a", "b"]), workflows, make_prompt()).text == "a"
    game = make_prompt(workflow="guess_number", answer="5", max_turns=2)
    assert play(Speaker(["3", "5"]), workflows, game).text == "3>5"
    for name in (f"{HERE}:raises", "guess", 3):
        with pytest.raises(
            EpisodeError, match=r"workflow:PluginError: a column workflow must name one of .*\bgridworld\b"
        ):
            play(Speaker(["a"]), workflows, make_prompt(workflow=name))


@pytest.mark.parametrize(
    ("rollout", "message"),
    [
        ({"workflow": f"{HERE}:larger"}, r"a workflow must be an async function, got 'test_workflows:larger'"),
        ({"workflows": {"own": {"function": "no_module_at_all:f"}}}, r"'no_module_at_all:f' cannot be imported"),
        ({"workflow": "tools", "workflow_arguments": {"functions": []}}, r"functions must be a list of names"),
    ],
)
def test_a_workflow_that_cannot_run_fails_the_start(rollout: dict[str, Any], message: str) -> None:
    """Also one that only rows may choose, and an environment that is only needed in its second turn."""
    with pytest.raises(PluginError, match=message):
        load(**rollout)


# --- evaluation ---


def test_evaluation_plays_greedily_and_survives_a_failed_episode() -> None:
    """No seeds, temperature 0; the failed one is None. Seen failing with its error raised."""
    arguments = {"step": f"{HERE}:larger", "max_turns": 3}
    workflows = load("multi_turn", arguments=arguments, workflows={"own": {"function": f"{HERE}:raises"}})
    engine = Speaker(lambda context: "ab")
    prompts = [make_prompt(), make_prompt(workflow="own"), make_prompt()]
    samples = run(lambda: complete_greedily(engine, prompts, max_new_tokens=50, workflows=workflows))
    assert [sample and sample.text for sample in samples] == ["ab>>ab>>ab", None, "ab>>ab>>ab"]
    assert {(sampling.temperature, sampling.seed) for sampling in engine.samplings} == {(0.0, None)}
