"""From a recipe to the token rows of the offline objectives: prompts with completions, or with pairs of them.

Every trainer rank loads them, so which rows are held out depends on the data alone. No seed: runs can be compared.

Prompt and completion are tokenised apart: that is the boundary that generation has. (One text tokenised as a whole may
merge characters across it, into tokens that sampling would never meet there.)

A completion ends with exactly one token where generation stops: a plain text gets the end of sequence, and what a chat
template writes after the first such token is left out.
"""

import contextlib
import functools
import json
import logging
import random
import zlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any, Literal, NamedTuple

from areal_lite.config.data import Split
from areal_lite.config.offline import OfflineConfig
from areal_lite.data.arith import preference_pairs, worked_solutions
from areal_lite.data.encode import (
    Messages,
    Tokenizer,
    chat_messages,
    check_turn_end,
    encode_text,
    end_tokens,
    render_chat,
    without_nulls,
)
from areal_lite.data.rows import EVAL_SIZE, Problems, RowReader, Rows, check_columns, make_each, used_to_evaluate
from areal_lite.errors import CheckpointError, ConfigError, DataError

_log = logging.getLogger(__name__)


Chat = list[dict[str, Any]]


class Example(NamedTuple):
    """A prompt with one completion, or with two: the chosen one, then the rejected one."""

    prompt: list[int]
    completions: tuple[list[int], ...]
    asked: Any = None
    """What a chat template wrote the prompt from; unlike its tokens, it does not change with a date that is written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OfflineData:
    """Both splits; no prompt of `held_out` is in `train` where the split was made here."""

    train: list[Example]
    held_out: list[Example]
    """Empty = no evaluation."""

    @property
    def checksum(self) -> int:
        """Of the training rows and their order; the same on any day."""
        rows = (f"Example(prompt={row.asked or row.prompt}, completions={row.completions})" for row in self.train)
        return functools.reduce(lambda before, row: zlib.crc32(row.encode(), before), rows, 0)

    def check(self, checkpoint: Path) -> None:
        """Raise a `CheckpointError` if a checkpoint was trained on other rows."""
        meta = json.loads((checkpoint / "trainer" / "meta.json").read_text())
        if (saved := meta.get("coefficients", {}).get("data", self.checksum)) != self.checksum:
            raise CheckpointError(
                f"{checkpoint} must be of the same training rows, their checksum was {saved} and is {self.checksum}: "
                "resume with the data of the first run"
            )


def load_offline(config: OfflineConfig, tokenizer: Tokenizer) -> OfflineData:
    """Load and tokenise the rows of a recipe.

    Raises:
        DataError: A file is missing, empty or too broken, lacks a column, has too few rows, or one that is too long.
        ConfigError: The model has no chat template, or no end-of-sequence token, where one is needed.
    """
    if tokenizer.eos_token_id is None:
        raise ConfigError(
            "completions must end with the model's end-of-sequence token, its tokenizer names none: set eos_token in "
            "the model's tokenizer_config.json"
        )
    data, reader = config.data, RowReader(config.data)
    train = _examples(config, tokenizer, "train", reader) or []
    held_out = _examples(config, tokenizer, "eval", reader)
    if held_out is None:
        train, held_out = _hold_out(train, count=min(data.eval_size or EVAL_SIZE, int(data.eval_fraction * len(train))))
    if len(train) < config.trainer.batch_size:
        raise DataError(
            f"a step needs trainer.batch_size={config.trainer.batch_size} training rows, got {len(train)} "
            f"({len(held_out)} held out): lower trainer.batch_size, or give more rows"
        )
    return OfflineData(train=train, held_out=used_to_evaluate(held_out, data))


def _examples(config: OfflineConfig, tokenizer: Tokenizer, split: Split, reader: RowReader) -> list[Example] | None:
    """Load and tokenise one split; None where nothing is held out."""
    data = config.data
    if data.source == "arith":
        path, rows, problems = Path("data.arith"), list(enumerate(_arith_rows(config, split))), Problems()
    elif (read := reader.read(split)) is None:
        return None
    else:
        path, rows, problems = read
    check_columns(path, rows, columns=_columns(config, rows))
    ends = end_tokens(tokenizer, tokenizer.name_or_path)

    def make(number: int, row: dict[str, Any]) -> tuple[int, Example]:
        return number, _example(row, tokenizer, config=config, ends=ends)

    examples = make_each(rows, make, problems=problems, name=path, data=data)
    if split == "train" and examples[0][1].asked is not None:
        check_turn_end(tokenizer)
    return list(_fitting(examples, path=path, policy=data.too_long, max_tokens=config.model.max_context))


def _arith_rows(config: OfflineConfig, split: Split) -> list[dict[str, Any]]:
    arith, carelessness, data = config.data.arith, config.data.carelessness, config.data
    if config.command != "sft":
        columns = [getattr(data, name) for name in _PAIR_COLUMNS]
        pairs = preference_pairs(arith, split, carelessness=carelessness)
        return [dict(zip(columns, pair, strict=True)) for pair in pairs]
    problems = worked_solutions(arith, arith.train_size, seed=arith.seed, carelessness=carelessness, split=split)
    return [{data.prompt_column: problem.prompt, data.completion_column: problem.demonstration} for problem in problems]


def _columns(config: OfflineConfig, rows: Rows) -> dict[str, str]:
    """Return the columns that some row must have, by the option that names them."""
    data = config.data
    if config.command == "sft" and any(data.messages_column in row for _, row in rows):
        return {"data.messages_column": data.messages_column}
    names = ["prompt_column", "completion_column"] if config.command == "sft" else _PAIR_COLUMNS
    if config.command != "sft" and any(is_whole_chat(row.get(data.chosen_column)) for _, row in rows):
        names = _PAIR_COLUMNS[1:]
    return {f"data.{name}": getattr(data, name) for name in names}


_PAIR_COLUMNS = ["prompt_column", "chosen_column", "rejected_column"]


def _example(
    row: Mapping[str, Any], tokenizer: Tokenizer, *, config: OfflineConfig, ends: Collection[int | None]
) -> Example:
    data = config.data
    if config.command != "sft":
        chosen, rejected = _cell(row, data.chosen_column), _cell(row, data.rejected_column)
        if chosen == rejected:
            raise ValueError(f"the two completions of a pair must differ, got {chosen!r:.60} twice")
        is_whole = is_whole_chat(chosen) or is_whole_chat(rejected)
        prompt, *completions = (
            split_pair(chosen, rejected) if is_whole else (_cell(row, data.prompt_column), chosen, rejected)
        )
    elif row.get(data.messages_column) is None or None not in map(
        row.get, (data.prompt_column, data.completion_column)
    ):
        prompt, completions = _cell(row, data.prompt_column), [_cell(row, data.completion_column)]
    else:
        *prompt, answer = messages_of(row[data.messages_column], role="user")
        if not prompt:
            raise ValueError(f"column {data.messages_column!r} must hold a prompt and an answer, got one message alone")
        completions = [[answer]]
    chat = data.chat or not all(isinstance(text, str) for text in (prompt, *completions))
    tools = _tools(row) if chat else []
    pairs = [split_turn(prompt, one, tokenizer, chat=chat, ends=ends, tools=tools) for one in completions]
    asked = [prompt, tools] if tools else prompt
    return Example(pairs[0][0], tuple(ids for _, ids in pairs), asked if chat else None)


def _tools(row: Mapping[str, Any]) -> list[dict[str, Any]]:
    tools = row.get("tools") or []
    if isinstance(tools, str):
        with contextlib.suppress(ValueError):
            tools = json.loads(tools)
    if not isinstance(tools, list) or not all(isinstance(tool, Mapping) for tool in tools):
        raise ValueError(
            f"column 'tools' must hold a list of descriptions for the chat template, or its JSON, got {tools!r:.60}"
        )
    return [without_nulls(tool) for tool in tools]


def _cell(row: Mapping[str, Any], column: str) -> Any:
    if row.get(column) is None:
        raise ValueError(f"column {column!r} must hold a text or chat messages, got none")
    return row[column]


def _fitting(
    examples: list[tuple[int, Example]], *, path: Path, policy: Literal["error", "drop", "cut"], max_tokens: int
) -> Iterable[Example]:
    """Yield the examples that fit, or are made to."""
    num_long = 0
    for number, example in examples:
        room = max_tokens - len(example.prompt)
        longest = max(map(len, example.completions))
        if longest <= room:
            yield example
            continue
        num_long += 1
        if policy == "error":
            raise DataError(
                f"a row may have model.max_context={max_tokens} tokens, got {len(example.prompt)} of the prompt and "
                f"{longest} of the completion at {path}:{number}: raise model.max_context, or set data.too_long to "
                "drop or cut"
            )
        cut = tuple(completion[:room] for completion in example.completions)
        if policy == "cut" and room > 0 and (len(cut) == 1 or cut[0] != cut[1]):
            yield example._replace(completions=cut)
    if num_long:
        _log.warning("%d of %d rows of %s are too long (data.too_long: %s)", num_long, len(examples), path, policy)


def _hold_out(examples: list[Example], *, count: int) -> tuple[list[Example], list[Example]]:
    """Hold out about `count` examples: all of a prompt, or none, so that no prompt is on both sides."""
    by_prompt: dict[tuple[int, ...], list[int]] = {}
    for index, example in enumerate(examples):
        by_prompt.setdefault(tuple(example.prompt), []).append(index)
    groups = list(by_prompt.values())
    random.Random("held-out").shuffle(groups)
    held_out: set[int] = set()
    for group in groups:
        if len(held_out) + len(group) <= count:
            held_out.update(group)
    train = [example for index, example in enumerate(examples) if index not in held_out]
    return train, [examples[index] for index in sorted(held_out)]


def is_whole_chat(value: Any) -> bool:
    """Whether a completion holds its prompt too: messages that begin with another's than the assistant's."""
    first = value[0] if isinstance(value, list) and value else None
    return isinstance(first, Mapping) and first.get("role") != "assistant"


def split_pair(chosen: Any, rejected: Any) -> tuple[Chat, Chat, Chat]:
    """Take two whole chats apart: the messages both begin with, then the rest of each; a `ValueError` if it is none."""
    chosen, rejected = messages_of(chosen, role="assistant"), messages_of(rejected, role="assistant")
    pairs = zip(chosen, rejected, strict=False)
    count = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
    if count in (0, len(chosen), len(rejected)):
        raise ValueError(
            f"two whole chats of a pair must begin with the same messages, their prompt, and end with different ones, "
            f"got {count} in common of {_roles(chosen)} and {_roles(rejected)}"
        )
    return chosen[:count], chosen[count:], rejected[count:]


def split_turn(
    prompt: Any,
    completion: Any,
    tokenizer: Tokenizer,
    *,
    chat: bool,
    ends: Collection[int | None],
    tools: Messages = (),
) -> tuple[list[int], list[int]]:
    """Return the token ids of a prompt, and of one completion up to where generation stops.

    Args:
        prompt: A non-empty text, or chat messages that do not end with the assistant's.
        completion: A text, or messages of the assistant alone.
        tokenizer: It has an end-of-sequence token.
        chat: Whether they go through the chat template, plain texts as messages of user and assistant.
        ends: `end_tokens` of the model.
        tools: Their descriptions, for the chat template.

    Raises:
        ValueError: What the row holds is something else, or text the tokenizer cannot encode.
        ConfigError: The row needs a chat template and the model has none.
    """
    if not chat:
        if not prompt:
            raise ValueError("the prompt must hold at least one character, got none")
        before, ids = encode_text(prompt, tokenizer, add_special_tokens=True), encode_text(completion, tokenizer)
    else:
        asked, answer = messages_of(prompt, role="user"), messages_of(completion, role="assistant")
        if asked[-1]["role"] == "assistant":
            raise ValueError(f"the prompt must end with a message to the assistant, got {_roles(asked)}")
        if _roles(answer) != ["assistant"]:
            raise ValueError(f"the completion must be one message of the assistant, got {_roles(answer)}")
        text = render_chat(asked, tokenizer, tools=tools)
        whole = render_chat([*asked, *answer], tokenizer, tools=tools, add_generation_prompt=False)
        if not whole.startswith(text):
            raise ValueError(
                "the chat template must write a prompt alike with and without its answer, got "
                f"{text[-40:]!r} against {whole[max(len(text) - 40, 0) : len(text)]!r}: give plain texts"
            )
        before, ids = encode_text(text, tokenizer), encode_text(whole[len(text) :], tokenizer)
    length = next((place for place, token in enumerate(ids, start=1) if token in ends), None)
    return before, [*ids, tokenizer.eos_token_id] if length is None else ids[:length]


def messages_of(value: Any, *, role: str) -> Chat:
    """Return chat messages, or a text as one of a role; a `ValueError` where it is neither."""
    return [{"role": role, "content": value}] if isinstance(value, str) else chat_messages(value)


def _roles(messages: Sequence[Mapping[str, Any]]) -> list[str]:
    return [message["role"] for message in messages]
