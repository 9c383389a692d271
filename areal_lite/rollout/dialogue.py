"""An environment's turn in a chat, from its words to token ids behind a context that is there already.

Nothing that was sampled is ever tokenised again: a chat template is asked only for what it writes behind the model's
last answer.
"""

from collections.abc import Mapping, Sequence
from itertools import count
from typing import TYPE_CHECKING

from areal_lite.data.encode import encode_text, render_chat

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ENVIRONMENT = "environment"
"""Role of what the model was answered. Chat templates know it as the user."""

_PROMPT = "?"


def reply_ids(
    messages: Sequence[Mapping[str, str]], reply: str, *, tokenizer: "PreTrainedTokenizerBase", end: int | None
) -> list[int]:
    """Return the token ids of an environment's turn, up to where the model's next turn begins.

    This is the rendering of the conversation with the reply and a generation prompt, less what is there: all up to the
    model's last answer, and its end token where it produced one. White space that a template puts before the end token
    cannot be put back between tokens that were sampled, and is left out.

    Args:
        messages: The turns so far, without the prompt; the last is the model's answer.
        end: The end-of-sequence token that the model produced; None where its answer was cut off.

    Raises:
        ValueError: The template refuses the conversation, or the tokenizer the reply.
        ConfigError: The model has no chat template.
    """
    # A mark stands for the last answer: templates may rewrite an answer (trim it, cut its thoughts), which is
    # nothing to what the model really said. For the prompt too something stands; it lies before.
    contents = [message["content"] for message in messages]
    mark = next(name for name in (f"answer{n}" for n in count()) if not any(name in text for text in contents))
    turns = [
        {"role": "user", "content": _PROMPT},
        *({**message, "role": "user"} if message["role"] == ENVIRONMENT else message for message in messages[:-1]),
        {"role": "assistant", "content": mark},
        {"role": "user", "content": reply},
    ]
    _, found, behind = render_chat(turns, tokenizer).partition(mark)
    if not found:
        raise ValueError("the chat template must write the assistant's messages into the conversation, it does not")
    end_text = "" if end is None else str(tokenizer.decode([end]))
    if end_text and behind.lstrip().startswith(end_text):
        behind = behind.lstrip().removeprefix(end_text)
    return encode_text(behind, tokenizer)
