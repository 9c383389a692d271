"""Invariant I4, measured: right after a publication, engines and trainer give a sequence the same log-probabilities."""

import logging
import sys
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import ray

from areal_lite.errors import EngineError
from areal_lite.launch.run.engines import RayEngines
from areal_lite.launch.run.remote import result
from areal_lite.types import Group

__all__ = ["largest_logprob_difference"]

logger = logging.getLogger(__name__)

Sequence = tuple[list[int], list[int]]
"""Token ids of a prompt and of a completion."""


def largest_logprob_difference(
    groups: Iterable[Group],
    *,
    engines: RayEngines,
    ask_trainer: Callable[[list[Sequence]], list[Any]],
    num_sequences: int,
    timeout_s: float,
) -> float | None:
    """Score stored samples on every engine and in the trainer.

    Args:
        groups: Whose samples are scored.
        engines: An engine that gives no answer is left out.
        ask_trainer: Returns the trainer's log-probabilities.
        num_sequences: Samples scored at most.
        timeout_s: For an engine's answer.

    Returns:
        The largest difference in nats (the largest float when one is not finite); None when no engine answered.
    """
    samples = [(group.prompt.token_ids, sample.token_ids) for group in groups for sample in group.samples]
    sequences = [(list(prompt), output.tolist()) for prompt, output in samples[:num_sequences]]
    references = {name: handle.score.remote(sequences) for name, handle in engines.handles.items()}
    expected = ask_trainer(sequences)
    differences = []
    for name, reference in references.items():
        try:
            scored = result(reference, timeout_s=timeout_s)
        except (EngineError, ray.exceptions.RayError) as error:
            logger.warning("%s gave no logprobs for the parity check: %s", name, error)
            continue
        differences.append(_largest_difference(scored, expected))
    return max(differences, default=None)


def _largest_difference(left: list[Any], right: list[Any]) -> float:
    """Largest absolute difference; the largest float when anything is not finite (JSON knows no infinity)."""
    difference = np.concatenate([np.abs(np.asarray(a) - np.asarray(b)) for a, b in zip(left, right, strict=True)])
    return float(difference.max()) if np.isfinite(difference).all() else sys.float_info.max
