"""Agents over real sockets and the public SDKs: what is captured, what trains, and which errors they see."""

import asyncio
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import openai
import pytest
from agent_builders import own, say, train, trained, user
from chat_builders import THINKING
from episode_builders import given_mask

from areal_lite.errors import EpisodeError
from areal_lite.rollout.engine import Sampling
from areal_lite.types import Sample


def test_twenty_turns_train_the_tokens_that_were_sampled() -> None:
    """Ids captured are ids trained, byte for byte, on one way: also of thoughts that the template would cut.

    Seen failing with contexts that are rendered again each time.
    """

    async def agent(task: Mapping[str, Any], llm: Any) -> float:
        messages = [user(task["prompt"])]
        for number in range(20):
            await say(llm, messages)
            messages.append(user(f"and {number}"))
        return 0.5

    sample, speaker = trained(agent, [f"hm{number}</think> a{number} " for number in range(20)], template=THINKING)
    assert sample.branches == ()
    assert sample.score is not None
    assert sample.score.reward == 0.5
    tokens = [*sample.prompt_ids, *sample.token_ids.tolist()]
    for context in speaker.contexts:
        assert tokens[: len(context)] == context
    places = len(sample.prompt_ids) + np.arange(sample.num_tokens)
    np.testing.assert_array_equal(-sample.logprobs, np.where(given_mask(sample), 0, places))
    assert speaker.tokenizer.decode(own(sample)) == "".join(f"hm{n}</think> a{n} <|im_end|>" for n in range(20))
    assert [message["role"] for message in sample.messages] == ["assistant", "user"] * 19 + ["assistant"]


async def two_branches(task: Mapping[str, Any], llm: Any) -> None:
    """Plan, edit what was planned (so the history is another), and ask the first way once more at the end."""
    plan = [user("plan")]
    await say(llm, plan)
    edited = [user("plan"), {"role": "assistant", "content": "edited"}, user("solve")]
    await say(llm, edited)
    plan.append(user("go on"))
    await say(llm, plan)


def paying(value: Any) -> Callable[..., Any]:
    """An agent of two branches that returns this."""

    async def agent(task: Mapping[str, Any], llm: Any) -> Any:
        await two_branches(task, llm)
        return value

    return agent


def test_history_that_was_rewritten_is_a_branch() -> None:
    """The last call's way is the sample; what the other holds trains there, and every token once.

    Seen failing with histories compared by their length alone.
    """
    sample, speaker = trained(two_branches, ["p1", "s", "p2"])
    (branch,) = sample.branches
    assert [message["content"] for message in sample.messages] == ["p1", "go on", "p2"]
    assert branch.text == "s"
    assert "edited" in speaker.tokenizer.decode(branch.prompt_ids)
    assert speaker.tokenizer.decode(own(sample)) == "p1<|im_end|>p2<|im_end|>s<|im_end|>"


def test_the_same_again_on_purpose_is_a_sibling_and_shared_tokens_train_once() -> None:
    """Two answers after the same calls: these calls are the prompt of the second path.

    Seen failing with every way from its root: the first answer trains twice.
    """

    async def agent(task: Mapping[str, Any], llm: Any) -> None:
        messages = [user("a")]
        await say(llm, messages)
        for _ in range(2):
            await say(llm, [*messages, user("b")])
        await llm.client.chat.completions.create(model="x", messages=[*messages, user("b")], n=2)

    sample, speaker = trained(agent, ["one", "two", "three", "four", "five"])
    assert sample.score is None
    assert [way.text for way in sample.branches] == ["two", "three", "four"]
    assert [m["content"] for m in sample.messages] == ["one", "b", "five"]
    assert len({way.prompt_ids for way in sample.branches}) == 1
    assert sample.branches[0].prompt_ids == tuple(speaker.contexts[1])
    assert len(own(sample)) == len("onetwothreefourfive") + 5


def test_two_agents_in_one_rollout_do_not_interleave() -> None:
    """Each continues its own answers, in any order of calls. Seen failing with answers that are not compared."""

    async def agent(task: Mapping[str, Any], llm: Any) -> None:
        async def one(name: str) -> None:
            messages = [user(name)]
            for number in range(3):
                await say(llm, messages)
                messages.append(user(f"{name} {number}"))

        await asyncio.gather(one("planner"), one("solver"))

    sample, speaker = trained(agent, lambda text: f"so {text[-20:-12]}")
    assert len(sample.branches) == 1
    for way in sample.sequences:
        text = speaker.tokenizer.decode([*way.prompt_ids, *way.token_ids])
        assert ("planner" in text) != ("solver" in text)
        assert sum(not span for span in given_mask(way)) > 0
    assert len(speaker.contexts) == 6


def test_a_dict_is_a_reward_with_parts_and_none_is_left_to_the_verifier() -> None:
    """Seen failing without parts, and with what is no reward passed on."""
    sample, _ = trained(paying({"reward": 0.5, "brief": 1}), ["p1", "s", "p2"])
    assert sample.score is not None
    assert (sample.score.reward, sample.score.parts) == (0.5, {"brief": 1.0})
    for wrong in ("good", {"brief": 1.0}, float("nan")):
        with pytest.raises(EpisodeError, match=r"workflow:ValueError: an agent must return its reward"):
            trained(paying(wrong), ["p1", "s", "p2"])


def test_a_reward_for_each_call_is_paid_where_the_call_ends() -> None:
    """That of a call on another way counts for all. Seen failing with places counted from the last call on."""
    sample, speaker = trained(paying({"reward": 1, "calls": (0.5, 4, 0.25), "brief": 2}), ["p1", "s", "p2"])
    assert sample.score is not None
    assert (sample.score.reward, sample.score.parts, sample.total_reward) == (5, {"brief": 2.0}, 5.75)
    ends = {step.token: step.value for step in sample.step_rewards}
    assert list(ends.values()) == [0.5, 0.25]
    paid = [speaker.tokenizer.decode(sample.token_ids[: end + 1]) for end in ends]
    assert [text[-12:] for text in paid] == ["p1<|im_end|>", "p2<|im_end|>"]
    for wrong, message in (((1, 2), "each of the 3 answered, got"), ((1, 2, float("nan")), "float32")):
        with pytest.raises(EpisodeError, match=f"workflow:ValueError: .*{message}"):
            trained(paying({"reward": 1, "calls": wrong}), ["p1", "s", "p2"])


def test_agents_that_fail_are_lost_samples() -> None:
    """One that calls nothing, that never ends: no reward. One that raises: test_agent_requests.py."""

    async def silent(task: Mapping[str, Any], llm: Any) -> float:
        return 1.0

    async def endless(task: Mapping[str, Any], llm: Any) -> None:
        await say(llm, [user("a")])
        await asyncio.sleep(3600)

    for agent, message in ((silent, "at least once"), (endless, "turn_timeout_s=0.5")):
        with pytest.raises(EpisodeError, match=message):
            trained(agent, ["a"], turn_timeout_s=0.5)


def test_an_agent_in_a_thread_uses_the_sync_client_and_is_refused_after_its_end() -> None:
    """A session ends with its rollout; no other key opens it. Seen failing with sessions that stay open.

    Any model can be looked up. Seen failing with status 405.
    """
    seen: list[Any] = []

    def agent(task: Mapping[str, Any], llm: Any) -> None:
        seen.append(llm)
        client = openai.OpenAI(base_url=llm.base_url, api_key=llm.api_key)
        assert client.models.list().data[0].id == "policy"
        assert client.models.retrieve("org/any").id == "org/any"
        client.chat.completions.create(model="m", messages=[user("a")])
        if llm is seen[0]:
            return
        other = openai.OpenAI(base_url=seen[0].base_url, api_key=llm.api_key)
        with pytest.raises((openai.AuthenticationError, openai.NotFoundError)):
            other.models.list()
        late = openai.OpenAI(base_url=seen[0].base_url, api_key=seen[0].api_key)
        with pytest.raises(openai.NotFoundError, match="must still be open"):
            list(iter(late.models.list, None))  # until it is refused

    samples, _ = train(agent, lambda _: "x", num=2)
    assert all(isinstance(sample, Sample) for sample in samples), samples


@pytest.mark.parametrize("is_sync", [True, False])
def test_the_client_works_in_an_event_loop_of_the_agents_own(is_sync: bool) -> None:
    """The engine stays in its own. Seen failing: a closed loop lost the sample; an answer came from the thread."""

    def agent(task: Mapping[str, Any], llm: Any) -> None:
        for text in "ab":
            assert asyncio.run(say(llm, [user(text)])) == threading.main_thread().name

    async def in_thread(task: Mapping[str, Any], llm: Any) -> None:
        await asyncio.to_thread(agent, task, llm)

    trained(agent if is_sync else in_thread, lambda _: threading.current_thread().name)


def test_text_completions_continue_from_exact_tokens() -> None:
    """Without a chat template; a chat is refused by a sentence.

    Seen failing with prompts encoded again, and with a transcript cut by the length of special tokens.
    """

    async def agent(task: Mapping[str, Any], llm: Any) -> None:
        first = await llm.client.completions.create(model="m", prompt="Q: ")
        await llm.client.completions.create(model="m", prompt=f"Q: {first.choices[0].text} So? ")
        with pytest.raises(openai.BadRequestError, match="chat template"):
            await say(llm, [user("a")])

    sample, speaker = trained(agent, ["o<|im_start|>ne", "two"], template=None)
    whole = speaker.tokenizer.decode([*sample.prompt_ids, *sample.token_ids])
    assert whole == "Q: o<|im_start|>ne<|im_end|> So? two<|im_end|>"
    assert [m["content"] for m in sample.messages] == ["o<|im_start|>ne", " So? ", "two"]


@pytest.mark.parametrize("max_tokens", [2.0, "2"])
def test_a_limit_reaches_the_engine_as_a_whole_number(max_tokens: Any) -> None:
    """Seen failing with the body's own value, which vLLM's engine cannot decode."""

    async def agent(task: Mapping[str, Any], llm: Any) -> None:
        await say(llm, [user("a")], max_tokens=max_tokens)
        await llm.client.completions.create(model="m", prompt="Q", max_tokens=max_tokens)

    _, speaker = trained(agent, ["abc", "abc"])
    assert [repr(sampling.max_new_tokens) for sampling in speaker.samplings] == ["2", "2"]


def test_a_proxy_of_the_cluster_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen failing (connection error) with the proxies of the environment."""
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")

    async def agent(task: Mapping[str, Any], llm: Any) -> None:
        stream = await llm.client.chat.completions.create(model="m", messages=[user("a")], stream=True)
        assert "".join([chunk.choices[0].delta.content or "" async for chunk in stream if chunk.choices]) == "abc"

    trained(agent, ["abc"])


def test_a_text_asked_again_after_an_empty_answer_is_a_branch() -> None:
    """Seen failing: it continued after the empty answer's end token."""

    async def agent(task: Mapping[str, Any], llm: Any) -> None:
        for _ in range(2):
            await llm.client.completions.create(model="m", prompt="Q: ")

    sample, speaker = trained(agent, ["", "one"], template=None)
    assert speaker.contexts[0] == speaker.contexts[1]
    assert len(sample.branches) == 1


def test_an_evaluation_is_greedy_whatever_temperature_is_asked_for() -> None:
    """Seen failing with other temperatures than the greedy one refused."""

    async def agent(task: Mapping[str, Any], llm: Any) -> None:
        await say(llm, [user("a")], temperature=0.3)

    _, speaker = trained(agent, ["a"], sampling=Sampling(max_new_tokens=9, temperature=0.0))
    assert speaker.samplings[0].temperature == 0.0


def test_a_context_that_is_too_long_is_an_error_that_sdks_know() -> None:
    """And an answer ends where the context does. Seen failing with the engine's own error, which has no code."""

    async def agent(task: Mapping[str, Any], llm: Any) -> None:
        with pytest.raises(openai.BadRequestError, match=r"model\.max_context=100") as caught:
            await say(llm, [user("a" * 100)])
        assert caught.value.code == "context_length_exceeded"
        await say(llm, [user("a" * 40)])

    sample, _ = trained(agent, ["b" * 100], max_context=100)
    assert len(sample.prompt_ids) + sample.num_tokens == 100


def test_stop_strings_are_not_shown_but_train() -> None:
    """Seen failing with an engine that does not get them."""

    async def agent(task: Mapping[str, Any], llm: Any) -> None:
        messages = [user("a")]
        assert await say(llm, messages, stop=["END"]) == "done "
        await say(llm, [*messages, user("b")])

    sample, speaker = trained(agent, ["done END more", "c"])
    assert sample.branches == ()
    assert "done END<|im_end|>\n<|im_start|>user\nb" in speaker.tokenizer.decode(sample.token_ids)


def test_runs_without_agents_import_and_open_nothing() -> None:
    """Seen failing with `import uvicorn` at the top of the endpoint."""
    program = (
        "import sys; from areal_lite.config.recipe import parse_config; "
        "from areal_lite.rollout.runner import load_workflows; workflows = load_workflows(parse_config({})); "
        "assert workflows.endpoint; "
        "print({'starlette', 'uvicorn', 'openai', 'vllm'} & sys.modules.keys())"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
