"""Invariant I4, measured: right after a publication, engines and trainer give a sequence the same log-probabilities."""

import logging
import sys
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from areal_lite.actors.calls import call_all, describe
from areal_lite.launch.run.engines import RayEngines
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
    calls = call_all(engines.handles, "score", sequences)
    expected = ask_trainer(sequences)
    for name, error in calls.answers(timeout_s):
        if error is not None:
            logger.warning("%s gave no logprobs for the parity check: %s", name, describe(error))
    for name in calls.pending:
        logger.warning("%s gave no logprobs for the parity check within %g s", name, timeout_s)
    return max((_largest_difference(scored, expected) for scored in calls.values.values()), default=None)


def _largest_difference(left: list[Any], right: list[Any]) -> float:
    """Largest absolute difference; the largest float when anything is not finite (JSON knows no infinity)."""
    difference = np.concatenate([np.abs(np.asarray(a) - np.asarray(b)) for a, b in zip(left, right, strict=True)])
    return float(difference.max()) if np.isfinite(difference).all() else sys.float_info.max
