"""From a recipe to tokenised prompts: the built-in task or a JSONL file, one template, one length check.

Called at start-up by the queue's actor (training prompts) and the controller (held-out prompts), so that
every mistake in the data shows before anything expensive starts.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from areal_lite.config import Config
from areal_lite.data.arith import arith_problems
from areal_lite.data.prompts import Task, load_jsonl
from areal_lite.errors import ConfigError, DataError
from areal_lite.sections import DataConfig
from areal_lite.types import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["load_source"]

Split = Literal["train", "eval"]


def load_source(config: Config, tokenizer: "PreTrainedTokenizerBase", split: Split) -> list[Prompt]:
    """Load and tokenise the prompts of a split, with ids `split/0/index`.

    Args:
        config: The recipe.
        tokenizer: The model's tokenizer.
        split: `eval` gives at most `data.eval_size` prompts, none where a JSONL recipe has no `data.eval_path`.

    Raises:
        DataError: The file is missing, empty or too broken, lacks a column, or holds text the tokenizer cannot encode.
        ConfigError: A prompt leaves no room for `rollout.max_new_tokens`, or the model has no chat template.
    """
    tasks = _tasks(config.data, split)
    if not tasks:
        return []
    texts = [_render(task.prompt, data=config.data, tokenizer=tokenizer) for task in tasks]
    tokens = _tokenise(texts, data=config.data, tokenizer=tokenizer)
    _check_lengths(config, tasks, tokens)
    return [
        Prompt(prompt_id=f"{split}/0/{index}", text=text, token_ids=tuple(ids), answer=task.answer, row=task.row)
        for index, (task, text, ids) in enumerate(zip(tasks, texts, tokens, strict=True))
    ]


def _tasks(data: DataConfig, split: Split) -> list[Task]:
    limit = data.eval_size if split == "eval" else None
    if data.source == "arith":
        problems = arith_problems(data.arith, split)[:limit]
        return [
            Task(origin=f"data.arith {split} problem {index}", prompt=problem.prompt, answer=problem.answer)
            for index, problem in enumerate(problems)
        ]
    path = data.path if split == "train" else data.eval_path
    if path is None:
        return []
    return load_jsonl(
        path,
        prompt_column=data.prompt_column,
        answer_column=data.answer_column,
        max_bad_fraction=data.max_bad_fraction,
    )[:limit]


def _render(prompt: str, *, data: DataConfig, tokenizer: "PreTrainedTokenizerBase") -> str:
    text = data.template.replace("{prompt}", prompt)
    if not data.chat:
        return text
    if tokenizer.chat_template is None:
        raise ConfigError("data.chat=true needs a model with a chat template, this one has none: set data.chat=false")
    message = {"role": "user", "content": text}
    return str(tokenizer.apply_chat_template([message], tokenize=False, add_generation_prompt=True))


def _tokenise(texts: Sequence[str], *, data: DataConfig, tokenizer: "PreTrainedTokenizerBase") -> list[list[int]]:
    try:
        # A chat template writes the special tokens itself; twice would be a prompt the model never saw.
        tokens: list[list[int]] = tokenizer(list(texts), add_special_tokens=not data.chat)["input_ids"]
    except Exception as error:  # the tokenizers library raises nothing narrower
        raise DataError(
            f"the model's tokenizer cannot encode the prompts ({error}): is model.path the right model for this data?"
        ) from error
    return tokens


def _check_lengths(config: Config, tasks: Sequence[Task], tokens: Sequence[Sequence[int]]) -> None:
    room = config.model.max_context
    too_long = []
    for ids, task in zip(tokens, tasks, strict=True):
        max_new_tokens = task.row.get("max_new_tokens", config.rollout.max_new_tokens)
        if type(max_new_tokens) is not int or max_new_tokens < 1:
            raise DataError(
                f"a column max_new_tokens must hold whole numbers of at least 1, got {max_new_tokens!r} at "
                f"{task.origin}: correct or remove it"
            )
        if len(ids) > room - max_new_tokens:
            too_long.append((len(ids), max_new_tokens, task.origin))
    if too_long:
        length, max_new_tokens, origin = too_long[0]
        raise ConfigError(
            f"a prompt may have model.max_context - rollout.max_new_tokens = {room} - {max_new_tokens} = "
            f"{room - max_new_tokens} tokens, got {length} at {origin} ({len(too_long)} such prompts, the longest has "
            f"{max(too_long)[0]}): raise model.max_context, lower rollout.max_new_tokens, or remove them"
        )
