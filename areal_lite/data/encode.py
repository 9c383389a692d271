"""Texts to token ids, in one call; a text that the tokenizer cannot encode is named by its row and character.

Called by `source.py`, `turns.py` and the supervised warm start.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from areal_lite.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["encode_texts", "unknown_character"]


def encode_texts(
    texts: Sequence[str],
    *,
    origins: Sequence[str],
    tokenizer: "PreTrainedTokenizerBase",
    add_special_tokens: bool = True,
) -> list[list[int]]:
    """Return the token ids of each text.

    Args:
        texts: Any number.
        origins: Names each text's row in a message.
        tokenizer: The model's.
        add_special_tokens: Whether the tokenizer may put its own around a text.

    Raises:
        DataError: The tokenizer has no token for a character, or fails otherwise.
    """
    if not texts:  # tokenizers refuse an empty batch
        return []
    try:
        ids: list[list[int]] = tokenizer(list(texts), add_special_tokens=add_special_tokens)["input_ids"]
    except Exception as error:  # the tokenizers library raises nothing narrower
        culprits = ((origin, unknown_character(text, tokenizer)) for text, origin in zip(texts, origins, strict=True))
        origin, character = next(((row, found) for row, found in culprits if found), ("", None))
        what = f"the character {character!r} (U+{ord(character):04X}) at {origin}" if character else "the prompts"
        raise DataError(
            f"the model's tokenizer cannot encode {what} ({error}): is model.path the right model for this data?"
        ) from error
    return ids


def unknown_character(text: str, tokenizer: "PreTrainedTokenizerBase") -> str | None:
    """Return the first character that the tokenizer refuses; None where it takes each of them alone."""
    if _is_encodable(text, tokenizer):
        return None
    return next((character for character in text if not _is_encodable(character, tokenizer)), None)


def _is_encodable(text: str, tokenizer: "PreTrainedTokenizerBase") -> bool:
    try:
        tokenizer(text, add_special_tokens=False)
    except Exception:  # as above
        return False
    return True
