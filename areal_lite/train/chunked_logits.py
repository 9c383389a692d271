"""Read numbers off the logits of many tokens without ever holding the matrix of all their logits.

The output layer, what the model then does to its logits, and the reading run together on a chunk of the tokens, and
once more in the backward pass. `model.py` uses this inside the model's `forward`.

Shape letters: `T` tokens, `V` vocabulary, `H` hidden size.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from areal_lite.errors import TrainerError

CHUNK_ELEMENTS = 2**25
"""Logits of one chunk: 128 MiB in float32."""

Reading = Callable[..., Tensor]
"""From [T, V] logits, and tensors with an entry per token, to one or several numbers per token."""


class LazyLogits(Tensor):
    """Hidden states with a function that is not applied yet; a torch operation on them extends the function.

    So a model's own `forward` decides what its output layer is, and how it scales or caps logits. The size is that of
    the hidden states. Only operations that treat each token alone can be done in chunks.

    Example: `lm_head(lazy) / 2` is lazy too; its function is `hidden -> linear(hidden, weight) / 2`.
    """

    hidden: Tensor
    function: Callable[[Tensor], Tensor]
    weights: list[Tensor]
    """What else `function` has a gradient to."""

    __torch_dispatch__: Any = None  # never called, but a tensor without elements must have it

    def __new__(
        cls, hidden: Tensor, function: Callable[[Tensor], Tensor], weights: Iterable[Tensor] = ()
    ) -> "LazyLogits":
        """Wrap hidden states, [1, T, H], and a function of them."""
        lazy: LazyLogits = torch.Tensor._make_wrapper_subclass(
            cls, hidden.shape, dtype=hidden.dtype, device=hidden.device
        )
        lazy.hidden, lazy.function, lazy.weights = hidden, function, list(weights)
        return lazy

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Extend the function by one more operation."""
        name = function.__name__
        if name == "__get__":  # size, dtype, device
            return super().__torch_function__(function, types, args, kwargs)  # type: ignore[no-untyped-call]
        if name == "__setitem__" or (name.endswith("_") and not name.endswith("__")):
            raise TrainerError(f"expected logits that are not changed in place, got {name} on them: do it to a copy")
        call = (args, kwargs or {})
        tensors = [leaf for leaf in tree_leaves(call) if isinstance(leaf, Tensor)]
        lazy = [tensor for tensor in tensors if isinstance(tensor, LazyLogits)]
        weights = {id(weight): weight for one in lazy for weight in one.weights}
        weights |= {id(one): one for one in tensors if not isinstance(one, LazyLogits) and one.requires_grad}

        def extended(hidden: Tensor) -> Tensor:
            positional, named = tree_map_only(LazyLogits, lambda one: one.function(hidden), call)
            result: Tensor = function(*positional, **named)
            return result

        return LazyLogits(lazy[0].hidden, extended, weights.values())


def read_in_chunks(logits: LazyLogits, read: Reading, *aligned_T: Tensor, chunk_elements: int | None = None) -> Tensor:
    """Compute logits and read numbers off them, chunk by chunk; logits that fit into one chunk are kept.

    Args:
        logits: Of T tokens.
        aligned_T: What `read` takes beside the logits.
        chunk_elements: Logits of one chunk; None = `CHUNK_ELEMENTS`.

    Returns:
        What `read` returns for all tokens, differentiable.
    """

    def read_chunk(hidden_TH: Tensor, *aligned: Tensor) -> Tensor:
        return read(logits.function(hidden_TH.unsqueeze(0)).squeeze(0), *aligned)

    hidden_TH = logits.hidden.squeeze(0)
    with torch.no_grad():
        vocabulary = logits.function(logits.hidden[:, :0]).shape[-1]
    num_rows = max(1, (chunk_elements or CHUNK_ELEMENTS) // vocabulary)
    if len(hidden_TH) <= num_rows:
        return read_chunk(hidden_TH, *aligned_T)
    arguments = read_chunk, logits.weights, num_rows, aligned_T
    result: Tensor = _Chunks.apply(arguments, hidden_TH, *logits.weights)  # type: ignore[no-untyped-call]
    return result


class _Chunks(torch.autograd.Function):
    """Compute each chunk again in the backward pass; sum gradients to weights in float32, and round them once."""

    @staticmethod
    def forward(ctx: Any, arguments: Any, hidden_TH: Tensor, *_: Tensor) -> Tensor:
        read_chunk, _, num_rows, aligned_T = ctx.arguments = arguments
        ctx.save_for_backward(hidden_TH)
        parts = [
            read_chunk(hidden_TH[chunk], *(aligned[chunk] for aligned in aligned_T))
            for chunk in _chunks(len(hidden_TH), num_rows)
        ]
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (hidden_TH,) = ctx.saved_tensors
        read_chunk, weights, num_rows, aligned_T = ctx.arguments
        sums = [torch.zeros_like(weight, dtype=torch.float32) for weight in weights]
        slope_TH = torch.empty_like(hidden_TH)
        for chunk in _chunks(len(hidden_TH), num_rows):
            with torch.enable_grad():
                hidden = hidden_TH[chunk].detach().requires_grad_()
                result = read_chunk(hidden, *(aligned[chunk] for aligned in aligned_T))
            slope_TH[chunk], *parts = torch.autograd.grad(result, [hidden, *weights], grad[chunk])
            for total, part in zip(sums, parts, strict=True):
                total += part
        gradients = [total.to(weight.dtype) for total, weight in zip(sums, weights, strict=True)]
        return None, slope_TH, *gradients


def _chunks(num_tokens: int, num_rows: int) -> list[slice]:
    return [slice(start, start + num_rows) for start in range(0, num_tokens, num_rows)]
