"""What a mistyped word may have meant."""

import difflib
from collections.abc import Iterable


def suggestion(word: str, known: Iterable[str]) -> str:
    """Return a question about the nearest known word, or nothing."""
    near = difflib.get_close_matches(word, list(known), n=1, cutoff=0.4)
    return f"; did you mean {near[0]}?" if near else ""
