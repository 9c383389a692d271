"""Reward functions written for other libraries, as verifiers: `trl`, `verl`, `openrlhf` and `reasoning_gym`."""

import functools
import inspect
import json
import re
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from http import HTTPStatus
from numbers import Real
from typing import Any, Self
from urllib.error import HTTPError

from pydantic import Field, model_validator

from areal_lite.config.data import CHAT, REFERENCES
from areal_lite.config.plugins import find_function
from areal_lite.config.section import Arguments
from areal_lite.errors import PluginError, VerifierUnavailable
from areal_lite.verify.builtin.final_answer import answer_text
from areal_lite.verify.result import Rows, Texts, VerifyResult, batched, prepared_by

_BATCH_SIZE = 32
_NOT_COLUMNS = ("prompts", "completions", "messages", CHAT)
_NAN = re.compile(r"\bnanj?\b", re.IGNORECASE)
_TUPLE_FAMILIES = ("arc_agi", "rearc")
"""Families whose scorer compares the answer with a tuple of tuples; a row that was sent to a process holds lists."""


_found = functools.cache(functools.partial(find_function, kind="reward function"))


@prepared_by(lambda self: _found(self.function))
@batched(_BATCH_SIZE)
class trl(Arguments, extra="allow"):
    """Score with a reward function for TRL: `f(prompts=..., completions=..., <column>=...) -> list[float | None]`.

    What TRL alone can give is not there: `completion_ids`, `trainer_state`. A column that a row lacks is None for it.
    None as a reward means "not applicable" in TRL: a sum of verifiers passes over it, and a sample without any
    reward is a failure. What the function logs through `log_metric` becomes metrics. Further arguments are the
    function's own keywords.

    Source: https://huggingface.co/docs/trl/main/en/grpo_trainer, "Using a custom reward function".
    """

    function: str
    """the reward function as file.py:function or module:function; plain or async"""
    answer_column: str | None = None
    """keyword under which the function looks for the answers; null = answer, and what else it wants and no row has"""
    chat: bool | None = None
    """hand prompts and completions over as messages, as samples of several turns always are; null = as TRL does, where
    the model is given a chat"""

    async def __call__(self, prompts: Texts, completions: Texts, answers: Texts, rows: Rows, /) -> list[Any]:
        """Return a reply per completion."""
        forms = [bool(row.get("messages") or (CHAT in row if self.chat is None else self.chat)) for row in rows]
        calls, results = list(zip(prompts, completions, answers, rows, strict=True)), dict[int, Any]()
        for is_chat in dict.fromkeys(forms):  # a call for each, as a function may look at the first alone
            chosen = [index for index, form in enumerate(forms) if form == is_chat]
            rewards = await self._rewards(is_chat, [calls[index] for index in chosen])
            if len(rewards) != len(chosen):
                if len(chosen) == len(rows):
                    return rewards  # the pool reports their number
                raise ValueError(f"expected a reward for each of {len(chosen)} completions, got {len(rewards)}")
            results |= zip(chosen, rewards, strict=True)
        return [results[index] for index in range(len(rows))]

    async def _rewards(self, is_chat: bool, calls: Sequence[tuple[str, str, str, Mapping[str, Any]]]) -> list[Any]:
        inputs, outputs, answers, rows = (list[Any](values) for values in zip(*calls, strict=True))
        metrics: dict[str, float] = {}
        names = dict.fromkeys(name for row in rows for name in row if name not in _NOT_COLUMNS)
        columns: dict[str, Any] = {name: [row.get(name) for row in rows] for name in names}
        if is_chat:
            turns = ((CHAT, "user", inputs), ("messages", "assistant", outputs))
            inputs, outputs = (
                [row.get(key) or [{"role": role, "content": text}] for row, text in zip(rows, texts, strict=True)]
                for key, role, texts in turns
            )
        function, references = _found(self.function), list(map(_reference, answers, rows))
        wanted = [self.answer_column] if self.answer_column else ["answer", *_wanted(function) - columns.keys()]
        rewards = function(
            prompts=inputs,
            completions=outputs,
            log_extra=lambda *_: None,
            log_metric=metrics.__setitem__,
            **columns | dict.fromkeys(wanted, references) | (self.model_extra or {}),
        )
        if inspect.isawaitable(rewards):
            rewards = await rewards
        rewards = rewards.tolist() if hasattr(rewards, "tolist") else rewards  # TRL makes a tensor of either
        return [VerifyResult(reward, metrics=metrics) for reward in rewards]


def _wanted(function: Callable[..., Any]) -> set[str]:
    """Return the keywords that a reward function must be given for which TRL would look among the columns."""
    parameters = inspect.signature(function).parameters.values()
    must = {one.name for one in parameters if one.default is one.empty and one.kind != one.VAR_KEYWORD}
    return must - {"prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric"}


def _reference(answer: str, row: Mapping[str, Any]) -> Any:
    """Return the answer as the data has it: a text, or a list of those that are right."""
    return row.get(REFERENCES, answer)


@prepared_by(lambda self: _found(self.function))
class verl(Arguments):
    """Score with a reward function for verl: `f(data_source=, solution_str=, ground_truth=, extra_info=)`.

    A row without a column `reward_model` of verl's form, `{"ground_truth": ...}`, gives its answer; one without
    `extra_info` all its other columns. The prompt is not handed on; verl's functions do not see it.

    Source: https://verl.readthedocs.io/en/latest/preparation/reward_function.html
    """

    function: str
    """the reward function as file.py:function or module:function; plain or async"""
    arguments: dict[str, Any] = Field({})
    """further keyword arguments for it (verl's reward_kwargs)"""

    async def __call__(
        self,
        prompt: str,
        completion: str,
        answer: str,
        /,
        *,
        data_source: str = "",
        reward_model: Mapping[str, Any] | None = None,
        extra_info: Mapping[str, Any] | None = None,
        **row: Any,
    ) -> VerifyResult:
        """Return the number returned, or `score` of the mapping returned, whose other numbers become metrics."""
        result = _found(self.function)(
            data_source=data_source,
            solution_str=completion,
            ground_truth=(reward_model or {}).get("ground_truth", _reference(answer, row)),
            extra_info=row if extra_info is None else extra_info,
            **self.arguments,
        )
        if inspect.isawaitable(result):
            result = await result
        if not isinstance(result, Mapping):
            return VerifyResult(result)
        metrics = {name: float(value) for name, value in result.items() if name != "score" and isinstance(value, Real)}
        return VerifyResult(result["score"], metrics=metrics)


@prepared_by(lambda self: self.function and _found(self.function))
@batched(_BATCH_SIZE)
class openrlhf(Arguments):
    """Score with what OpenRLHF's `--remote_rm_url` names: a server, or `reward_func(queries, prompts, labels)`.

    Either gives a list or tensor of rewards, or a mapping with `rewards`, whose `extra_logs` become metrics.

    Source: https://openrlhf.readthedocs.io/en/latest/, "Reinforced Fine-tuning" and "Remote Reward Model".
    """

    function: str | None = None
    """reward_func of a file, as file.py:function or module:function; this or a url"""
    url: str | None = None
    """address of a remote reward model"""
    timeout_s: float = Field(180.0, gt=0)
    """seconds that it may take for an answer; verifier.timeout_s ends a call earlier"""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.function is None) == (self.url is None):
            raise ValueError(f"openrlhf needs a function or a url, got {self.function} and {self.url}: give one")
        return self

    def __call__(self, prompts: Texts, completions: Texts, answers: Texts, rows: Rows, /) -> list[VerifyResult]:
        """Return a result per completion; `VerifierUnavailable` if the server is away, busy (429) or broken (5xx)."""
        queries = [prompt + completion for prompt, completion in zip(prompts, completions, strict=True)]
        labels = list(map(_reference, answers, rows))
        if self.function is not None:
            result = _found(self.function)(queries, list(prompts), labels)
        else:
            body = json.dumps({"query": queries, "prompts": list(prompts), "labels": labels}).encode()
            request = urllib.request.Request(str(self.url), body, {"Content-Type": "application/json"})
            try:
                with urllib.request.urlopen(request, timeout=self.timeout_s) as reply:
                    result = json.load(reply)
            except OSError as error:  # what urllib raises inherits it
                if isinstance(error, HTTPError) and error.code < 500 and error.code != HTTPStatus.TOO_MANY_REQUESTS:
                    error.add_note(f"{self.url} refused the request. Fix: check the url and what the server expects")
                    raise  # it would refuse the request again
                raise VerifierUnavailable(f"{self.url}: {error}") from error
        result = result if isinstance(result, Mapping) else {"rewards": result}
        logs = {name: _list(values) for name, values in result.get("extra_logs", {}).items()}
        return [
            VerifyResult(reward, metrics={name: log[index] for name, log in logs.items() if len(log) == len(queries)})
            for index, reward in enumerate(_list(result["rewards"]))
        ]


def _list(values: Any) -> list[Any]:
    """Return a list, a tensor's numbers, or a single number as a list."""
    plain = values.tolist() if hasattr(values, "tolist") else values
    return list(plain) if isinstance(plain, Sequence) else [plain]


class reasoning_gym(Arguments):
    """Score with the own scorer of a task family of reasoning-gym; many give parts of a point.

    The answer is what the last `<answer>` tags hold, else what follows the last `####`, else all of the completion;
    thoughts do not count. `nan` earns nothing unless the right answer holds it: some scorers give it all points.
    The two columns, the family's name and the task as generated, are those that `data.source: reasoning_gym` makes.
    """

    extract: str | None = None
    """regular expression for the answer: its first group (else all of it), where it matches last"""

    def __call__(
        self,
        prompt: str,
        completion: str,
        answer: str,
        /,
        *,
        reasoning_gym_dataset: str,
        reasoning_gym_entry: Mapping[str, Any],
        **row: Any,
    ) -> VerifyResult:
        """Return the scorer's points; 0 with feedback where it cannot read the answer."""
        given = self._answer_in(completion)
        if given is None or (_NAN.search(given) and not _NAN.search(str(reasoning_gym_entry["answer"]))):
            return VerifyResult(0.0, feedback="no answer found")
        score, entry = _scorer(reasoning_gym_dataset), dict(reasoning_gym_entry)
        if reasoning_gym_dataset in _TUPLE_FAMILIES:
            output = tuple(map(tuple, entry["metadata"]["output"]))
            entry["metadata"] = {**entry["metadata"], "output": output}
        try:
            return VerifyResult(score(given, entry))
        except Exception as error:
            # Some families raise at answers of another form; raising at the right one as well is no fault of the
            # answer's.
            score(entry["answer"], entry)
            return VerifyResult(0.0, feedback=f"the scorer cannot read it: {error}")

    def _answer_in(self, completion: str) -> str | None:
        if self.extract is None:
            return answer_text(completion).rpartition("####")[2].strip()
        *_, last = [None, *re.finditer(self.extract, completion)]
        return None if last is None else (last[1] if last.re.groups else last[0])


@functools.cache
def _scorer(family: str) -> Callable[[str, Any], float]:
    try:
        from reasoning_gym.factory import get_score_answer_fn

        return get_score_answer_fn(family)  # type: ignore[no-any-return]
    except ImportError as error:
        raise PluginError("the verifier reasoning_gym needs the package: pip install reasoning-gym") from error
    except ValueError as error:
        raise PluginError(f"reasoning-gym must know the family {family!r} of the row: {error}") from error
