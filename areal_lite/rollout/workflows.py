"""Built-in workflows: how a prompt becomes a sample, in one turn of the model's or several.

A workflow is `async def episode(engine, row, **arguments) -> list[Turn]`, with `engine` an `EpisodeEngine` and `row`
the prompt's data row with `prompt` and `answer`. `runner.py` loads and runs it.
"""

import asyncio
import functools
import inspect
import threading
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import Future
from typing import Any, TypeVar

from areal_lite.config.plugins import find_function
from areal_lite.rollout.episode import EpisodeEngine, Turn, messages_of
from areal_lite.types import StopReason

F = TypeVar("F", bound=Callable[..., Any])

Step = Callable[[list[dict[str, str]], Mapping[str, Any]], Any]
"""An environment: `step(messages, row) -> (reply, done)`, sync or async."""

named = functools.cache(find_function)
"""`find_function`, once per name: an episode must not load its environment's file again."""


def checked_by(check: Callable[..., object]) -> Callable[[F], F]:
    """Decorate a workflow: `check(**arguments)` runs when a worker starts, with the recipe's arguments."""

    def mark(function: F) -> F:
        vars(function)["_workflow_check"] = check
        return function

    return mark


async def single_turn(engine: EpisodeEngine, row: Mapping[str, Any]) -> list[Turn]:
    """Generate one completion: the sample is what the engine returns, bit for bit."""
    return [await engine.generate(engine.prompt_ids)]


def _find_step(*, step: str | Step, max_turns: int = 8) -> Step:
    if max_turns < 1:
        raise ValueError(f"max_turns must be at least 1, got {max_turns}")
    return named(step, kind="environment") if isinstance(step, str) else step


@checked_by(_find_step)
async def multi_turn(
    engine: EpisodeEngine, row: Mapping[str, Any], *, step: str | Step, max_turns: int = 8
) -> list[Turn]:
    """Let the model and an environment speak in turns.

    The episode ends when the environment is done (its last words are not kept), after `max_turns` turns of the model's
    (the environment is not asked again), when a turn was cut off, and when a reply leaves no room for an answer.

    Args:
        step: `step(messages, row) -> (reply, done)`, or its name, `module:function` or `path.py:function`. Messages are
            the turns so far, without the prompt: `{"role": "assistant" | "environment", "content": text}`. A sync
            function runs in a thread of its own; one that never returns keeps its thread after the deadline.

    Raises:
        TimeoutError: A step took longer than `rollout.turn_timeout_s`.
        TypeError: A step returned something else.
    """
    function = _find_step(step=step, max_turns=max_turns)

    async def answer(messages: list[dict[str, str]]) -> tuple[str, bool]:
        return _reply(await engine.in_time(call(function, messages, row)))

    return await converse(engine, answer=answer, max_turns=max_turns)


async def converse(
    engine: EpisodeEngine,
    *,
    answer: Callable[[list[dict[str, str]]], Awaitable[tuple[str, bool]]],
    max_turns: int,
) -> list[Turn]:
    """Alternate between the model and `answer(messages) -> (reply, done)`, which keeps its own deadlines."""
    turns: list[Turn] = []
    context = list(engine.prompt_ids)
    for number in range(1, max_turns + 1):
        turns.append(own := await engine.generate(context))
        if own.stop_reason is StopReason.LENGTH or engine.room == 0 or number == max_turns:
            break
        reply, done = await answer(messages_of(turns))
        if done:
            break
        given = engine.reply(messages_of(turns), reply)
        context += [*own.token_ids.tolist(), *given.token_ids.tolist()]
        turns.append(given)
        if len(given.token_ids) >= engine.room:
            break  # a reply at the end says that the room ended the episode
    return turns


def _reply(result: Any) -> tuple[str, bool]:
    match result:
        case (str() as reply, bool() as done):
            return reply, done
    raise TypeError(f"an environment's step must return (reply, done), a text and a bool, got {result!r:.80}")


async def call(function: Callable[..., Any], *arguments: Any, **named_arguments: Any) -> Any:
    """Call a user's function without holding up the event loop: async ones here, others in a thread of their own.

    A thread cannot be ended. Where this call is cancelled, the thread is left to itself, and its result is dropped.
    """
    bound = functools.partial(function, *arguments, **named_arguments)
    if inspect.iscoroutinefunction(function):
        return await bound()
    result = await _in_thread(bound)
    return await result if isinstance(result, Awaitable) else result


def _in_thread(function: Callable[[], Any]) -> Awaitable[Any]:
    # Not the loop's executor: its few threads would soon all be stuck, and closing it waits for them.
    future: Future[Any] = Future()
    future.set_running_or_notify_cancel()  # from here on it cannot be cancelled: the result is dropped instead

    def work() -> None:
        try:
            future.set_result(function())
        except Exception as error:
            future.set_exception(error)
        except BaseException as error:  # sys.exit() of a user's function must not end the worker
            future.set_exception(RuntimeError(f"a function ended with {type(error).__name__}: {error}"))

    threading.Thread(target=work, daemon=True, name="environment").start()
    return asyncio.wrap_future(future)
