"""The workflow `tools`: an environment whose replies come from registered Python functions.

The model calls a function in plain text, in a base model's completion and a chat model's turn alike:

    <tool>add({"a": 1, "b": 2})</tool>      arguments by name, as one JSON object
    <tool>add(1, 2)</tool>                  or by position, as JSON values
    <result>3</result>                      what it is answered
    <error>ZeroDivisionError: ...</error>   or this; the model may read it and try again

A turn without a call ends the episode: it is the answer.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from areal_lite.rollout.episode import EpisodeEngine, Turn
from areal_lite.rollout.workflows import call, check_limits, checked_by, converse, named

_CALL = re.compile(r"<tool>\s*(\w+)\s*\((.*?)\)\s*</tool>", re.DOTALL)

Functions = Mapping[str, Callable[..., Any]]


def _find_functions(*, functions: Sequence[str], max_characters: int = 2000, **limits: Any) -> Functions:
    check_limits(**limits)
    if isinstance(functions, str) or not functions:
        raise ValueError(f"functions must be a list of names, module:function or path.py:function, got {functions!r}")
    found = {name.rpartition(":")[2]: named(name, kind="tool") for name in functions}
    if len(found) < len(functions):
        raise ValueError(f"every function needs a name of its own for the model to call, got {list(functions)}")
    if max_characters < 1:
        raise ValueError(f"max_characters must be at least 1, got {max_characters}")
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

    A function that raises, is unknown, or takes longer than `rollout.turn_timeout_s` is a reply that the model reads.
    Sync functions run in threads of their own; one that never returns keeps its thread. Functions run in the rollout
    worker's process with its rights: what a model may not do, they must not offer.

    Args:
        functions: `module:function` or `path.py:function`; the model calls them by the part behind the colon.
        max_characters: Longest result shown; the rest of a longer one is cut off.
        limits: As `converse` takes them; with `stop: "</tool>"` no result can be made up in the turn of its call.
    """
    found = _find_functions(functions=functions)

    async def answer(messages: Sequence[Mapping[str, str]]) -> tuple[str, bool]:
        calls = _CALL.findall(messages[-1]["content"])
        replies = [await _result(engine, found, name, written, max_characters) for name, written in calls]
        return "\n".join(replies), not calls

    return await converse(engine, answer=answer, **limits)


async def _result(engine: EpisodeEngine, functions: Functions, name: str, written: str, max_characters: int) -> str:
    try:
        if name not in functions:
            raise NameError(f"there is no function {name}, only {', '.join(functions)}")
        positional, by_name = _read_arguments(written)
        result = await engine.in_time(call(functions[name], *positional, **by_name))
        text = result if isinstance(result, str) else json.dumps(result, ensure_ascii=False, default=str)
        return f"<result>{text[:max_characters]}</result>"
    except Exception as error:
        told = f"{type(error).__name__}: {error}"
        return f"<error>{told[:max_characters]}</error>"


def _read_arguments(written: str) -> tuple[list[Any], dict[str, Any]]:
    try:
        values = json.loads(f"[{written}]")
    except ValueError as error:
        raise ValueError(f'arguments must be JSON, such as {{"a": 1}} or 1, 2; got {written!r:.80}') from error
    match values:
        case [dict() as by_name]:
            return [], by_name
    return values, {}
