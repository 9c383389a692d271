"""What a verify function is: how it is called, and what counts as a reward.

    def verify(prompt: str, completion: str, answer: str, **row) -> float | VerifyResult

or the same with `async def`, or `@batched` with a list of each. `row` holds the data row's other columns, `messages`
where the sample has several turns, and the recipe's `arguments`. Slow loading belongs in a
function of those arguments, named by `@prepared_by`: it runs once in each process, and no call's deadline counts it.
Imports nothing heavy, as every restart of a process pays for it.
"""

import asyncio
import errno
import functools
import inspect
import math
import numbers
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from areal_lite.config.plugins import takes
from areal_lite.errors import VerifierError, VerifierUnavailable
from areal_lite.verify.result import VerifyResult

VerifyFunction = Callable[..., Any]
Call = tuple[str, str, str, Mapping[str, Any]]
"""Prompt as the model saw it, completion, reference answer, and the row's other columns."""

NOT_APPLICABLE = "not_applicable"
"""The failure of what has no reward to give."""
_DETAIL_CHARS = 2000
_LARGEST = (2 - 2**-23) * 2.0**127
"""The largest number of float32."""
_CHAT = "prompt_messages"
"""`areal_lite.config.data.CHAT`, which is heavy to import."""


@dataclass(frozen=True, slots=True)
class Reply(VerifyResult):
    """The outcome for one completion: a result with every figure checked, or a failure with its detail."""

    failure: str | None = None
    """Short and countable: `nan`, `inf`, `wrong_type:<type>`, `exception:<type>`, `timeout` and so on."""
    detail: str = ""
    """For a person: the end of the traceback."""
    retry_after_s: float = 0.0
    """Of `unavailable`: the earliest time of the next try."""

    @property
    def total(self) -> float | None:
        """The sum of the reward and the step rewards."""
        return None if self.reward is None else self.reward + sum(value for _, value in self.step_rewards)


def failed(failure: str, detail: str) -> Reply:
    """Return the reply to a failed call; of a long detail only the end, where a traceback names the error."""
    is_long = len(detail) > _DETAIL_CHARS
    return Reply(None, failure=failure, detail="..." + detail[-_DETAIL_CHARS:] if is_long else detail)


class _Problem(Exception):
    """A fault in a verify function's result: the failure and its detail."""


def checked(reply: Reply) -> Reply:
    """Return a reply, or the failure `inf` where it earned what float32, in which rewards train, cannot hold."""
    try:
        for number in (reply.reward, *(value for _, value in reply.step_rewards), reply.total):
            _number(number, "the reward, steps included,")
    except _Problem as problem:
        return failed(*problem.args)
    return reply


class Verifier:
    """A verify function with the recipe's arguments, ready to be called."""

    def __init__(self, function: VerifyFunction, arguments: Mapping[str, Any]) -> None:
        """Make an instance of a class, and run what `prepared_by` names; a `VerifierError` if that fails."""
        self._function, self._arguments = function, arguments
        try:
            if isinstance(function, type):
                self._function, self._arguments = function(**arguments), {}
            if (prepare := getattr(self._function, "_verifier_prepare", None)) is not None:
                prepare(**self._arguments)
        except BaseException as error:  # user code runs here, sys.exit() included
            text = f"the verifier cannot be prepared with {dict(arguments)}: {_describe(error)}"
            raise VerifierError(text) from error
        self.batch_size: int | None = getattr(self._function, "_verifier_batch", None)
        """How many completions one call of a `@batched` function takes; None for a function of one."""
        calls = (self._function, type(self._function).__call__)
        self.is_async = any(map(inspect.iscoroutinefunction, calls))
        """Whether several calls can be in flight at once, in one event loop."""
        self._takes_chat = takes(self._function, _CHAT)

    def answer(self, calls: Sequence[Call]) -> list[Reply]:
        """Call the function, and turn whatever it does into replies; a column with the name of an argument fails.

        Args:
            calls: One, or what a `@batched` function gets at once.

        Returns:
            A reply per call; or a single one, a failure, where it befell them all.
        """
        try:
            value = self._call(calls)
            if inspect.isawaitable(value):
                value = _event_loop().run_until_complete(value)
            return self._replies(value, calls)
        except BaseException as error:  # a verifier that calls sys.exit() failed like any other
            return [_failed(error)]

    async def answer_async(self, calls: Sequence[Call]) -> list[Reply]:
        """As `answer`, in the event loop that is running."""
        try:
            return self._replies(await self._call(calls), calls)
        except BaseException as error:
            return [_failed(error)]

    def _call(self, calls: Sequence[Call]) -> Any:
        if self.batch_size is not None:
            return self._function(*map(list, zip(*calls, strict=True)), **self._arguments)
        ((*texts, row),) = calls
        if not self._takes_chat:
            row = {name: value for name, value in row.items() if name != _CHAT}
        return self._function(*texts, **row, **self._arguments)

    def _replies(self, value: Any, calls: Sequence[Call]) -> list[Reply]:
        if self.batch_size is None:
            return [read_result(value, completion=calls[0][1])]
        if not isinstance(value, Sequence) or isinstance(value, str):
            raise _wrong_type(value, "a list, as the function is @batched")
        if len(value) != len(calls):
            raise _Problem("wrong_length", f"must return {len(calls)} results, got {len(value)}")
        return [read_result(item, completion=call[1]) for item, call in zip(value, calls, strict=True)]


def read_result(value: Any, *, completion: str) -> Reply:
    """Check a verify function's result for one completion."""
    is_result = isinstance(value, VerifyResult)
    result = value if is_result else VerifyResult(value)
    try:
        if is_result and result.reward is None:  # a function that returns nothing forgot to
            raise _Problem(NOT_APPLICABLE, "the verifier gives this completion no reward")
        more = "" if is_result else ", or areal_lite.verify.VerifyResult(reward, parts=..., metrics=...)"
        reward = _number(result.reward, "the reward", more)
        parts, metrics = (_table(getattr(result, name), name) for name in ("parts", "metrics"))
        if not isinstance(result.feedback, str):
            raise _wrong_type(result.feedback, "feedback: a text")
        return checked(Reply(reward, parts, _steps(result.step_rewards, len(completion)), result.feedback, metrics))
    except _Problem as problem:
        return failed(*problem.args)


def _table(table: Any, name: str) -> dict[str, float]:
    if not isinstance(table, Mapping):
        raise _wrong_type(table, f"{name}: a dict of numbers")
    return {str(key): _number(number, f"{name}[{key!r}]") for key, number in table.items()}


def _steps(step_rewards: Any, num_characters: int) -> tuple[tuple[int, float], ...]:
    try:
        pairs = [(end, value) for end, value in step_rewards]
    except (TypeError, ValueError):
        text = f"step_rewards must be pairs (end_character, value), got {step_rewards!r}"
        raise _Problem("bad_step_reward", text) from None
    for end, _ in pairs:
        if not (isinstance(end, numbers.Integral) and 1 <= int(end) <= num_characters):
            text = f"must end at a character 1..{num_characters} of the completion, got {end!r}"
            raise _Problem("bad_step_reward", text)
    return tuple((int(end), _number(value, f"the step reward at character {end}")) for end, value in pairs)


def _number(value: Any, what: str, more: str = "") -> float:
    """Return a number that float32 can hold; `more` names other values that would be accepted."""
    if not isinstance(value, numbers.Real) and math.prod(getattr(value, "shape", [0])) == 1:  # an array, numpy's bool
        value = value.item()
    if not isinstance(value, numbers.Real):
        raise _wrong_type(value, f"{what}: a number{more}")
    try:
        number = float(value)
    except OverflowError:  # of an integer
        number = math.inf
    if abs(number) <= _LARGEST:
        return number
    raise _Problem(
        "nan" if math.isnan(number) else "inf", f"{what} is {number}: expected a finite number that float32 holds"
    )


def _wrong_type(value: Any, wanted: str) -> _Problem:
    kind = type(value)
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    return _Problem(f"wrong_type:{name}", f"expected {wanted}; got {value!r}")


def _failed(error: BaseException) -> Reply:
    if isinstance(error, _Problem):
        return failed(*error.args)
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


def _describe(error: BaseException) -> str:
    """Return the traceback from the user's own first frame on."""
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename in (__file__, asyncio.base_events.__file__):
        frames = frames.tb_next
    return "".join(traceback.format_exception(type(error), error, frames)).strip()
