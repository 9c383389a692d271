"""What a verify function is: how it is called, and what counts as a reward.

    def verify(prompt: str, completion: str, answer: str, **row) -> float | VerifyResult

or the same with `async def`, or `@batched` with a list of each. `row` holds the data row's other columns, `messages`
where the sample has several turns, and what the recipe says in `arguments`. What takes long to load goes into a
function of those arguments, named by `@prepared_by`: it runs once in each process, and no call's deadline counts it.
Imports nothing heavy, as every restart of a process pays for it.
"""

import asyncio
import errno
import functools
import inspect
import math
import numbers
import struct
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

from areal_lite.errors import VerifierError, VerifierUnavailable
from areal_lite.verify.result import VerifyResult

VerifyFunction = Callable[..., Any]
Call = tuple[str, str, str, Mapping[str, Any]]
"""Prompt as the model saw it, completion, reference answer, and the row's other columns."""

NOT_APPLICABLE = "not_applicable"
"""The failure of what has no reward to give."""
_DETAIL_CHARS = 2000
_CHAT = "prompt_messages"
"""`areal_lite.config.data.CHAT`, which is heavy to import."""


@dataclass(frozen=True, slots=True)
class Reply(VerifyResult):
    """What one completion got: a result whose every figure was checked, or a failure with its detail."""

    failure: str | None = None
    """Short and countable: `nan`, `inf`, `wrong_type:<type>`, `exception:<type>`, `timeout` and so on."""
    detail: str = ""
    """For a person: the end of the traceback."""
    retry_after_s: float = 0.0
    """Of `unavailable`: for how long the service does not want to be asked."""

    @property
    def total(self) -> float | None:
        """What the completion earned in all, outcome and steps."""
        return None if self.reward is None else self.reward + sum(value for _, value in self.step_rewards)


def failed(failure: str, detail: str) -> Reply:
    """Return the reply to a call that failed; of a long detail the end, where a traceback names the error."""
    is_long = len(detail) > _DETAIL_CHARS
    return Reply(None, failure=failure, detail="..." + detail[-_DETAIL_CHARS:] if is_long else detail)


def checked(reply: Reply) -> Reply:
    """Return a reply, or the failure `inf` where it earned what float32, in which rewards train, cannot hold."""
    earned = (reply.reward, *(value for _, value in reply.step_rewards), reply.total)
    problems = (problem for number in earned for problem in _number_problems(number, "the reward, steps included,"))
    return next(problems, reply)


def prepare_verifier(
    function: VerifyFunction, arguments: Mapping[str, Any]
) -> tuple[VerifyFunction, Mapping[str, Any]]:
    """Check the arguments by the function's model, and run what `prepared_by` names; a `VerifierError` if one fails.

    Returns:
        What is called, and the arguments of every call: of a class one instance, made with the recipe's arguments.
    """
    prepare = getattr(function, "_verifier_prepare", None)
    try:
        if isinstance(function, type):
            return function(**arguments), {}
        checked, named = _given(function, arguments)
        if prepare is not None:
            prepare(*checked, **named)
    except BaseException as error:  # user code runs here, sys.exit() included
        raise VerifierError(f"the verifier cannot be prepared with {dict(arguments)}: {_describe(error)}") from error
    return function, arguments


def batch_size(function: VerifyFunction) -> int | None:
    """Return how many completions one call takes, as `batched` says; None for a function of one."""
    return getattr(function, "_verifier_batch", None)


def is_async(function: VerifyFunction) -> bool:
    """Whether several calls can be in flight at once, in one event loop."""
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


def answer(function: VerifyFunction, calls: Sequence[Call], *, arguments: Mapping[str, Any]) -> list[Reply]:
    """Call a verify function, and turn whatever it does into replies.

    Args:
        calls: One, or what a `@batched` function gets at once.
        arguments: The recipe's; a column of the same name fails the call.

    Returns:
        A reply per call; or a single one, a failure, where it befell them all.
    """
    try:
        value = _invoke(function, calls, arguments)
        if inspect.isawaitable(value):
            value = _event_loop().run_until_complete(value)
        return _replies(function, value, calls)
    except BaseException as error:  # a verifier that calls sys.exit() failed like any other
        return [_failed(error)]


async def answer_async(function: VerifyFunction, calls: Sequence[Call], *, arguments: Mapping[str, Any]) -> list[Reply]:
    """As `answer`, in the event loop that is running."""
    try:
        return _replies(function, await _invoke(function, calls, arguments), calls)
    except BaseException as error:
        return [_failed(error)]


def _invoke(function: VerifyFunction, calls: Sequence[Call], arguments: Mapping[str, Any]) -> Any:
    checked, named = _given(function, arguments)
    if batch_size(function) is not None:
        return function(*map(list, zip(*calls, strict=True)), *checked, **named)
    ((*texts, row),) = calls
    if _CHAT in row and not _takes(function, _CHAT):
        row = {name: value for name, value in row.items() if name != _CHAT}
    return function(*texts, *checked, **row, **named)


def _takes(function: VerifyFunction, name: str) -> bool:
    """Whether a function has a keyword, or takes any; one whose signature cannot be read does."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return True
    return any(one.name == name or one.kind is one.VAR_KEYWORD for one in parameters)


def _given(function: VerifyFunction, arguments: Mapping[str, Any]) -> tuple[list[Any], Mapping[str, Any]]:
    """Return the recipe's arguments as a call has them: a checked model, where the function has one, or keywords."""
    model = getattr(function, "arguments_model", None)
    return ([model.model_validate(arguments)], {}) if model else ([], arguments)


def _replies(function: VerifyFunction, value: Any, calls: Sequence[Call]) -> list[Reply]:
    if batch_size(function) is None:
        return [read_result(value, completion=calls[0][1])]
    if not isinstance(value, Sequence) or isinstance(value, str):
        return [_wrong_type(value, "a list, as the function is @batched")]
    if len(value) != len(calls):
        return [failed("wrong_length", f"must return {len(calls)} results, got {len(value)}")]
    return [read_result(item, completion=call[1]) for item, call in zip(value, calls, strict=True)]


def read_result(value: Any, *, completion: str) -> Reply:
    """Check everything that a verify function said about one completion."""
    if value is None:  # a forgotten return is no word of "not applicable"
        return _wrong_type(value, "the reward: a number")
    if isinstance(value, Mapping):
        return _wrong_type(
            value, "the reward: a number, or areal_lite.verify.VerifyResult(reward, parts=..., metrics=...)"
        )
    result = value if isinstance(value, VerifyResult) else VerifyResult(value)
    if problem := next(_problems(result, completion), None):
        return problem
    parts, metrics = (
        {str(name): float(number) for name, number in table.items()} for table in (result.parts, result.metrics)
    )
    steps = tuple((int(end), float(number)) for end, number in result.step_rewards)
    return checked(Reply(float(cast(float, result.reward)), parts, steps, result.feedback, metrics))


def _problems(result: VerifyResult, completion: str) -> Iterator[Reply]:
    if result.reward is None:
        yield failed(NOT_APPLICABLE, "the verifier gives this completion no reward")
    yield from _number_problems(result.reward, "the reward")
    for field in ("parts", "metrics"):
        table = getattr(result, field)
        if not isinstance(table, Mapping):
            yield _wrong_type(table, f"{field}: a dict of numbers")
        for name, number in table.items():
            yield from _number_problems(number, f"{field}[{name!r}]")
    if not isinstance(result.feedback, str):
        yield _wrong_type(result.feedback, "feedback: a text")
    try:
        for end, number in result.step_rewards:
            if not (isinstance(end, numbers.Integral) and 1 <= end <= len(completion)):
                text = f"must end at a character 1..{len(completion)} of the completion, got {end!r}"
                yield failed("bad_step_reward", text)
            yield from _number_problems(number, f"the step reward at character {end}")
    except (TypeError, ValueError):
        text = f"step_rewards must be pairs (end_character, value), got {result.step_rewards!r}"
        yield failed("bad_step_reward", text)


def _number_problems(value: Any, what: str) -> Iterator[Reply]:
    if not isinstance(value, numbers.Real):
        yield _wrong_type(value, f"{what}: a number")
        return
    try:
        if not math.isfinite(struct.unpack("f", struct.pack("f", float(value)))[0]):
            yield failed("nan" if math.isnan(value) else "inf", f"{what} is {float(value)}")
    except OverflowError:
        yield failed("inf", f"{what} is too large for float32")


def _wrong_type(value: Any, wanted: str) -> Reply:
    return failed(f"wrong_type:{_type_name(value)}", f"expected {wanted}; got {value!r}")


def _failed(error: BaseException) -> Reply:
    if _is_lack_of_memory(error):
        # Its traceback may take memory that is not there.
        return failed("memory", f"{type(error).__name__}: more than memory_mb allows")
    if isinstance(error, VerifierUnavailable):
        after_s = error.retry_after_s
        is_known = isinstance(after_s, numbers.Real) and math.isfinite(after_s)
        return replace(failed("unavailable", _describe(error)), retry_after_s=float(after_s) if is_known else 0.0)
    return failed(f"exception:{type(error).__name__}", _describe(error))


def _is_lack_of_memory(error: BaseException) -> bool:
    """Whether it is; a thread that cannot be started lacks memory for its stack, or is one of too many."""
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return isinstance(error, MemoryError) or "can't start new thread" in str(error.args[:1])


@functools.cache
def _event_loop() -> asyncio.AbstractEventLoop:
    """One loop for all calls, so that an async verifier can keep its connections."""
    return asyncio.new_event_loop()


def _type_name(value: object) -> str:
    kind = type(value)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def _describe(error: BaseException) -> str:
    """Return the traceback from the user's own first frame on."""
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename in (__file__, asyncio.base_events.__file__):
        frames = frames.tb_next
    return "".join(traceback.format_exception(type(error), error, frames)).strip()
