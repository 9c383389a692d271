"""An environment's turn in a chat, from its words to token ids behind a context that is there already.

Nothing that was sampled is ever tokenised again: a chat template is asked only for what it writes behind the model's
last answer.
"""

from collections.abc import Sequence
from contextlib import suppress
from itertools import count

from areal_lite.data.encode import Messages, Tokenizer, encode_text, render_chat

ENVIRONMENT = "environment"
"""Role of what the model was answered. Chat templates know it as the user."""

_PROMPT = "?"


def reply_ids(messages: Messages, reply: str | Sequence[str], *, tokenizer: Tokenizer, end: int | None) -> list[int]:
    """Return the token ids of an environment's turn, up to where the model's next turn begins.

    Args:
        messages: The turns so far, without the prompt; the last is the model's answer.
        reply: The user's words; or results of tools, each a message of role `tool` where the template writes those.
        end: The end-of-sequence token that the model produced; None where its answer was cut off.

    Raises:
        ValueError: The template refuses the conversation, or the tokenizer the reply.
        ConfigError: The model has no chat template.
    """
    before = [
        {"role": "user", "content": _PROMPT},  # something stands for the prompt: it lies before
        *({**message, "role": "user"} if message["role"] == ENVIRONMENT else message for message in messages[:-1]),
    ]
    if not isinstance(reply, str):
        new = [{"role": "tool", "content": result} for result in reply]
        with suppress(ValueError):  # a template that knows no such role, or none without calls that it can read
            behind = text_behind(before, new, tokenizer=tokenizer)
            if all(result.strip() in behind for result in reply):
                return ids_behind(behind, tokenizer=tokenizer, end=end)
        reply = "\n".join(reply)
    behind = text_behind(before, [{"role": "user", "content": reply}], tokenizer=tokenizer)
    return ids_behind(behind, tokenizer=tokenizer, end=end)


def text_behind(before: Messages, new: Messages, *, tokenizer: Tokenizer, tools: Messages = ()) -> str:
    """Return what a chat template writes behind the model's answer to `before` where `new` follows it.

    Raises:
        ValueError: The template refuses the conversation.
        ConfigError: The model has no chat template.
    """
    # A mark stands for the answer: templates may rewrite one (trim it, cut its thoughts), which is nothing to what the
    # model really said.
    said = repr([*before, *new, *tools])
    mark = next(name for name in (f"answer{n}" for n in count()) if name not in said)
    turns = [*before, {"role": "assistant", "content": mark}, *new]
    _, found, behind = render_chat(turns, tokenizer, tools=tools).partition(mark)
    if not found:
        raise ValueError("the chat template must write the assistant's messages into the conversation, it does not")
    return behind


def ids_behind(text: str, *, tokenizer: Tokenizer, end: int | None) -> list[int]:
    """Return the token ids of a `text_behind`, less the end token where the model produced it.

    White space that a template puts before the end token cannot be put back between tokens that were sampled, and is
    left out.
    """
    end_text = "" if end is None else str(tokenizer.decode([end]))
    if end_text and text.lstrip().startswith(end_text):
        text = text.lstrip().removeprefix(end_text)
    return encode_text(text, tokenizer)
