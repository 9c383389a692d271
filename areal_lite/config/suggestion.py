"""What a mistyped word may have meant."""

import difflib
from collections.abc import Iterable


def suggestion(word: str, known: Iterable[str]) -> str:
    """Return a question about the nearest known word, or nothing; dotted ones compare whole and by their last part."""

    def nearness(one: str) -> float:
        pairs = (one, word), (one.rpartition(".")[2], word.rpartition(".")[2])
        return sum(difflib.SequenceMatcher(None, *pair).ratio() for pair in pairs)

    near = max(difflib.get_close_matches(word, list(known), n=3, cutoff=0.4), key=nearness, default="")
    return f"; did you mean {near}?" if near else ""
