"""The passes around a step's updates: what policy, reference and critic say of the batch. Called by the trainer.

Shape letter: `T` completion tokens of the shard.
"""

from collections.abc import Sequence
from itertools import chain

import torch
from torch import Tensor, nn

from areal_lite.algo.kl import kl_estimate
from areal_lite.config.recipe import Config
from areal_lite.train.batch import PolicyBatch
from areal_lite.train.critic import Critic
from areal_lite.train.distributed import sum_over_ranks
from areal_lite.train.micro_batch import MicroBatch
from areal_lite.train.passes import Scores, fill_in_logprobs
from areal_lite.train.plan import needs_proximal_first

__all__ = ["proximal_kl", "score_batch"]


def score_batch(
    batch: PolicyBatch,
    updates: Sequence[Sequence[MicroBatch]],
    *,
    model: nn.Module,
    reference: nn.Module | None,
    critic: Critic | None,
    config: Config,
) -> Scores:
    """Run the passes that are needed before the updates, and no others; collective.

    The first update runs with the very weights of the moment the batch was taken: its current logprobs *are* the
    proximal ones. Unless the plan needs them beforehand, the proximal pass covers the later updates only, and with one
    minibatch `recompute` is `reuse`.

    Args:
        batch: The shard.
        updates: The micro-batches of each update.
        model: The policy.
        reference: The reference model, if there is one.
        critic: The critic, if there is one.
        config: The recipe.
    """
    everything = list(chain.from_iterable(updates))
    is_behaviour, is_needed = config.objective.proximal == "behaviour", needs_proximal_first(config.objective)
    proximal_logprobs_T = batch.behaviour_logprobs_T.clone()
    if not is_behaviour:
        later = everything if is_needed else list(chain.from_iterable(updates[1:]))
        _logprobs_into(proximal_logprobs_T, later, model=model, batch=batch, config=config)
    reference_logprobs_T = None
    if reference is not None:
        reference_logprobs_T = torch.zeros_like(proximal_logprobs_T)
        _logprobs_into(reference_logprobs_T, everything, model=reference, batch=batch, config=config)
    return Scores(
        proximal_logprobs_T=proximal_logprobs_T,
        proximal_complete=is_behaviour or is_needed,
        reference_logprobs_T=reference_logprobs_T,
        values_T=None if critic is None else critic.values(everything, num_tokens=len(batch.token_ids_T)),
    )


def proximal_kl(
    batch: PolicyBatch,
    updates: Sequence[Sequence[MicroBatch]],
    *,
    scores: Scores,
    model: nn.Module,
    config: Config,
) -> float | None:
    """Return the mean KL(proximal || current) over the loss mask of all ranks, in nats; collective.

    It takes another pass over the batch, behind the updates: while they run, the first of them sees no distance at all.
    None where nothing trains.
    """
    logprobs_T = torch.zeros_like(scores.proximal_logprobs_T)
    _logprobs_into(logprobs_T, list(chain.from_iterable(updates)), model=model, batch=batch, config=config)
    estimates_T = kl_estimate(scores.proximal_logprobs_T, reference_logprobs_T=logprobs_T, estimator="k3")
    inside_T = estimates_T[batch.loss_mask_T].double()
    total, count = sum_over_ranks(torch.stack([inside_T.sum(), batch.loss_mask_T.sum().double()])).tolist()
    return total / count if count else None


def _logprobs_into(
    logprobs_T: Tensor, batches: Sequence[MicroBatch], *, model: nn.Module, batch: PolicyBatch, config: Config
) -> None:
    # At the rollout temperature: it is the distribution that was sampled from that is compared.
    temperature = config.rollout.temperature
    fill_in_logprobs(logprobs_T, batches, model=model, token_ids_T=batch.token_ids_T, temperature=temperature)
