"""Split long rows over ranks (Ulysses): each rank has a part of the tokens, and inside attention a part of the heads.

Before attention a rank sends its tokens' queries, keys and values to the ranks that have their heads; after it the rank
gets back what all heads computed for its tokens. All other layers, the output layer too, treat each token alone.
Source: arXiv 2309.14509.

Shape letters: `R` rows, `S` padded columns, `T` completion tokens, `H` heads, `D` their size.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.nn.functional import pad
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from areal_lite.errors import ConfigError
from areal_lite.train.distributed import context_group
from areal_lite.train.micro_batch import MicroBatch

NAME = "ulysses"
"""Of this attention among transformers' kernels."""


def check_divisible(model: Any, num_ranks: int) -> None:
    """Check that a model's heads can be divided, and that its attention is full and not capped.

    Raises:
        ConfigError: Its rows cannot be split.
    """
    architecture = model.config.get_text_config()
    heads = [architecture.num_attention_heads, getattr(architecture, "num_key_value_heads", num_ranks)]
    kinds = set(getattr(architecture, "layer_types", None) or ["full_attention"]) - {"full_attention"}
    kinds |= {name for name in ("sliding_window", "attn_logit_softcapping") if getattr(architecture, name, None)}
    if any(number % num_ranks for number in heads) or kinds or not model._supports_attention_backend:
        raise ConfigError(
            f"trainer.mesh.context={num_ranks} needs full, uncapped attention that transformers can replace, and heads "
            f"that it divides, got {type(model).__name__} with {', '.join(sorted(kinds)) or 'full attention'} and "
            f"{heads} heads. Fix: set it to 1, or to a divisor"
        )


def own_part(batch: MicroBatch) -> tuple[dict[str, Tensor], Tensor, Tensor | None]:
    """Return the model's arguments for this rank's columns, the predictors' places in them, and which of T they are.

    The last is None where a rank has whole rows. Two ranks, a row `a b c d e` with the completion `c d e` (predicted at
    places 1 2 3): rank 0 has the columns `a b c` and predictors 1 2, the first two of T; rank 1 has `d e .` and 0.
    """
    group, routes = context_group(), batch.routes_RSLK
    if group is None:
        arguments = {"input_ids": batch.input_ids_RS}
        if batch.position_ids_RS is not None:
            arguments["position_ids"] = batch.position_ids_RS
        if routes is not None:
            arguments["routes"] = routes
        return arguments, batch.predictors_T, None
    number, rank = dist.get_world_size(group), dist.get_rank(group)
    num_rows, width = batch.input_ids_RS.shape
    size = -(-width // number)
    columns = slice(rank * size, (rank + 1) * size)
    places_S = torch.arange(size * number, device=batch.input_ids_RS.device)
    rows_T, columns_T = batch.predictors_T // width, batch.predictors_T % width
    mine = torch.nonzero(columns_T // size == rank).squeeze(1)
    arguments = {
        "input_ids": pad(batch.input_ids_RS, (0, size * number - width))[:, columns],
        "position_ids": places_S[columns].expand(num_rows, size),
    }
    if routes is not None:
        arguments["routes"] = pad(routes, (0, 0, 0, 0, 0, size * number - width), value=-1)[:, columns]
    return arguments, (rows_T * size + columns_T % size)[mine], mine


def joined(own: Tensor, places: Tensor, num_tokens: int) -> Tensor:
    """Join the numbers of all ranks' tokens; gradients go back to the rank that has the token."""
    whole: Tensor = _Joined.apply(own, places, num_tokens)  # type: ignore[no-untyped-call]
    return whole


class _Joined(torch.autograd.Function):
    """All ranks compute the same loss, and each propagates the gradient of its own tokens."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, places: Tensor, num_tokens: int) -> Tensor:
        ctx.save_for_backward(places)
        whole = own.new_zeros(num_tokens, *own.shape[1:]).index_copy_(0, places, own)
        dist.all_reduce(whole, group=context_group())
        return whole

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (places,) = ctx.saved_tensors
        return grad.index_select(0, places), None, None


def _attention(module: Any, query: Tensor, key: Tensor, value: Tensor, _: None, **settings: Any) -> tuple[Tensor, None]:
    """Attend with some heads over all tokens, [R, H, S, D] to [R, S, H, D]."""
    settings = {name: settings[name] for name in ("dropout", "scaling") if name in settings}
    query, key, value = (_exchange(each, give=1, get=2) for each in (query, key, value))
    attended, _ = sdpa_attention_forward(module, query, key, value, None, is_causal=True, **settings)
    return _exchange(attended, give=1, get=2), None


def _exchange(own: Tensor, *, give: int, get: int) -> Tensor:
    """Send each rank its part of one dimension, and receive its part of another."""
    group = context_group()
    assert group is not None
    parts = torch.stack(own.chunk(dist.get_world_size(group), dim=give))
    sizes = [1] * len(parts)
    return torch.cat(list(all_to_all_single_autograd(parts, sizes, sizes, group)), dim=get)


AttentionInterface.register(NAME, _attention)
AttentionMaskInterface.register(NAME, lambda *_, **__: None)
