"""From a recipe to tokenised prompts: every source's tasks, filtered, with one template and one length check.

Data must not choose code: a row may only name a verifier or workflow that the recipe or an installed package offers.
"""

import logging
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

from areal_lite.config.checks import row_name_problems
from areal_lite.config.data import CHAT, SourceConfig, Split
from areal_lite.config.plugins import find_function
from areal_lite.config.recipe import Config
from areal_lite.data.encode import Messages, Tokenizer, check_turn_end, encode_texts, render_chat
from areal_lite.data.rows import used_to_evaluate
from areal_lite.data.sources import load_tasks
from areal_lite.data.tasks import Task
from areal_lite.errors import ConfigError, DataError, PluginError
from areal_lite.types import Prompt

_log = logging.getLogger(__name__)


def load_source(config: Config, tokenizer: Tokenizer, split: Split) -> list[Prompt]:
    """Load and tokenise the prompts of a split, of all sources one after another.

    Args:
        split: `eval` gives at most `eval_size` prompts of each source, none where files have no `eval_path`.

    Returns:
        Prompts with ids `split/0/index`; in a mix with ids `name/0/index`, or `name/eval/index` where held out.

    Raises:
        DataError: A file is missing, empty or too broken, lacks a column, holds text the tokenizer cannot encode, or
            names a verifier or workflow that is not known; or a filter leaves nothing.
        ConfigError: A prompt leaves no room for `rollout.max_new_tokens`, or the model has no chat template.
    """
    return list(chain.from_iterable(load_sources(config, tokenizer, split).values()))


def load_sources(config: Config, tokenizer: Tokenizer, split: Split) -> dict[str, list[Prompt]]:
    """Return the same by the name of the source."""
    return {
        name: _prompts(config, source, name=name, tokenizer=tokenizer, split=split)
        for name, source in config.data.sources.items()
    }


def _prompts(config: Config, source: SourceConfig, *, name: str, tokenizer: Tokenizer, split: Split) -> list[Prompt]:
    where, longest = config.data.place_of(name), source.max_prompt_tokens
    tasks = load_tasks(source, split, where=where)
    if split == "eval" and longest is None:  # it is known before tokenising which tasks remain
        tasks = used_to_evaluate(tasks, source, where=where)
    tasks = with_names(tasks, source=source, config=config)
    tasks = rendered(tasks, source, tokenizer, where=where)
    is_chat = any(CHAT in task.row for task in tasks)
    if is_chat and split == "train":
        check_turn_end(tokenizer)
    tokens = encode_texts(
        [task.prompt for task in tasks],
        origins=[task.origin for task in tasks],
        tokenizer=tokenizer,
        # A chat template writes the special tokens itself; twice would be a prompt the model never saw.
        add_special_tokens=not is_chat,
    )
    pairs = list(zip(tasks, tokens, strict=True))
    if longest is not None:
        short = [(task, ids) for task, ids in pairs if len(ids) <= longest]
        option = f"{where}.max_prompt_tokens={longest} leaves out"
        if pairs and not short:
            raise DataError(f"{option} all {len(pairs)} rows: widen it")
        _log.info("%s %d of %d rows", option, len(pairs) - len(short), len(pairs))
        pairs = used_to_evaluate(short, source, where=where) if split == "eval" else short
    _check_lengths(config, pairs)
    first = f"{split}/0" if not config.data.mix else f"{name}/{0 if split == 'train' else split}"
    return [
        Prompt(prompt_id=f"{first}/{index}", text=task.prompt, token_ids=tuple(ids), answer=task.answer, row=task.row)
        for index, (task, ids) in enumerate(pairs)
    ]


def rendered(
    tasks: Sequence[Task], source: SourceConfig, tokenizer: "Tokenizer | None", *, where: str = "data"
) -> list[Task]:
    """Return tasks with the texts that the model is given, and with the messages of chats in the column `CHAT`.

    Without a tokenizer a chat's text is a line `role: content` for each message.
    """
    chat = source.chat or all(task.messages for task in tasks)
    tools = [_schema(tool, where=where) for tool in source.tools]
    return [_render(task, source, tokenizer, tools, chat=chat, where=where) for task in tasks]


def _schema(tool: str, *, where: str) -> dict[str, Any]:
    from transformers.utils import get_json_schema

    try:
        return get_json_schema(find_function(tool, kind="tool"))  # type: ignore[no-any-return]
    except PluginError:
        raise
    except Exception as error:  # of several kinds
        raise PluginError(
            f"{where}.tools needs functions with types and a docstring that has Args, got {tool} ({error})"
        ) from error


def _render(
    task: Task, source: SourceConfig, tokenizer: "Tokenizer | None", tools: Messages, *, chat: bool, where: str
) -> Task:
    if task.messages and not chat:
        raise DataError(
            f"the prompt of {task.origin} is a list of chat messages, others are plain texts: set {where}.chat=true"
        )
    if task.messages and source.template != "{prompt}":
        raise ConfigError(
            f"{where}.template is for prompts that are texts, got chat messages at {task.origin}. Fix: set it to "
            f"'{{prompt}}', and {where}.system to what the model should read first"
        )
    text = source.template.replace("{prompt}", task.prompt)
    if not chat:
        if source.system is not None:
            raise ConfigError(f"{where}.system is the first message of a chat, got plain texts: set {where}.chat=true")
        if tools:
            raise ConfigError(f"{where}.tools need a chat template, got plain texts: set {where}.chat=true")
        return replace(task, prompt=text)
    messages = list(map(dict, task.messages)) or [{"role": "user", "content": text}]
    if messages[-1]["role"] == "assistant":
        raise DataError(
            f"a chat that is a prompt must end with a message that the model answers, got one of the assistant's at "
            f"{task.origin}. Fix: remove it, or give a plain text, which the model continues"
        )
    if source.system is not None and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": source.system})
    task = replace(task, row={**task.row, CHAT: messages})
    if tokenizer is None:
        return replace(task, prompt="\n".join(f"{message['role']}: {message['content']}" for message in messages))
    try:
        text = render_chat(messages, tokenizer, tools=tools, where=where)
    except ConfigError:
        raise
    except ValueError as error:
        raise DataError(f"{error} at {task.origin}: correct the prompt, or choose another model") from error
    if untold := [tool["function"]["name"] for tool in tools if tool["function"]["name"] not in text]:
        raise ConfigError(
            f"{where}.tools must be in what the model's chat template writes, it leaves {', '.join(untold)} out: "
            f"describe them in {where}.system"
        )
    return replace(task, prompt=text)


def _check_lengths(config: Config, pairs: Sequence[tuple[Task, Sequence[int]]]) -> None:
    room = config.model.max_context
    too_long = []
    for task, ids in pairs:
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
            f"{max(too_long)[0]}): raise model.max_context, lower rollout.max_new_tokens, or remove them with "
            "data.max_prompt_tokens"
        )


def with_names(tasks: Sequence[Task], *, source: SourceConfig, config: Config) -> list[Task]:
    """Give rows that name no verifier or workflow their source's; a `DataError` where one names what is not known."""
    defaults = {"verifier": source.verifier, "workflow": source.workflow}
    fill = {column: name for column, name in defaults.items() if name is not None}
    named = [replace(task, row={**fill, **task.row}) for task in tasks] if fill else list(tasks)
    for kind in ("verifier", "workflow"):
        first = {repr(task.row[kind]): task for task in reversed(named) if kind in task.row}
        for task in first.values():
            place, at = f"the column {kind} must hold", f" at {task.origin}"
            for problem in row_name_problems(config, kind, task.row[kind], place=place, at=at):
                raise DataError(problem)
    return named
