"""The workflow `tools`: calls in plain text, results and errors as replies that the model reads."""

import asyncio
import threading
from typing import Any

import numpy as np
import pytest
from chat_builders import CHATML, make_chat_prompt, make_tokenizer
from episode_builders import UNCUT, Speaker, load, play

from areal_lite.errors import PluginError
from areal_lite.rollout.engine import Sampling

HERE = "test_workflow_tools"
LONG = Sampling(max_new_tokens=2000, temperature=1.0)


def add(a: float, b: float = 10) -> float:
    return a + b


async def greet(name: str) -> str:
    await asyncio.sleep(0)
    return f"hello {name}"


def table() -> Any:
    return {"rows": np.array([1, 2.5]), "sum": np.float32(3.5), "at": complex(1, 2)}


def long() -> str:
    return "x" * 5000


def exits() -> None:
    raise SystemExit(1)


def finds_nothing() -> None:
    next(iter([]))


def hangs() -> None:
    threading.Event().wait(20)


async def hangs_too() -> None:
    await asyncio.Event().wait()


def missing() -> None:
    raise KeyError("x")


USER = "<|im_start|>user\n3\nKeyError: 'x'<|im_end|>\n"


def replies_to(*calls: str, **options: Any) -> list[str]:
    """Have the model make a call a turn, then answer."""
    names = ("add", "greet", "table", "long", "exits", "finds_nothing", "hangs", "hangs_too")
    arguments = {"functions": [f"{HERE}:{name}" for name in names], "max_turns": 20, **options.pop("arguments", {})}
    sample = play(Speaker([*calls, "done"]), load("tools", arguments=arguments, **options), sampling=LONG)
    assert sample.messages[-1] == {"role": "assistant", "content": "done"}
    return [message["content"] for message in sample.messages if message["role"] == "environment"]


def test_functions_are_called_by_name_and_their_results_come_back() -> None:
    """By name, by position, with a default; text as it is, other values as JSON; several calls in their order.

    Seen failing with numpy's numbers as texts, in quotes.
    """
    assert replies_to(
        'I need a sum: <tool>add({"a": 1, "b": 2})</tool>',
        "<tool>add(1, 2.5)</tool>",
        "<tool> add ( 5 ) </tool>",
        '<tool>greet("you (all)")</tool> and <tool>table()</tool>',
    ) == [
        "<result>3</result>",
        "<result>3.5</result>",
        "<result>15</result>",
        '<result>hello you (all)</result>\n<result>{"rows": [1.0, 2.5], "sum": 3.5, "at": "(1+2j)"}</result>',
    ]


def test_what_goes_wrong_is_a_reply() -> None:
    """Seen failing with the errors raised: one bad call would cost the whole group; with a StopIteration that hangs."""
    unknown, not_json, few, raised, ended, empty = replies_to(
        '<tool>open("/etc/passwd")</tool>',
        "<tool>add(one)</tool>",
        "<tool>add()</tool>",
        '<tool>add("a", 1)</tool>',
        "<tool>exits()</tool>",
        "<tool>finds_nothing()</tool>",
    )
    assert unknown.startswith("<error>NameError: there is no function open, only add, greet, table, long, exits, ")
    assert not_json == "<error>ValueError: arguments must be JSON, such as {\"a\": 1} or 1, 2; got 'one'</error>"
    assert few == "<error>TypeError: add() missing 1 required positional argument: 'a'</error>"
    assert raised == '<error>TypeError: can only concatenate str (not "int") to str</error>'
    assert ended == "<error>RuntimeError: a function ended with SystemExit: 1</error>"
    assert empty == "<error>RuntimeError: a function ended with StopIteration: </error>"


def test_each_call_has_its_deadline() -> None:
    """Two of them hang, one after the other, and the third is answered. Seen failing with one deadline for the turn."""
    (reply,) = replies_to('<tool>hangs()</tool><tool>hangs_too()</tool><tool>greet("you")</tool>', turn_timeout_s=0.5)
    late = "<error>TimeoutError: the environment may take rollout.turn_timeout_s=0.5 s, it took longer</error>"
    assert reply == f"{late}\n{late}\n<result>hello you</result>"


def test_a_long_result_is_cut() -> None:
    assert replies_to("<tool>long()</tool>", arguments={"max_characters": 7}) == ["<result>xxxxxxx</result>"]


def test_a_turn_without_a_call_is_the_answer() -> None:
    """Also one with an unfinished call."""
    workflows = load("tools", arguments={"functions": [f"{HERE}:add"]})
    for said in ("42", "<tool>add(1", "add(1)"):
        assert play(Speaker([said, "never"]), workflows, sampling=UNCUT).text == said


@pytest.mark.parametrize(
    ("template", "answered"),
    [
        (CHATML, "<|im_start|>tool\n3<|im_end|>\n<|im_start|>tool\nKeyError: 'x'<|im_end|>\n"),
        (CHATML.replace("+ message.role +", "+ {'user': 'user', 'assistant': 'assistant'}[message.role] +"), USER),
        (CHATML.replace("{{- '<|im_start|>' + message", "{%- if message.role != 'tool' %}{{- '<|im_start|>' + message")
         .replace("'\n' }}{%- endfor %}", "'\n' }}{%- endif %}{%- endfor %}"), USER),
    ],
    ids=["knows tools", "refuses", "leaves out"],
)  # fmt: skip
def test_chat_models_call_in_their_own_way(template: str, answered: str) -> None:
    """Results are messages of role `tool` where the template writes those, else the user's.

    Seen failing with the user's role throughout, and with results that a template leaves out.
    """
    tokenizer = make_tokenizer(template)
    said = (
        '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>'
        '<tool_call>{"name": "missing", "arguments": {}}</tool_call>'
    )
    workflows = load("tools", arguments={"functions": [f"{HERE}:add", f"{HERE}:missing"]})
    engine = Speaker([said, "3"], tokenizer=tokenizer)
    prompt = make_chat_prompt(tokenizer, "1+2?")
    play(engine, workflows, prompt, sampling=LONG)
    context = tokenizer.decode(engine.contexts[1])
    assert context == f"{prompt.text}{said}<|im_end|>\n{answered}<|im_start|>assistant\n"
    (unreadable,) = replies_to('<tool_call>{"name": "add"}</tool_call>')
    assert unreadable.startswith('ValueError: a call must be {"name": ..., "arguments": {...}}, got')


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"functions": f"{HERE}:add"}, "functions must be a list of names"),
        ({"functions": [f"{HERE}:add", f"{HERE}:add"]}, "must have different names"),
        ({"functions": [f"{HERE}:subtract"]}, "must have a function 'subtract'"),
        ({"functions": [f"{HERE}:add"], "max_turns": 0}, "must be at least 1"),
    ],
)
def test_functions_are_checked_at_the_start(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(PluginError, match=message):
        load("tools", arguments=arguments)
