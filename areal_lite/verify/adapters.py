"""Reward functions written for other libraries, as verifiers: `trl`, `verl` and `reasoning_gym`.

    verifier: {function: trl, arguments: {function: "rewards.py:reward_func"}}

TRL and verl themselves are not needed; the package reasoning-gym is. Runs in the verifier's process.
"""

import functools
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from numbers import Real
from typing import Any

from areal_lite.config.plugins import find_function
from areal_lite.errors import PluginError
from areal_lite.verify.result import VerifyResult, batched, prepared_by

__all__ = ["reasoning_gym", "trl", "verl"]

_BATCH_SIZE = 32
_NOT_COLUMNS = ("prompts", "completions", "messages")
_TUPLE_FAMILIES = ("arc_agi", "rearc")
"""Families whose scorer compares the answer with a tuple of tuples; a row that has travelled holds lists."""


@functools.cache
def _found(name: str) -> Callable[..., Any]:
    return find_function(name, kind="reward function")


def _load(*, function: str, **_: Any) -> None:
    _found(function)


@prepared_by(_load)
@batched(_BATCH_SIZE)
async def trl(
    prompts: Sequence[str],
    completions: Sequence[str],
    answers: Sequence[str],
    rows: Sequence[Mapping[str, Any]],
    *,
    function: str,
    answer_column: str = "answer",
    chat: bool = False,
    **arguments: Any,
) -> list[Any]:
    """Score with a reward function for TRL: `f(prompts=..., completions=..., <column>=...) -> list[float | None]`.

    What TRL alone can give is not there: `completion_ids`, `trainer_state`. None is TRL's word for "not applicable",
    which its weighted sum passes over; a sample without any reward cannot train, so here it is a failure. To apply a
    function to some rows only, choose verifiers per row.

    Args:
        prompts: Of each completion.
        completions: One batch, of any prompts.
        answers: Of each prompt.
        rows: Its other columns; a column that a row lacks is None for it.
        function: The reward function as `file.py:function` or `module:function`; plain or async.
        answer_column: Keyword under which the function looks for the answers, e.g. `solution`.
        chat: Hand prompts and completions over as lists of messages, as TRL does with conversational data. Samples of
            several turns always are.
        arguments: Further keyword arguments for the function.

    Returns:
        One reward per completion, with what the function logged through `log_metric` as metrics.

    Source: https://huggingface.co/docs/trl/main/en/grpo_trainer, "Using a custom reward function".
    """
    metrics: dict[str, float] = {}
    names = {name: None for row in rows for name in row if name not in _NOT_COLUMNS}
    columns: dict[str, Any] = {name: [row.get(name) for row in rows] for name in names}
    chats = [row.get("messages") for row in rows]
    if chat or any(chats):
        prompts, completions = _as_chats(prompts, completions, chats)  # type: ignore[assignment]
    rewards = _found(function)(
        prompts=list(prompts),
        completions=list(completions),
        log_extra=lambda *_: None,
        log_metric=metrics.__setitem__,
        **columns | {answer_column: list(answers)} | arguments,
    )
    if inspect.isawaitable(rewards):
        rewards = await rewards
    return [reward if reward is None else VerifyResult(reward, metrics=metrics) for reward in rewards]


def _as_chats(
    prompts: Sequence[str], completions: Sequence[str], chats: Sequence[Any]
) -> tuple[list[list[dict[str, str]]], list[list[dict[str, str]]]]:
    return [[{"role": "user", "content": prompt}] for prompt in prompts], [
        messages or [{"role": "assistant", "content": completion}]
        for messages, completion in zip(chats, completions, strict=True)
    ]


@prepared_by(_load)
async def verl(
    prompt: str,
    completion: str,
    answer: str,
    *,
    function: str,
    arguments: Mapping[str, Any] | None = None,
    data_source: str = "",
    reward_model: Mapping[str, Any] | None = None,
    extra_info: Mapping[str, Any] | None = None,
    **row: Any,
) -> VerifyResult:
    """Score with a reward function for verl: `f(data_source=, solution_str=, ground_truth=, extra_info=)`.

    Args:
        prompt: Not handed on; verl's functions do not see it.
        completion: `solution_str`.
        answer: `ground_truth`, where the row has no `reward_model` of verl's form, `{"ground_truth": ...}`.
        function: The reward function as `file.py:function` or `module:function`; plain or async.
        arguments: Further keyword arguments for it (verl's `reward_kwargs`).
        data_source: The row's column of this name.
        reward_model: The row's column of this name.
        extra_info: The row's column of this name; where it has none, all its other columns.

    Returns:
        The number returned, or `score` of the mapping returned, whose other numbers become metrics.

    Source: https://verl.readthedocs.io/en/latest/preparation/reward_function.html
    """
    result = _found(function)(
        data_source=data_source,
        solution_str=completion,
        ground_truth=(reward_model or {}).get("ground_truth", answer),
        extra_info=row if extra_info is None else extra_info,
        **arguments or {},
    )
    if inspect.isawaitable(result):
        result = await result
    if not isinstance(result, Mapping):
        return VerifyResult(result)
    metrics = {name: float(value) for name, value in result.items() if name != "score" and isinstance(value, Real)}
    return VerifyResult(result["score"], metrics=metrics)


def reasoning_gym(
    prompt: str,
    completion: str,
    answer: str,
    *,
    reasoning_gym_dataset: str,
    reasoning_gym_entry: Mapping[str, Any],
    extract: str | None = None,
    **row: Any,
) -> VerifyResult:
    """Score with the own scorer of a task family of reasoning-gym; many give parts of a point.

    Args:
        prompt: Not looked at.
        completion: Holds the answer: between the last `<answer>` tags, else behind the last `####`, else all of it.
        answer: Not looked at; several answers may be right.
        reasoning_gym_dataset: Name of the family, a column that `data.source: reasoning_gym` makes.
        reasoning_gym_entry: The task as generated, likewise.
        extract: Regular expression in place of the above: its first group (else all of it), where it matches last.

    Raises:
        PluginError: The package is not installed, or has no such family.
    """
    given = _answer_in(completion, extract)
    if given is None:
        return VerifyResult(0.0, feedback="no answer found")
    score, entry = _scorer(reasoning_gym_dataset), _as_generated(reasoning_gym_dataset, reasoning_gym_entry)
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


def _as_generated(family: str, entry: Mapping[str, Any]) -> Mapping[str, Any]:
    if family not in _TUPLE_FAMILIES:
        return entry
    metadata = entry["metadata"]
    return {**entry, "metadata": {**metadata, "output": tuple(map(tuple, metadata["output"]))}}


def _answer_in(completion: str, extract: str | None) -> str | None:
    if extract is None:
        tagged = re.findall(r"<answer>(.*?)</answer>", completion, flags=re.DOTALL)
        return (tagged[-1] if tagged else completion.rpartition("####")[2]).strip()
    *_, last = [None, *re.finditer(extract, completion)]
    return None if last is None else (last[1] if last.re.groups else last[0])
