"""Invariant I4, measured: right after a publication, engines and trainer give a sequence the same log-probabilities."""

import sys
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from areal_lite.types import Group

__all__ = ["largest_difference", "stored_sequences"]


def stored_sequences(groups: Iterable[Group], limit: int) -> list[tuple[list[int], list[int]]]:
    """Return token ids of prompt and completion of the first samples."""
    samples = [(group.prompt.token_ids, sample.token_ids) for group in groups for sample in group.samples]
    return [(list(prompt), output.tolist()) for prompt, output in samples[:limit]]


def largest_difference(scored: Iterable[Sequence[Any]], expected: Sequence[Any]) -> float | None:
    """Compare log-probabilities of the same sequences.

    Args:
        scored: Per engine, per sequence [T] nats.
        expected: Per sequence the trainer's, [T] nats.

    Returns:
        The largest difference in nats; the largest float when one is not finite (JSON knows no infinity); None where no
        engine has scored.
    """
    pairs = [pair for engine in scored for pair in zip(engine, expected, strict=True)]
    if not pairs:
        return None
    differences = np.concatenate([np.abs(np.asarray(left) - np.asarray(right)) for left, right in pairs])
    return float(differences.max()) if np.isfinite(differences).all() else sys.float_info.max
