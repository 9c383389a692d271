"""Forward passes without a gradient, before updates: log-probabilities and values, and the tokens that a filter keeps.

Shape letter: `T` completion tokens of the shard.
"""

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from areal_lite.algo.behaviour import divergence_keep, geometric_keep, m2po_keep
from areal_lite.config.presets import ObjectiveConfig
from areal_lite.config.recipe import Config
from areal_lite.train.batch import PolicyBatch
from areal_lite.train.distributed import gather_over_ranks
from areal_lite.train.lora import adapters_off
from areal_lite.train.micro_batch import MicroBatch
from areal_lite.train.model import completion_logprobs, completion_values, reshard

Output = Callable[[nn.Module, MicroBatch], Tensor]
"""One number per completion token of a micro-batch."""


@torch.no_grad()
def fill_in(values_T: Tensor, micro_batches: Iterable[MicroBatch], *, model: nn.Module, output: Output) -> Tensor:
    """Run a model over micro-batches; return one number per completion token; collective.

    Args:
        values_T: [T], returned in slots that no micro-batch names.
        micro_batches: Equally many on every rank.
        model: Its gathered parameters are dropped afterwards.
    """
    values_T = values_T.clone()
    for micro_batch in micro_batches:
        values_T[micro_batch.tokens_T] = output(model, micro_batch)
    reshard(model)
    return values_T


def needs_proximal_first(objective: ObjectiveConfig) -> bool:
    """Whether advantages or filter read the proximal logprobs, so that the first update cannot provide its own."""
    return objective.kl == "reward" or objective.behaviour_filter != "none"


def score_batch(
    batch: PolicyBatch, *, policy: nn.Module, reference: nn.Module | None, critic: nn.Module | None, config: Config
) -> None:
    """Run the passes that are needed before the updates, and no others, and fill the batch's tokens in; collective.

    The first update runs with the very weights of the moment the batch was taken: its current logprobs *are* the
    proximal ones. Unless they are needed beforehand, the proximal pass covers the later updates only, and with one
    minibatch `recompute` is `reuse`.
    """
    tokens, objective, logprobs = batch.tokens, config.objective, _sampled_logprobs(config)
    unknown_T = torch.zeros_like(tokens.proximal_logprobs_T)
    if objective.proximal != "behaviour":
        first = 0 if needs_proximal_first(objective) else 1
        later = chain.from_iterable(batch.updates[first:])
        tokens.proximal_logprobs_T = fill_in(tokens.proximal_logprobs_T, later, model=policy, output=logprobs)
    if reference is not None:
        own_routes = [replace(part, routes_RSLK=None) for part in batch.micro_batches]
        with adapters_off(reference):
            tokens.reference_logprobs_T = fill_in(unknown_T, own_routes, model=reference, output=logprobs)
    if critic is not None:
        tokens.values_T = fill_in(unknown_T, batch.micro_batches, model=critic, output=completion_values)


def filter_tokens(batch: PolicyBatch, number: int, *, policy: nn.Module, config: Config) -> None:
    """Set which tokens of an update the behaviour filter keeps; collective.

    M2PO compares the behaviour policy with the weights of this moment: after the first update they need a pass of
    their own. It chooses among the update's tokens of all ranks.
    """
    tokens, objective, update = batch.tokens, config.objective, batch.updates[number]
    if objective.behaviour_filter == "none":
        return
    current_T = tokens.proximal_logprobs_T
    if objective.behaviour_filter == "m2po" and number > 0:
        current_T = fill_in(current_T, update, model=policy, output=_sampled_logprobs(config))
    places_T = torch.cat([part.tokens_T for part in update])
    chosen, current_T = tokens.at(places_T), current_T[places_T]
    log_ratios_T, mask_T = current_T - chosen.behaviour_logprobs_T, chosen.loss_mask_T
    by_row: dict[str, Any] = {"loss_mask_T": mask_T, "rows_T": chosen.rows_T, "num_rows": len(batch.lengths_B)}
    if objective.behaviour_filter == "geometric":
        kept_T = geometric_keep(log_ratios_T, low=objective.geometric_low, high=objective.geometric_high, **by_row)
    elif objective.behaviour_filter == "binary_kl":
        known_T, limit = chosen.behaviour_logprobs_T, objective.binary_kl_limit
        kept_T = divergence_keep(current_T, behaviour_logprobs_T=known_T, limit=limit, **by_row)
    else:
        everyones_T, mine = gather_over_ranks(log_ratios_T[mask_T])
        kept_T = mask_T.clone()
        kept_T[mask_T] = m2po_keep(
            everyones_T,
            advantages_T=gather_over_ranks(chosen.advantages_T[mask_T])[0],
            loss_mask_T=torch.ones_like(everyones_T, dtype=torch.bool),
            threshold=objective.m2po_threshold,
        )[mine]
    tokens.kept_T[places_T] = kept_T


def _sampled_logprobs(config: Config) -> Output:
    # At the rollout temperature: it is the distribution that was sampled from that is compared.
    return partial(completion_logprobs, temperature=config.rollout.temperature)
