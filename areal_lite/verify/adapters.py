"""Reward functions written for other libraries, as verifiers: `trl`, `verl` and `reasoning_gym`."""

import functools
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from numbers import Real
from typing import Any

from pydantic import ConfigDict, Field

from areal_lite.config.plugins import find_function
from areal_lite.config.section import Arguments, FunctionName
from areal_lite.errors import PluginError
from areal_lite.verify.result import VerifyResult, batched, prepared_by, with_arguments

_BATCH_SIZE = 32
_NOT_COLUMNS = ("prompts", "completions", "messages")
_TUPLE_FAMILIES = ("arc_agi", "rearc")
"""Families whose scorer compares the answer with a tuple of tuples; a row that has travelled holds lists."""


class TrlArguments(Arguments):
    """Of `trl`; further ones are the function's own keywords."""

    model_config = ConfigDict(extra="allow")

    function: FunctionName
    """the reward function as file.py:function or module:function; plain or async"""
    answer_column: str = "answer"
    """keyword under which the function looks for the answers, e.g. solution"""
    chat: bool = False
    """hand prompts and completions over as messages, as samples of several turns always are"""


class VerlArguments(Arguments):
    """Of `verl`."""

    function: FunctionName
    """the reward function as file.py:function or module:function; plain or async"""
    arguments: dict[str, Any] = Field({})
    """further keyword arguments for it (verl's reward_kwargs)"""


class GymArguments(Arguments):
    """Of `reasoning_gym`."""

    extract: str | None = None
    """regular expression for the answer: its first group (else all of it), where it matches last"""


@functools.cache
def _found(name: str) -> Callable[..., Any]:
    return find_function(name, kind="reward function")


@prepared_by(lambda arguments: _found(arguments.function))
@batched(_BATCH_SIZE)
@with_arguments(TrlArguments)
async def trl(
    prompts: Sequence[str],
    completions: Sequence[str],
    answers: Sequence[str],
    rows: Sequence[Mapping[str, Any]],
    arguments: TrlArguments,
    /,
) -> list[Any]:
    """Score with a reward function for TRL: `f(prompts=..., completions=..., <column>=...) -> list[float | None]`.

    What TRL alone can give is not there: `completion_ids`, `trainer_state`. A column that a row lacks is None for it.
    None as a reward is TRL's word for "not applicable", which its weighted sum passes over; a sample without any reward
    cannot train, so here it is a failure. To apply a function to some rows only, choose verifiers per row.

    Returns:
        One reward per completion, with what the function logged through `log_metric` as metrics.

    Source: https://huggingface.co/docs/trl/main/en/grpo_trainer, "Using a custom reward function".
    """
    metrics: dict[str, float] = {}
    names = dict.fromkeys(name for row in rows for name in row if name not in _NOT_COLUMNS)
    columns: dict[str, Any] = {name: [row.get(name) for row in rows] for name in names}
    asked, said = list[Any](prompts), list[Any](completions)
    if arguments.chat or any(row.get("messages") for row in rows):
        asked = [[{"role": "user", "content": prompt}] for prompt in prompts]
        said = [
            row.get("messages") or [{"role": "assistant", "content": completion}]
            for row, completion in zip(rows, completions, strict=True)
        ]
    rewards = _found(arguments.function)(
        prompts=asked,
        completions=said,
        log_extra=lambda *_: None,
        log_metric=metrics.__setitem__,
        **columns | {arguments.answer_column: list(answers)} | (arguments.model_extra or {}),
    )
    if inspect.isawaitable(rewards):
        rewards = await rewards
    return [reward if reward is None else VerifyResult(reward, metrics=metrics) for reward in rewards]


@prepared_by(lambda arguments: _found(arguments.function))
@with_arguments(VerlArguments)
async def verl(
    prompt: str,
    completion: str,
    answer: str,
    arguments: VerlArguments,
    /,
    *,
    data_source: str = "",
    reward_model: Mapping[str, Any] | None = None,
    extra_info: Mapping[str, Any] | None = None,
    **row: Any,
) -> VerifyResult:
    """Score with a reward function for verl: `f(data_source=, solution_str=, ground_truth=, extra_info=)`.

    A row without a column `reward_model` of verl's form, `{"ground_truth": ...}`, gives its answer; one without
    `extra_info` all its other columns. The prompt is not handed on; verl's functions do not see it.

    Returns:
        The number returned, or `score` of the mapping returned, whose other numbers become metrics.

    Source: https://verl.readthedocs.io/en/latest/preparation/reward_function.html
    """
    result = _found(arguments.function)(
        data_source=data_source,
        solution_str=completion,
        ground_truth=(reward_model or {}).get("ground_truth", answer),
        extra_info=row if extra_info is None else extra_info,
        **arguments.arguments,
    )
    if inspect.isawaitable(result):
        result = await result
    if not isinstance(result, Mapping):
        return VerifyResult(result)
    metrics = {name: float(value) for name, value in result.items() if name != "score" and isinstance(value, Real)}
    return VerifyResult(result["score"], metrics=metrics)


@with_arguments(GymArguments)
def reasoning_gym(
    prompt: str,
    completion: str,
    answer: str,
    arguments: GymArguments,
    /,
    *,
    reasoning_gym_dataset: str,
    reasoning_gym_entry: Mapping[str, Any],
    **row: Any,
) -> VerifyResult:
    """Score with the own scorer of a task family of reasoning-gym; many give parts of a point.

    The answer is what stands between the last `<answer>` tags, else behind the last `####`, else all of the completion.
    The two columns, the family's name and the task as generated, are those that `data.source: reasoning_gym` makes.
    """
    given = _answer_in(completion, arguments.extract)
    if given is None:
        return VerifyResult(0.0, feedback="no answer found")
    score, entry = _scorer(reasoning_gym_dataset), dict(reasoning_gym_entry)
    if reasoning_gym_dataset in _TUPLE_FAMILIES:
        output = tuple(map(tuple, entry["metadata"]["output"]))
        entry["metadata"] = {**entry["metadata"], "output": output}
    try:
        return VerifyResult(score(given, entry))
    except Exception as error:
        # Some families raise at answers of another form; raising at the right one as well is no fault of the answer's.
        score(entry["answer"], entry)
        return VerifyResult(0.0, feedback=f"the scorer cannot read it: {error}")


@functools.cache
def _scorer(family: str) -> Callable[[str, Any], float]:
    try:
        from reasoning_gym.factory import get_score_answer_fn
    except ImportError as error:
        raise PluginError("the verifier reasoning_gym needs the package: pip install 'areal-lite[gym]'") from error
    try:
        score: Callable[[str, Any], float] = get_score_answer_fn(family)
    except ValueError as error:
        raise PluginError(f"reasoning-gym must know the family {family!r} of the row: {error}") from error
    return score


def _answer_in(completion: str, extract: str | None) -> str | None:
    if extract is None:
        tagged = re.findall(r"<answer>(.*?)</answer>", completion, flags=re.DOTALL)
        return (tagged[-1] if tagged else completion.rpartition("####")[2]).strip()
    *_, last = [None, *re.finditer(extract, completion)]
    return None if last is None else (last[1] if last.re.groups else last[0])
