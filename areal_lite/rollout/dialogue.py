"""What a chat template writes after the model's answer, as token ids that follow a context that exists already.

Nothing that was sampled is tokenised again: the template is only asked for what comes after the model's last answer.
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import count
from typing import Any

from areal_lite.data.encode import Messages, Tokenizer, encode_text, render_chat

ENVIRONMENT = "environment"
"""Role of the replies that the model gets. To a chat template they are the user's."""

_PROMPT = "?"


def reply_ids(messages: Messages, reply: str | Sequence[str], *, tokenizer: Tokenizer, end: int | None) -> list[int]:
    """Return the token ids of an environment's turn, up to where the model's next turn starts.

    Args:
        messages: The turns so far, without the prompt; the last is the model's answer.
        reply: The user's text; or results of tools, each in a message of role `tool` if the template has that role.
        end: The end-of-sequence token that the model produced; None if its answer was cut off.

    Raises:
        ValueError: The template refuses the conversation, or the tokenizer the reply.
        ConfigError: The model has no chat template.
    """
    before: list[Mapping[str, Any]] = [{"role": "user", "content": _PROMPT}]  # the prompt's tokens are there already
    for message in messages[:-1]:
        before.append({**message, "role": "user"} if message["role"] == ENVIRONMENT else message)
    if not isinstance(reply, str):
        new = [{"role": "tool", "content": result} for result in reply]
        with suppress(ValueError):  # the template has no such role, or requires calls in a form that it can read
            text = following_text(before, new, tokenizer=tokenizer)
            if all(result.strip() in text for result in reply):
                return following_ids(text, tokenizer=tokenizer, end=end)
        reply = "\n".join(reply)
    text = following_text(before, [{"role": "user", "content": reply}], tokenizer=tokenizer)
    return following_ids(text, tokenizer=tokenizer, end=end)


def following_text(before: Messages, new: Messages, *, tokenizer: Tokenizer, tools: Messages = ()) -> str:
    """Return what a chat template writes after the model's answer to `before`, with `new` as the next messages.

    Raises:
        ValueError: The template refuses the conversation.
        ConfigError: The model has no chat template.
    """
    # A unique mark stands for the answer: a template may rewrite the real one (trim it, cut its thoughts), although its
    # tokens stay as they were sampled.
    taken = repr([*before, *new, *tools])
    mark = next(name for name in (f"answer{n}" for n in count()) if name not in taken)
    turns = [*before, {"role": "assistant", "content": mark}, *new]
    _, found, following = render_chat(turns, tokenizer, tools=tools).partition(mark)
    if not found:
        raise ValueError("the chat template must include the assistant's messages, it leaves them out")
    return following


def following_ids(text: str, *, tokenizer: Tokenizer, end: int | None) -> list[int]:
    """Return the token ids of a `following_text`, without the end token if the model produced it.

    White space that a template puts before the end token is left out: it cannot go between sampled tokens.
    """
    end_text = "" if end is None else str(tokenizer.decode([end]))
    if end_text and text.lstrip().startswith(end_text):
        text = text.lstrip().removeprefix(end_text)
    return encode_text(text, tokenizer)
