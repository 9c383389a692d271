"""Where a step's reward belongs: the token at which the step ends."""

import bisect
import functools
from collections.abc import Callable, Sequence

Decode = Callable[[Sequence[int]], str]


def token_of(end_character: int, token_ids: Sequence[int], decode: Decode) -> int:
    """Return the first token, 0..T-1, with which the text's first `end_character` characters, from 1, are there.

    A prefix counts once it spells these characters as the whole does: a character whose bytes are spread over several
    tokens is complete with the last of them. Special tokens that are left out of the text spell nothing, so a step
    never ends at one behind it.

    Args:
        token_ids: [T] of the whole completion.
        decode: Turns token ids into text; prefixes of ids must yield prefixes of text, but for a broken last character.

    Example:
        >>> token_of(3, [72, 101, 121, 33], lambda ids: "".join(map(chr, ids)))
        2
    """
    wanted = decode(token_ids)[:end_character]
    prefixes = range(1, len(token_ids))
    return bisect.bisect_left(prefixes, True, key=lambda n: decode(token_ids[:n])[:end_character] == wanted)


def decoder_of(model_folder: str) -> Decode:
    """Return a function that decodes as samples are decoded; it loads the tokenizer when it is first called."""

    @functools.cache
    def tokenizer() -> "object":
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(model_folder)

    def decode(token_ids: Sequence[int]) -> str:
        text: str = tokenizer().decode(list(token_ids), skip_special_tokens=True)  # type: ignore[attr-defined]
        return text

    return decode
