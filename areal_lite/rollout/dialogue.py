"""From an environment's words to token ids behind a context that is there already: plain text, or a chat template.

Nothing that was sampled is ever tokenised again: a chat template is asked only for what it
writes behind the model's last answer.
"""

from collections.abc import Mapping, Sequence
from itertools import count
from typing import TYPE_CHECKING

from areal_lite.data.encode import encode_text, render_chat

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["ASSISTANT", "ENVIRONMENT", "Dialogue"]

ASSISTANT = "assistant"
"""Role of what the model produced."""
ENVIRONMENT = "environment"
"""Role of what it was answered. Chat templates know it as the user."""

_PROMPT = "?"


class Dialogue:
    """Tokenises an environment's turns for one model."""

    def __init__(self, tokenizer: "PreTrainedTokenizerBase", *, chat: bool) -> None:
        """Prepare for one model.

        Args:
            tokenizer: The model's.
            chat: Whether the prompts went through its chat template.
        """
        self._tokenizer, self._chat = tokenizer, chat

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text, special tokens read as such and none added.

        Raises:
            ValueError: The tokenizer has no tokens for it.
        """
        return encode_text(text, self._tokenizer)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of token ids, special tokens left out."""
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=True))

    def reply_ids(self, messages: Sequence[Mapping[str, str]], reply: str, *, end: int | None) -> list[int]:
        """Return the token ids of an environment's turn, up to where the model's next turn begins.

        In a chat this is the rendering of the conversation with the reply and a generation prompt, less what is there:
        all up to the model's last answer, and its end token where it produced one. White space that a template puts
        before the end token cannot be put back between tokens that were sampled, and is left out.

        Args:
            messages: The turns so far, without the prompt; the last is the model's answer.
            reply: The environment's words.
            end: The end-of-sequence token that the model produced; None where its answer was cut off.

        Raises:
            ValueError: The template refuses the conversation, or the tokenizer the reply.
            ConfigError: The model has no chat template.
        """
        if not self._chat:
            return self.encode(reply)
        behind = self._behind_answer(messages, reply)
        end_text = "" if end is None else str(self._tokenizer.decode([end]))
        if end_text and behind.lstrip().startswith(end_text):
            behind = behind.lstrip().removeprefix(end_text)
        return self.encode(behind)

    def _behind_answer(self, messages: Sequence[Mapping[str, str]], reply: str) -> str:
        # A mark stands for the last answer: templates may rewrite an answer (trim it, cut its thoughts), which is
        # nothing to what the model really said. For the prompt too something stands; it lies before.
        contents = [message["content"] for message in messages]
        mark = next(name for name in (f"answer{n}" for n in count()) if not any(name in text for text in contents))
        turns = [
            {"role": "user", "content": _PROMPT},
            *({"role": _chat_role(message["role"]), "content": message["content"]} for message in messages[:-1]),
            {"role": ASSISTANT, "content": mark},
            {"role": "user", "content": reply},
        ]
        _, found, behind = render_chat(turns, self._tokenizer).partition(mark)
        if not found:
            raise ValueError("the chat template must write the assistant's messages into the conversation, it does not")
        return behind


def _chat_role(role: str) -> str:
    return "user" if role == ENVIRONMENT else role
