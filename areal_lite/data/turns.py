"""From the prompt and the completion of a row to token ids, as plain text or through the model's chat template.

Prompt and completion are tokenised apart: that is the boundary that generation has. (One text tokenised as a whole may
merge characters across it, into tokens that sampling would never meet there.)

A completion ends in exactly one end-of-sequence token, where generation stops: a plain text gets one, and what a chat
template writes behind its own is left out.
"""

from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import Any

from areal_lite.data.encode import Tokenizer, encode_text, render_chat
from areal_lite.errors import ConfigError

Chat = list[dict[str, Any]]


def is_whole_chat(value: Any) -> bool:
    """Whether a completion holds its prompt too: messages that begin with another's than the assistant's."""
    first = value[0] if isinstance(value, list) and value else None
    return isinstance(first, Mapping) and first.get("role") != "assistant"


def split_pair(chosen: Any, rejected: Any) -> tuple[list[Any], list[Any], list[Any]]:
    """Take two whole chats apart: the messages both begin with, then the rest of each; a `ValueError` if it is none."""
    chosen, rejected = _messages(chosen, role="assistant"), _messages(rejected, role="assistant")
    pairs = zip(chosen, rejected, strict=False)
    count = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
    if count in (0, len(chosen), len(rejected)):
        raise ValueError(
            f"two whole chats of a pair must begin with the same messages, their prompt, and end with different ones, "
            f"got {count} in common of {_roles(chosen)} and {_roles(rejected)}"
        )
    return chosen[:count], chosen[count:], rejected[count:]


class TurnTokenizer:
    """Tokenises prompts with completions for one model."""

    def __init__(self, tokenizer: Tokenizer, *, chat: bool) -> None:
        """Prepare for one model; with `chat`, plain texts too become messages of user and assistant."""
        if tokenizer.eos_token_id is None:
            raise ConfigError(
                "completions must end with the model's end-of-sequence token, its tokenizer names none: set eos_token "
                "in the model's tokenizer_config.json"
            )
        self._tokenizer, self._chat = tokenizer, chat

    def split(self, prompt: Any, completion: Any) -> tuple[list[int], list[int]]:
        """Return the token ids of a prompt, and of one completion with its end-of-sequence token.

        Args:
            prompt: A non-empty text, or chat messages that do not end with the assistant's.
            completion: A text, or messages of the assistant alone.

        Raises:
            ValueError: What the row holds is something else, or text the tokenizer cannot encode.
            ConfigError: The row needs a chat template and the model has none.
        """
        if self._chat or not (isinstance(prompt, str) and isinstance(completion, str)):
            return self._split_chat(_messages(prompt, role="user"), _messages(completion, role="assistant"))
        if not prompt:
            raise ValueError("the prompt must hold at least one character, got none")
        ids = encode_text(completion, self._tokenizer)
        return encode_text(prompt, self._tokenizer, add_special_tokens=True), self._ended(ids)

    def split_messages(self, messages: Any) -> tuple[list[int], list[int]]:
        """Return the same for a whole chat, whose last message is the completion."""
        chat = _messages(messages, role="user")
        return self._split_chat(chat[:-1], chat[-1:])

    def _split_chat(self, prompt: Chat, completion: Chat) -> tuple[list[int], list[int]]:
        if not prompt or prompt[-1]["role"] == "assistant":
            raise ValueError(f"the prompt must end with a message to the assistant, got {_roles(prompt)}")
        if _roles(completion) != ["assistant"]:
            raise ValueError(f"the completion must be one message of the assistant, got {_roles(completion)}")
        before = render_chat(prompt, self._tokenizer)
        whole = render_chat([*prompt, *completion], self._tokenizer, add_generation_prompt=False)
        if not whole.startswith(before):
            raise ValueError(
                "the chat template must write a prompt alike with and without its answer, got "
                f"{before[-40:]!r} against {whole[max(len(before) - 40, 0) : len(before)]!r}: give plain texts"
            )
        ids = encode_text(whole[len(before) :], self._tokenizer)
        return encode_text(before, self._tokenizer), self._ended(ids)

    def _ended(self, ids: list[int]) -> list[int]:
        """Cut behind the last end-of-sequence token, or append one."""
        end: int = self._tokenizer.eos_token_id
        if end not in ids:
            return [*ids, end]
        return ids[: len(ids) - ids[::-1].index(end)]


def _messages(value: Any, *, role: str) -> Chat:
    if isinstance(value, str):
        return [{"role": role, "content": value}]
    if not isinstance(value, list) or not value:
        raise ValueError(f"expected a text or a list of chat messages, got {value!r:.60}")
    for message in value:
        if not (isinstance(message, Mapping) and all(isinstance(message.get(key), str) for key in ("role", "content"))):
            raise ValueError(f"a chat message must be {{role: text, content: text}}, got {message!r:.60}")
    # Columns of a dataset have the keys of all messages, empty where a message has none.
    return [{key: item for key, item in message.items() if item is not None} for message in value]


def _roles(messages: Sequence[Mapping[str, Any]]) -> list[str]:
    return [message["role"] for message in messages]
