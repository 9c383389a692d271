"""Environments with a chat template: the model's tokens stay as sampled, the template writes the rest."""

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from chat_builders import CHATML, ENDLESS, LONG, PLAIN, THINKING, make_chat_prompt, make_tokenizer
from episode_builders import Speaker, load, play, spans_of

from areal_lite.errors import ConfigError, EpisodeError
from areal_lite.rollout.dialogue import reply_ids
from areal_lite.rollout.runner import Workflows
from areal_lite.rollout.workflows import multi_turn
from areal_lite.types import Prompt, Sample

Messages = Sequence[Mapping[str, str]]


def counts(messages: Messages, row: Mapping[str, Any]) -> tuple[str, bool]:
    return f"no, {len(messages)}", False


def converse(template: str, answers: list[str]) -> tuple[Any, Prompt, Sample, Speaker]:
    """Play until the answers are used up, in a chat; the environment counts turns.

    Prompts that are messages need no setting. Seen failing with `data.chat` asked, which they leave out.
    """
    tokenizer = make_tokenizer(template)
    prompt = make_chat_prompt(tokenizer, "Guess answer0!")
    engine = Speaker(answers, tokenizer=tokenizer)
    workflows = load("multi_turn", arguments={"step": f"{__file__}:counts", "max_turns": len(answers)})
    return tokenizer, prompt, play(engine, workflows, prompt, sampling=LONG), engine


def chat_of(sample: Sample) -> list[dict[str, str]]:
    roles = {"environment": "user", "assistant": "assistant"}
    turns = [{"role": roles[m["role"]], "content": m["content"]} for m in sample.messages]
    return [{"role": "user", "content": "Guess answer0!"}, *turns]


@pytest.mark.parametrize("template", [CHATML, PLAIN], ids=["chatml", "plain"])
def test_joined_tokens_read_as_the_template_writes_the_whole_conversation(template: str) -> None:
    """Prompt and sample decoded, specials shown, are the rendering up to the last answer's end token.

    One answer holds the mark that stands for answers inside `reply_ids`. Seen failing with a mark that may occur, with
    the end token written twice, with the reply encoded without the template, and with the message numbers of a
    conversation that starts again each turn.
    """
    tokenizer, prompt, sample, engine = converse(template, ["answer0 answer1", "fifty", "25?"])
    text = tokenizer.decode([*prompt.token_ids, *sample.token_ids.tolist()])
    rendering = tokenizer.apply_chat_template(chat_of(sample), tokenize=False)
    assert rendering.startswith(text)
    assert rendering.removeprefix(text).strip() == ""
    assert text.endswith("25?<|im_end|>")
    assert [m["content"] for m in sample.messages] == ["answer0 answer1", "no, 1", "fifty", "no, 3", "25?"]
    for context, count in zip(engine.contexts, (1, 3, 5), strict=True):
        asked = tokenizer.apply_chat_template(chat_of(sample)[:count], tokenize=False, add_generation_prompt=True)
        assert tokenizer.decode(context) == asked


def test_what_a_template_does_to_earlier_answers_does_not_reach_the_sample() -> None:
    """Thoughts that the template would cut stay: the model did sample them, and the next turn follows them.

    Seen failing with the reply as the difference of two renderings, which do not begin alike.
    """
    tokenizer, prompt, _, engine = converse(THINKING, ["hm</think>50", "25"])
    assert tokenizer.decode(engine.contexts[1]) == (
        prompt.text + "hm</think>50<|im_end|>\n<|im_start|>user\nno, 1<|im_end|>\n<|im_start|>assistant\n"
    )


def test_a_template_without_an_end_token_follows_the_models_own() -> None:
    tokenizer, prompt, _, engine = converse(ENDLESS, ["50", "25"])
    assert tokenizer.decode(engine.contexts[1]) == prompt.text + "50<|im_end|>\n[user] no, 1\n[assistant] "


@pytest.mark.parametrize("limit", [{"max_new_tokens": 3}, {"stop": "b<"}])
def test_a_workflow_that_cuts_answers_short_itself_gets_the_end_token_as_given(limit: dict[str, Any]) -> None:
    """The conversation reads as the template writes it.

    Seen failing with the end token left out, and with a stop string taken for an end token.
    """

    async def episode(engine: Any, row: Mapping[str, Any]) -> list[Any]:
        first = await engine.generate(engine.prompt_ids, **limit)
        reply = engine.reply([{"role": "assistant", "content": first.text}], "go on")
        return [first, reply, await engine.generate([*engine.prompt_ids, *first.token_ids, *reply.token_ids])]

    tokenizer = make_tokenizer(CHATML)
    prompt = make_chat_prompt(tokenizer, "Hi")
    workflows = Workflows(default="own", loaded={"own": (episode, {})})
    sample = play(Speaker(["ab<def", "g"], tokenizer=tokenizer), workflows, prompt)
    assert tokenizer.decode(sample.token_ids.tolist()) == (
        "ab<<|im_end|>\n<|im_start|>user\ngo on<|im_end|>\n<|im_start|>assistant\ng<|im_end|>"
    )
    # `$` for the two marks: ab< | $\n$user\ngo on$\n$assistant\n | g$
    assert spans_of(sample) == [(0, 0, 3), (-1, 3, 3 + 8 + 5 + 3 + 10), (0, 29, 31)]


@pytest.mark.parametrize(
    ("template", "error", "message"),
    [
        (None, ConfigError, "needs a model with a chat template"),
        ("{{ raise_exception('only one turn') }}", ValueError, r"template refuses a chat of 3 messages \(only"),
        ("{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}", ValueError, "it leaves them out"),
    ],
)
def test_templates_that_cannot_converse_are_refused(template: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        reply_ids([{"role": "assistant", "content": "a"}], "b", tokenizer=make_tokenizer(template), end=None)


def test_a_reply_that_the_tokenizer_does_not_know_is_named() -> None:
    async def step(messages: Messages, row: Mapping[str, Any]) -> tuple[str, bool]:
        return "é", False

    workflows = Workflows(default="own", loaded={"own": (multi_turn, {"step": step})})
    with pytest.raises(EpisodeError, match=r"workflow:ValueError: the model's tokenizer cannot encode .* 'é'"):
        play(Speaker(["a", "b"]), workflows)
