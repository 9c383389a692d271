"""Reward functions written for other libraries, as verifiers: `trl`, `verl`, `openrlhf` and `reasoning_gym`."""

import functools
import inspect
import json
import re
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from numbers import Real
from typing import Any, Self

from pydantic import Field, model_validator

from areal_lite.config.data import CHAT, REFERENCES
from areal_lite.config.plugins import find_function
from areal_lite.config.section import Arguments
from areal_lite.errors import PluginError, VerifierUnavailable
from areal_lite.verify.result import Rows, Texts, VerifyResult, batched, prepared_by, with_arguments

_BATCH_SIZE = 32
_NOT_COLUMNS = ("prompts", "completions", "messages", CHAT)
_TUPLE_FAMILIES = ("arc_agi", "rearc")
"""Families whose scorer compares the answer with a tuple of tuples; a row that has travelled holds lists."""


class TrlArguments(Arguments, extra="allow"):
    """Of `trl`; further ones are the function's own keywords."""

    function: str
    """the reward function as file.py:function or module:function; plain or async"""
    answer_column: str | None = None
    """keyword under which the function looks for the answers; null = answer, and what else it wants and no row has"""
    chat: bool | None = None
    """hand prompts and completions over as messages, as samples of several turns always are; null = as TRL does, where
    the model is given a chat"""


class VerlArguments(Arguments):
    """Of `verl`."""

    function: str
    """the reward function as file.py:function or module:function; plain or async"""
    arguments: dict[str, Any] = Field({})
    """further keyword arguments for it (verl's reward_kwargs)"""


class OpenRlhfArguments(Arguments):
    """Of `openrlhf`: one of the two."""

    function: str | None = None
    """reward_func of a file, as file.py:function or module:function"""
    url: str | None = None
    """address of a remote reward model"""
    timeout_s: float = Field(180.0, gt=0)
    """seconds that it may take for an answer; verifier.timeout_s ends a call earlier"""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.function is None) == (self.url is None):
            raise ValueError(f"openrlhf needs a function or a url, got {self.function} and {self.url}: give one")
        return self


class GymArguments(Arguments):
    """Of `reasoning_gym`."""

    extract: str | None = None
    """regular expression for the answer: its first group (else all of it), where it matches last"""


_found = functools.cache(functools.partial(find_function, kind="reward function"))


@prepared_by(lambda arguments: _found(arguments.function))
@batched(_BATCH_SIZE)
@with_arguments(TrlArguments)
async def trl(prompts: Texts, completions: Texts, answers: Texts, rows: Rows, arguments: TrlArguments, /) -> list[Any]:
    """Score with a reward function for TRL: `f(prompts=..., completions=..., <column>=...) -> list[float | None]`.

    What TRL alone can give is not there: `completion_ids`, `trainer_state`. A column that a row lacks is None for it.
    None as a reward is TRL's word for "not applicable": a sum of verifiers passes over it, and a sample without any
    reward is a failure.

    Returns:
        One reward per completion, with what the function logged through `log_metric` as metrics.

    Source: https://huggingface.co/docs/trl/main/en/grpo_trainer, "Using a custom reward function".
    """
    forms = [bool(row.get("messages") or (CHAT in row if arguments.chat is None else arguments.chat)) for row in rows]
    results: list[Any] = [None] * len(rows)
    for is_chat in dict.fromkeys(forms):  # a call for each, as a function may look at the first alone
        chosen = [index for index, form in enumerate(forms) if form == is_chat]
        columns: tuple[Sequence[Any], ...] = (prompts, completions, answers, rows)
        rewards = await _of_trl(arguments, is_chat, *([values[index] for index in chosen] for values in columns))
        if len(rewards) != len(chosen):
            return rewards
        for index, reward in zip(chosen, rewards, strict=True):
            results[index] = reward
    return results


async def _of_trl(
    arguments: TrlArguments, is_chat: bool, prompts: Texts, completions: Texts, answers: Texts, rows: Rows
) -> list[VerifyResult]:
    metrics: dict[str, float] = {}
    names = dict.fromkeys(name for row in rows for name in row if name not in _NOT_COLUMNS)
    columns: dict[str, Any] = {name: [row.get(name) for row in rows] for name in names}
    asked, said = list[Any](prompts), list[Any](completions)
    if is_chat:
        asked = [
            row.get(CHAT) or [{"role": "user", "content": prompt}] for row, prompt in zip(rows, prompts, strict=True)
        ]
        said = [
            row.get("messages") or [{"role": "assistant", "content": completion}]
            for row, completion in zip(rows, completions, strict=True)
        ]
    function, references = _found(arguments.function), list(map(_reference, answers, rows))
    wanted = [arguments.answer_column] if arguments.answer_column else ["answer", *_wanted(function) - columns.keys()]
    rewards = function(
        prompts=asked,
        completions=said,
        log_extra=lambda *_: None,
        log_metric=metrics.__setitem__,
        **columns | dict.fromkeys(wanted, references) | (arguments.model_extra or {}),
    )
    if inspect.isawaitable(rewards):
        rewards = await rewards
    return [VerifyResult(reward, metrics=metrics) for reward in rewards]


def _wanted(function: Callable[..., Any]) -> set[str]:
    """Return the keywords that a reward function must be given for which TRL would look among the columns."""
    parameters = inspect.signature(function).parameters.values()
    must = {one.name for one in parameters if one.default is one.empty and one.kind != one.VAR_KEYWORD}
    return must - {"prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric"}


def _reference(answer: str, row: Mapping[str, Any]) -> Any:
    """Return the answer as the data has it: a text, or a list of those that are right."""
    return row.get(REFERENCES, answer)


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
        ground_truth=(reward_model or {}).get("ground_truth", _reference(answer, row)),
        extra_info=row if extra_info is None else extra_info,
        **arguments.arguments,
    )
    if inspect.isawaitable(result):
        result = await result
    if not isinstance(result, Mapping):
        return VerifyResult(result)
    metrics = {name: float(value) for name, value in result.items() if name != "score" and isinstance(value, Real)}
    return VerifyResult(result["score"], metrics=metrics)


@prepared_by(lambda arguments: arguments.function and _found(arguments.function))
@batched(_BATCH_SIZE)
@with_arguments(OpenRlhfArguments)
def openrlhf(
    prompts: Texts, completions: Texts, answers: Texts, rows: Rows, arguments: OpenRlhfArguments, /
) -> list[VerifyResult]:
    """Score with what OpenRLHF's `--remote_rm_url` names: a server, or `reward_func(queries, prompts, labels)`.

    Either gives a list or tensor of rewards, or a mapping with `rewards`, whose `extra_logs` become metrics.

    Source: https://openrlhf.readthedocs.io/en/latest/, "Reinforced Fine-tuning" and "Remote Reward Model".
    """
    queries = [prompt + completion for prompt, completion in zip(prompts, completions, strict=True)]
    labels = list(map(_reference, answers, rows))
    if arguments.function is not None:
        said = _found(arguments.function)(queries, list(prompts), labels)
    else:
        asked = json.dumps({"query": queries, "prompts": list(prompts), "labels": labels}).encode()
        request = urllib.request.Request(str(arguments.url), asked, {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=arguments.timeout_s) as reply:
                said = json.load(reply)
        except OSError as error:  # what urllib raises inherits it
            raise VerifierUnavailable(f"{arguments.url}: {error}") from error
    logs = said.get("extra_logs", {}) if isinstance(said, Mapping) else {}
    rewards = said["rewards"] if isinstance(said, Mapping) else said
    columns = {name: values for name, values in logs.items() if len(_list(values)) == len(queries)}
    return [
        VerifyResult(reward, metrics={name: _list(values)[index] for name, values in columns.items()})
        for index, reward in enumerate(_list(rewards))
    ]


def _list(values: Any) -> list[Any]:
    """Return a list, a tensor's numbers, or a single number as a list."""
    plain = values.tolist() if hasattr(values, "tolist") else values
    return list(plain) if isinstance(plain, Sequence) else [plain]


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
        raise PluginError("the verifier reasoning_gym needs the package: pip install reasoning-gym") from error
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
