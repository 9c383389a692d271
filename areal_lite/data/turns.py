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

Chat = list[dict[str, Any]]


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


def split_turn(prompt: Any, completion: Any, tokenizer: Tokenizer, *, chat: bool) -> tuple[list[int], list[int]]:
    """Return the token ids of a prompt, and of one completion with its end-of-sequence token.

    Args:
        prompt: A non-empty text, or chat messages that do not end with the assistant's.
        completion: A text, or messages of the assistant alone.
        tokenizer: It has an end-of-sequence token.
        chat: Whether plain texts too become messages of user and assistant.

    Raises:
        ValueError: What the row holds is something else, or text the tokenizer cannot encode.
        ConfigError: The row needs a chat template and the model has none.
    """
    if not chat and isinstance(prompt, str) and isinstance(completion, str):
        if not prompt:
            raise ValueError("the prompt must hold at least one character, got none")
        before, ids = encode_text(prompt, tokenizer, add_special_tokens=True), encode_text(completion, tokenizer)
    else:
        asked, answer = messages_of(prompt, role="user"), messages_of(completion, role="assistant")
        if asked[-1]["role"] == "assistant":
            raise ValueError(f"the prompt must end with a message to the assistant, got {_roles(asked)}")
        if _roles(answer) != ["assistant"]:
            raise ValueError(f"the completion must be one message of the assistant, got {_roles(answer)}")
        text = render_chat(asked, tokenizer)
        whole = render_chat([*asked, *answer], tokenizer, add_generation_prompt=False)
        if not whole.startswith(text):
            raise ValueError(
                "the chat template must write a prompt alike with and without its answer, got "
                f"{text[-40:]!r} against {whole[max(len(text) - 40, 0) : len(text)]!r}: give plain texts"
            )
        before, ids = encode_text(text, tokenizer), encode_text(whole[len(text) :], tokenizer)
    end: int = tokenizer.eos_token_id
    return before, ids[: len(ids) - ids[::-1].index(end)] if end in ids else [*ids, end]


def messages_of(value: Any, *, role: str) -> Chat:
    """Return chat messages, or a text as one of a role; a `ValueError` where it is neither."""
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
