"""What a mistyped word may have meant."""

import difflib
from collections.abc import Iterable


def suggestion(word: str, known: Iterable[str]) -> str:
    """Return a question about the nearest known word, or nothing; a setting of the same name in any section is nearer."""
    words = list(known)
    namesakes = [one for one in words if one.rpartition(".")[2] == word.rpartition(".")[2]]
    near = difflib.get_close_matches(word, namesakes or words, n=1, cutoff=0.4)
    return f"; did you mean {near[0]}?" if near else ""
