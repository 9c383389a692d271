"""Forward passes without a gradient, and what they leave of every completion token. Called by the trainer.

Shape letter: `T` completion tokens of the shard.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from areal_lite.algo.logprobs import token_logprobs
from areal_lite.train.micro_batch import MicroBatch
from areal_lite.train.model import completion_logits, reshard

__all__ = ["Scores", "fill_in", "fill_in_logprobs"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Scores:
    """What is known of the shard's tokens before the updates."""

    proximal_logprobs_T: Tensor
    """[T] float32 nats. The first update's slots are filled in by that update itself unless `proximal_complete`."""
    proximal_complete: bool
    """Every slot of the proximal logprobs is filled."""
    reference_logprobs_T: Tensor | None
    """[T] float32 nats under the reference model; None without a KL term."""
    values_T: Tensor | None
    """[T] float32, the critic's value of the state before each token; None without a critic."""


@torch.no_grad()
def fill_in(
    values_T: Tensor, batches: Sequence[MicroBatch], *, model: nn.Module, of_batch: Callable[[MicroBatch], Tensor]
) -> Tensor:
    """Run a model over micro-batches, and write one number per completion token in place; collective.

    Args:
        values_T: [T]; slots that no micro-batch names stay as they are.
        batches: Equally many on every rank.
        model: The one that `of_batch` runs; its gathered parameters are dropped afterwards.
        of_batch: From a micro-batch to its values.

    Returns:
        `values_T`.
    """
    for batch in batches:
        values_T[batch.tokens_T] = of_batch(batch)
    reshard(model)
    return values_T


def fill_in_logprobs(
    logprobs_T: Tensor, batches: Sequence[MicroBatch], *, model: nn.Module, token_ids_T: Tensor, temperature: float
) -> Tensor:
    """Write the log-probabilities of the completion tokens under a causal model in place, see `fill_in`.

    Args:
        logprobs_T: [T] float32 nats.
        batches: As in `fill_in`.
        model: From `load_model`.
        token_ids_T: [T] int64.
        temperature: What logits are divided by.
    """

    def of_batch(batch: MicroBatch) -> Tensor:
        logits_TV = completion_logits(model, batch)
        return token_logprobs(logits_TV, token_ids_T=token_ids_T[batch.tokens_T], temperature=temperature)

    return fill_in(logprobs_T, batches, model=model, of_batch=of_batch)
