"""Invariant I4, measured: right after a publication, engines and trainer give a sequence the same log-probabilities."""

import sys
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from typing import Any

import numpy as np

from areal_lite.types import Group, Prompt


def stored_sequences(groups: Iterable[Group], limit: int) -> list[tuple[list[int], list[int]]]:
    """Return token ids of prompt and completion of the first samples."""
    ways = [
        (way.prompt_ids or group.prompt.token_ids, way) for group in groups for s in group.samples for way in s.ways
    ]
    return [(list(prompt), way.token_ids.tolist()) for prompt, way in ways[:limit]]


def prompt_sequences(prompts: Iterable[Prompt], limit: int) -> list[tuple[list[int], list[int]]]:
    """Return what can be scored before there are samples: prompts, as if all but the first token were drawn."""
    long_enough = (list(prompt.token_ids) for prompt in prompts if len(prompt.token_ids) > 1)
    return [(token_ids[:1], token_ids[1:]) for token_ids in islice(long_enough, limit)]


def largest_differences(scored: Mapping[str, Sequence[Any]], expected: Sequence[Any]) -> dict[str, float]:
    """Compare log-probabilities of the same sequences.

    Args:
        scored: By engine, per sequence [T] nats.
        expected: Per sequence the trainer's, [T] nats.

    Returns:
        By engine the largest difference in nats; the largest float when one is not finite (JSON knows no infinity).
    """
    return {name: _largest(list(zip(engine, expected, strict=True))) for name, engine in scored.items() if expected}


def _largest(pairs: Sequence[tuple[Any, Any]]) -> float:
    differences = np.concatenate([np.abs(np.asarray(left) - np.asarray(right)) for left, right in pairs])
    return float(differences.max()) if np.isfinite(differences).all() else sys.float_info.max
