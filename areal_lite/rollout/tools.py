"""The workflow `tools`: an environment that answers calls of registered Python functions.

The model calls a function in plain text, in a base model's completion and a chat model's turn alike:

    <tool>add({"a": 1, "b": 2})</tool>      arguments by name, as one JSON object
    <tool>add(1, 2)</tool>                  or by position, as JSON values
    <result>3</result>                      the reply
    <error>ZeroDivisionError: ...</error>   or this; the model may read it and try again

or as chat models do; then the chat template writes the reply, in role `tool` if it has that role:

    <tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>

A turn without a call ends the episode: it is the answer.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from areal_lite.config.plugins import PICKLE
from areal_lite.rollout.episode import EpisodeEngine, Turn
from areal_lite.rollout.workflows import call, check_limits, checked_by, converse, named

_CALL = re.compile(r"<tool>\s*(\w+)\s*\((.*?)\)\s*</tool>", re.DOTALL)
_CHAT_CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)

Functions = Mapping[str, Callable[..., Any]]
Call = tuple[str, list[Any], dict[str, Any]]
"""Name, positional arguments, and arguments by name."""


def _find_functions(*, functions: Sequence[str], max_characters: int = 2000, **limits: Any) -> Functions:
    check_limits(**limits)
    if isinstance(functions, str) or not functions:
        raise ValueError(f"functions must be a list of names, module:function or path.py:function, got {functions!r}")
    own = {name: named(name, kind="tool") for name in functions}
    found = {each.__name__ if name.endswith(PICKLE) else name.rpartition(":")[2]: each for name, each in own.items()}
    if len(found) < len(functions):
        raise ValueError(f"functions must have different names, as the model calls them by name; got {list(functions)}")
    return found


@checked_by(_find_functions)
async def tools(
    engine: EpisodeEngine,
    row: Mapping[str, Any],
    *,
    functions: Sequence[str],
    max_characters: int = 2000,
    **limits: Any,
) -> list[Turn]:
    """Let the model call functions until it answers without a call.

    If a function raises, is unknown, or takes longer than `rollout.turn_timeout_s`, the model reads that as the reply.
    Sync functions run in threads of their own; one that never returns keeps its thread. Functions run in the rollout
    worker's process with its rights: do not register one that can do what a model must not do.

    Args:
        functions: `module:function` or `path.py:function`; the model calls them by the part after the colon.
        max_characters: Longest reply to a call; a longer one is cut off.
        limits: As `converse` takes them; with `stop: "</tool>"` the model cannot invent a result in the same turn.
    """
    found = _find_functions(functions=functions)

    async def result(read: Callable[..., Call], *written: str) -> tuple[str, str]:
        try:
            name, positional, by_name = read(*written)
            if name not in found:
                raise NameError(f"there is no function {name}, only {', '.join(found)}")
            returned = await engine.in_time(call(found[name], *positional, **by_name))
            text = returned if isinstance(returned, str) else json.dumps(returned, ensure_ascii=False, default=_plain)
            return "result", text[:max_characters]
        except Exception as error:
            return "error", f"{type(error).__name__}: {error}"[:max_characters]

    async def answer(messages: Sequence[Mapping[str, str]]) -> tuple[str | list[str], bool]:
        text = messages[-1]["content"]
        if calls := _CHAT_CALL.findall(text):
            return [(await result(_read_chat_call, written))[1] for written in calls], False
        replies = [await result(_read_call, *written) for written in _CALL.findall(text)]
        return "\n".join(f"<{kind}>{reply}</{kind}>" for kind, reply in replies), not replies

    return await converse(engine, answer=answer, **limits)


def _plain(value: Any) -> Any:
    """Return what JSON lacks as numbers if it is numpy's, else as text."""
    return value.tolist() if hasattr(value, "tolist") else str(value)


def _read_chat_call(written: str) -> Call:
    match json.loads(written):
        case {"name": str() as name, "arguments": dict() as by_name}:
            return name, [], by_name
    raise ValueError(f'a call must be {{"name": ..., "arguments": {{...}}}}, got {written.strip()!r:.80}')


def _read_call(name: str, written: str) -> Call:
    try:
        values = json.loads(f"[{written}]")
    except ValueError as error:
        raise ValueError(f'arguments must be JSON, such as {{"a": 1}} or 1, 2; got {written!r:.80}') from error
    match values:
        case [dict() as by_name]:
            return name, [], by_name
    return name, values, {}
