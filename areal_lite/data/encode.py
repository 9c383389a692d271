"""Texts and chats to token ids; what the model's tokenizer or chat template cannot do is named by row and character."""

import contextlib
import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from areal_lite.config.sections import ModelConfig
from areal_lite.errors import ConfigError, DataError
from areal_lite.record.run_files import read_json, table

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_log = logging.getLogger(__name__)

Tokenizer: TypeAlias = "PreTrainedTokenizerBase"
Messages = Sequence[Mapping[str, Any]]


def load_tokenizer(folder: str | Path, model: ModelConfig) -> Tokenizer:
    """Load the tokenizer of a model's folder; `model.chat_arguments` are passed to its chat template.

    Raises:
        ConfigError: The folder has none, or one that cannot be read.
    """
    try:
        tokenizer = read_tokenizer(folder)
    except Exception as error:  # of many kinds, by the kind of tokenizer
        raise _no_tokenizer(folder, f"{type(error).__name__}: {error}") from error
    if len(tokenizer) <= len(tokenizer.added_tokens_encoder):  # transformers makes up an empty one
        raise _no_tokenizer(folder, "none")
    write = functools.partial(tokenizer.apply_chat_template, **model.chat_arguments)
    tokenizer.apply_chat_template = write
    return tokenizer


def read_tokenizer(folder: str | Path) -> Tokenizer:
    """Return the tokenizer of a model's folder, without `AutoTokenizer` where it can: that imports torch."""
    import transformers

    settings = read_json(Path(folder) / "tokenizer_config.json")  # `AutoTokenizer` reports what is wrong with it
    if settings.get("tokenizer_class") == "TokenizersBackend" and "auto_map" not in settings:
        return transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    return transformers.AutoTokenizer.from_pretrained(folder)


def decoder(tokenizer: Tokenizer, folder: str | Path, *, skip_special_tokens: bool) -> Callable[[Sequence[int]], str]:
    """Return a function that turns a completion's token ids into the text that workflows and verifiers get.

    Special tokens are part of it, as `</think>` may be one, except BOS, padding, and all end-of-sequence tokens, those
    of `generation_config.json` included.

    Args:
        folder: The model's.
        skip_special_tokens: Leave all of them out.
    """
    left_out = {tokenizer.bos_token_id, tokenizer.pad_token_id} | end_tokens(tokenizer, folder)

    def text_of(token_ids: Sequence[int]) -> str:
        kept = [token for token in token_ids if token not in left_out]
        return str(tokenizer.decode(kept, skip_special_tokens=skip_special_tokens))

    return text_of


def end_tokens(tokenizer: Tokenizer, folder: str | Path) -> set[int | None]:
    """Return all tokens where generation stops: the tokenizer's end of sequence, and those of `generation_config.json`.

    Args:
        folder: The model's; empty = a tokenizer without files.
    """
    ends = read_json(Path(folder) / "generation_config.json").get("eos_token_id") if folder else None
    return {tokenizer.eos_token_id, *(ends if isinstance(ends, list) else [ends])}


def check_turn_end(tokenizer: Tokenizer) -> None:
    """Warn if the chat template ends an answer with a special token at which generation does not stop."""
    added, answer = tokenizer.added_tokens_decoder, "An answer"
    chat = [{"role": "user", "content": "A question"}, {"role": "assistant", "content": answer}]
    try:
        after = render_chat(chat, tokenizer, add_generation_prompt=False).partition(answer)[2]
        end = next((token for token in encode_text(after, tokenizer) if token in added and added[token].special), None)
    except ValueError:  # the template takes other chats
        return
    if end is not None and end not in end_tokens(tokenizer, tokenizer.name_or_path):
        _log.warning(
            "the chat template ends answers with %r, where generation does not stop, so that verifiers see it and what "
            "follows. Fix: set eos_token to it in the model's tokenizer_config.json",
            tokenizer.decode([end]),
        )


def _no_tokenizer(folder: str | Path, found: str) -> ConfigError:
    return ConfigError(
        f"a model folder must hold its tokenizer (tokenizer.json, or what goes in its place), got {found} in {folder}: "
        "copy the tokenizer's files there, from where the weights came"
    )


def encode_texts(
    texts: Sequence[str], *, origins: Sequence[str], tokenizer: Tokenizer, add_special_tokens: bool = True
) -> list[list[int]]:
    """Return the token ids of each text as `encode_text` does; a `DataError` names the origin of one that has none."""
    if not texts:  # tokenizers refuse an empty batch
        return []
    try:
        return _token_ids(list(texts), tokenizer, add_special_tokens=add_special_tokens)
    except Exception:  # the tokenizers library raises nothing narrower, and names no text
        encoded = []
        for text, origin in zip(texts, origins, strict=True):
            try:
                encoded.append(encode_text(text, tokenizer, add_special_tokens=add_special_tokens))
            except ValueError as error:
                raise DataError(f"{origin}: {error}, or correct model.path") from error
        return encoded


def encode_text(text: str, tokenizer: Tokenizer, *, add_special_tokens: bool = False) -> list[int]:
    """Return the token ids of one text; a `ValueError` where the tokenizer has no token for a character.

    With `add_special_tokens` it is a prompt: BOS, where the tokenizer adds one, is there once even if the text begins
    with it, and an EOS that the tokenizer adds is left out.
    """
    try:
        return _token_ids([text], tokenizer, add_special_tokens=add_special_tokens)[0]
    except Exception as error:  # as above
        for character in text if len(text) > 1 else "":
            encode_text(character, tokenizer)
        what = f"the character {text!r} (U+{ord(text):04X})" if len(text) == 1 else f"{text!r:.60}"
        raise ValueError(
            f"the model's tokenizer cannot encode {what} ({error}): use characters that it knows"
        ) from error


def _token_ids(texts: list[str], tokenizer: Tokenizer, *, add_special_tokens: bool) -> list[list[int]]:
    encoded = tokenizer(texts, add_special_tokens=add_special_tokens, return_special_tokens_mask=True)
    token_ids: list[list[int]] = encoded["input_ids"]
    if not add_special_tokens:
        return token_ids
    for ids, is_added in zip(token_ids, encoded["special_tokens_mask"], strict=True):
        if ids[:2] == [tokenizer.bos_token_id] * 2:
            del ids[0]
        if len(ids) > 1 and ids[-1] == tokenizer.eos_token_id and is_added[-1]:
            del ids[-1]
    return token_ids


def chat_messages(value: Any) -> list[dict[str, Any]]:
    """Return the chat of a data row as `text_message` does; a `ValueError` where it is none."""
    if not isinstance(value, list) or not value:
        raise ValueError(f"expected a text or a list of chat messages, got {value!r:.60}")
    for message in value:
        is_message = isinstance(message, Mapping) and isinstance(message.get("role"), str)
        if not is_message or (message.get("content") is None and not message.get("tool_calls")):
            raise ValueError(
                "a chat message must be {role: text, content: text}, or of tool_calls without content, got "
                f"{message!r:.60}"
            )
    return [text_message(without_nulls(message)) for message in value]


def without_nulls(value: Any) -> Any:
    """Return a value without the keys that a table fills with null, as other rows have them, at any depth."""
    if isinstance(value, list):
        return [without_nulls(item) for item in value]
    if isinstance(value, Mapping):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    return value


def text_message(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a chat message as templates expect it: its content is one text, and keys that are empty are left out.

    Raises:
        ValueError: It holds more than text.
    """
    content = message.get("content") or ""
    if not isinstance(content, str):
        content = "\n".join(map(_text_of, content if isinstance(content, list) else [content]))
    return {name: item for name, item in message.items() if item} | {"content": content}


def _text_of(part: Any) -> str:
    is_text = isinstance(part, Mapping) and part.get("type") in ("text", "input_text", "output_text")
    text = part.get("text") if is_text else None
    if not isinstance(text, str):
        raise ValueError(f"the content of a message must be text, got {part!r:.60}")
    return text


def _called(messages: Messages) -> list[str]:
    """Return the names of the functions that the messages call."""
    listed = [calls for message in messages if isinstance(calls := message.get("tool_calls"), list)]
    calls = [table(call) for calls in listed for call in calls]
    return [str(table(call.get("function", call)).get("name", "")) for call in calls]


def render_chat(
    messages: Messages,
    tokenizer: Tokenizer,
    *,
    tools: Messages = (),
    add_generation_prompt: bool = True,
    where: str = "data",
) -> str:
    """Return a chat as the model's chat template writes it, with descriptions of tools.

    Raises:
        ConfigError: The model has no chat template.
        ValueError: It refuses the messages.
    """
    if tokenizer.chat_template is None:
        raise ConfigError(
            f"{where}.chat=true, or a list of chat messages, needs a model with a chat template, this one has none: "
            f"give plain texts and set {where}.chat=false"
        )
    render = functools.partial(
        tokenizer.apply_chat_template,
        tools=[dict(tool) for tool in tools] or None,
        tokenize=False,
        add_generation_prompt=add_generation_prompt,
    )
    try:
        text = str(render([dict(message) for message in messages]))
    except Exception as error:  # templates raise their own kinds
        raise ValueError(f"the chat template refuses a chat of {len(messages)} messages ({error})") from error
    names = _called(messages)
    if not all(name in text for name in names):
        # DeepSeek's templates write tool calls only beside a content of null, which others write as "None", or refuse.
        with contextlib.suppress(Exception):
            nulls = [{**one, "content": one["content"] or None} if one.get("tool_calls") else one for one in messages]
            other = str(render(nulls))
            return other if all(name in other for name in names) else text
    return text
