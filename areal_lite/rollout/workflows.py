"""Built-in workflows: how a prompt becomes a sample, in one turn of the model or several.

A workflow is `async def episode(engine, row, **arguments) -> list[Turn]`, with `engine` an `EpisodeEngine` and `row`
the prompt's data row plus `prompt` and `answer`. `runner.py` loads and runs it.
"""

import asyncio
import functools
import inspect
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from areal_lite.config.plugins import find_function
from areal_lite.rollout.episode import EpisodeEngine, Turn, messages_of
from areal_lite.types import StopReason
from areal_lite.verify.result import F, marked

Step = Callable[[list[dict[str, str]], Mapping[str, Any]], Any]
"""An environment: `step(messages, row) -> (reply, done)`, sync or async."""

named = functools.cache(find_function)
"""`find_function`, once per name: an episode must not load its environment's file again."""


def checked_by(check: Callable[..., object]) -> Callable[[F], F]:
    """Decorate a workflow: `check(**arguments)` runs when a worker starts, with the recipe's arguments."""
    return marked(_workflow_check=check)


async def single_turn(engine: EpisodeEngine, row: Mapping[str, Any]) -> list[Turn]:
    """Generate one completion: the sample is what the engine returns, bit for bit."""
    return [await engine.generate(engine.prompt_ids)]


def check_limits(*, max_turns: int = 8, max_turn_tokens: int | None = None, stop: str | Sequence[str] = ()) -> None:
    """Check the limits that `converse` takes.

    Raises:
        ValueError: A limit is below 1, or a stop string empty.
    """
    if max_turns < 1 or (max_turn_tokens is not None and max_turn_tokens < 1):
        raise ValueError(f"max_turns and max_turn_tokens must be at least 1, got {max_turns} and {max_turn_tokens}")
    if not all((stop,) if isinstance(stop, str) else stop):
        raise ValueError(f"stop must be texts of at least one character, got {stop!r}")


def _find_step(*, step: str | Step, **limits: Any) -> Step:
    check_limits(**limits)
    return named(step, kind="environment") if isinstance(step, str) else step


@checked_by(_find_step)
async def multi_turn(engine: EpisodeEngine, row: Mapping[str, Any], *, step: str | Step, **limits: Any) -> list[Turn]:
    """Let the model and an environment take turns, as `converse` does.

    Args:
        limits: As `converse` takes them.
        step: `step(messages, row) -> (reply, done)`, or its name, `module:function` or `path.py:function`. Messages are
            the turns so far, without the prompt: `{"role": "assistant" | "environment", "content": text}`. A sync
            function runs in a thread of its own; one that never returns keeps its thread after the deadline. The reply
            of a step that is done is dropped.

    Raises:
        TimeoutError: A step took longer than `rollout.turn_timeout_s`.
        TypeError: A step returned something else.
    """
    function = _find_step(step=step)

    async def answer(messages: list[dict[str, str]]) -> tuple[str, bool]:
        match await engine.in_time(call(function, messages, row)):
            case (str() as reply, bool() as done):
                return reply, done
            case result:
                raise TypeError(f"an environment's step must return (reply, done), text and bool, got {result!r:.80}")

    return await converse(engine, answer=answer, **limits)


async def converse(
    engine: EpisodeEngine,
    *,
    answer: Callable[[list[dict[str, str]]], Awaitable[tuple[str | Sequence[str], bool]]],
    max_turns: int = 8,
    max_turn_tokens: int | None = None,
    stop: str | Sequence[str] = (),
) -> list[Turn]:
    """Alternate between the model and `answer(messages) -> (reply, done)`, which has its own deadlines.

    The episode ends when the answer is done, after `max_turns`, when a turn of the model fills the room, and when a
    reply leaves no room for an answer.

    Args:
        max_turns: Turns of the model; the last gets no reply.
        max_turn_tokens: Limit of one turn; a turn that reaches it does get a reply. None = all the room that is left.
        stop: Texts that end a turn of the model; they stay in it.
    """
    turns: list[Turn] = []
    context = list(engine.prompt_ids)
    for number in range(1, max_turns + 1):
        own = await engine.generate(context, max_new_tokens=max_turn_tokens, stop=stop)
        turns.append(own)
        is_full = own.stop_reason is StopReason.LENGTH and own.num_tokens != max_turn_tokens
        if is_full or engine.room == 0 or number == max_turns:
            break
        reply, done = await answer(messages_of(turns))
        if done:
            break
        given = engine.reply(messages_of(turns), reply)
        context += [*own.token_ids.tolist(), *given.token_ids.tolist()]
        turns.append(given)  # kept even if it fills the room, as `join` sees from it that the episode was cut off
        if len(given.token_ids) >= engine.room:
            break
    return turns


async def call(function: Callable[..., Any], /, *arguments: Any, **named_arguments: Any) -> Any:
    """Call a user's function without blocking the event loop: an async one here, a sync one in a thread of its own.

    A thread cannot be ended. If this call is cancelled, the thread runs on, and its result is dropped.
    """
    bound = functools.partial(function, *arguments, **named_arguments)
    if inspect.iscoroutinefunction(function):
        return await bound()
    result = await _in_thread(bound)
    return await result if isinstance(result, Awaitable) else result


def _in_thread(function: Callable[[], Any]) -> Awaitable[Any]:
    # Not the loop's executor: functions that hang would use up its few threads, and closing it waits for them.
    future: Future[Any] = Future()
    future.set_running_or_notify_cancel()  # it cannot be cancelled from here on: its result is dropped instead

    def work() -> None:
        try:
            future.set_result(function())
        except BaseException as error:
            # sys.exit() of a user's function must not end the worker, and a future cannot hold a StopIteration.
            is_usual = isinstance(error, Exception) and not isinstance(error, StopIteration)
            ended = RuntimeError(f"a function ended with {type(error).__name__}: {error}")
            future.set_exception(error if is_usual else ended)

    threading.Thread(target=work, daemon=True, name="environment").start()
    return asyncio.wrap_future(future)
