"""What is read off the logits of some tokens, without the matrix of all their logits.

The output layer, what the model then does to its logits, and the reading run together on a piece of the tokens, and
once more in the backward pass. Called by `model.py`, inside the model's `forward`.

Shape letters: `T` tokens, `V` vocabulary, `H` hidden size.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from areal_lite.errors import TrainerError

PIECE_ELEMENTS = 2**25
"""Logits of one piece: 128 MiB in float32."""

Reading = Callable[..., Tensor]
"""From [T, V] logits, and tensors with an entry per token, to one or several numbers per token."""


class Later(Tensor):
    """Hidden states, and a function of them that waits: whatever torch is asked to do to it is put into the function.

    So a model's `forward` says in its own words what its output layer is, and how it scales or caps logits. Its size is
    that of the hidden states. Only what leaves each token to itself can be done in pieces.
    """

    hidden: Tensor
    function: Callable[[Tensor], Tensor]
    weights: list[Tensor]
    """What else `function` has a gradient to."""

    __torch_dispatch__: Any = None  # never reached, but a tensor without elements must have it

    def __new__(cls, hidden: Tensor, function: Callable[[Tensor], Tensor], weights: Iterable[Tensor] = ()) -> "Later":
        """Put off a function of hidden states, [1, T, H]."""
        later: Later = torch.Tensor._make_wrapper_subclass(cls, hidden.shape, dtype=hidden.dtype, device=hidden.device)
        later.hidden, later.function, later.weights = hidden, function, list(weights)
        return later

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Put off one more function."""
        name = function.__name__
        if name == "__get__":  # size, dtype, device
            return super().__torch_function__(function, types, args, kwargs)  # type: ignore[no-untyped-call]
        if name == "__setitem__" or (name.endswith("_") and not name.endswith("__")):
            raise TrainerError(f"expected logits that stay as they are made, got {name} on them: do it to a copy")
        call = (args, kwargs or {})
        tensors = [leaf for leaf in tree_leaves(call) if isinstance(leaf, Tensor)]
        laters = [tensor for tensor in tensors if isinstance(tensor, Later)]
        weights = {id(weight): weight for later in laters for weight in later.weights}
        weights |= {id(each): each for each in tensors if not isinstance(each, Later) and each.requires_grad}

        def one_more(hidden: Tensor) -> Tensor:
            positional, named = tree_map_only(Later, lambda later: later.function(hidden), call)
            result: Tensor = function(*positional, **named)
            return result

        return Later(laters[0].hidden, one_more, weights.values())


def read_in_pieces(logits: Later, read: Reading, *aligned_T: Tensor) -> Tensor:
    """Compute logits and read something off them, a piece of the tokens at a time; what fits into one is kept.

    Args:
        logits: Of T tokens, put off.
        aligned_T: What `read` takes beside the logits.

    Returns:
        What `read` says of all tokens, differentiable.
    """

    def read_piece(hidden_TH: Tensor, *aligned: Tensor) -> Tensor:
        return read(logits.function(hidden_TH.unsqueeze(0)).squeeze(0), *aligned)

    hidden_TH = logits.hidden.squeeze(0)
    with torch.no_grad():
        num_rows = max(1, PIECE_ELEMENTS // logits.function(logits.hidden[:, :0]).shape[-1])
    if len(hidden_TH) <= num_rows:
        return read_piece(hidden_TH, *aligned_T)
    given = read_piece, logits.weights, num_rows, aligned_T
    result: Tensor = _Pieces.apply(given, hidden_TH, *logits.weights)  # type: ignore[no-untyped-call]
    return result


class _Pieces(torch.autograd.Function):
    """Computes each piece again in the backward pass; gradients to weights add up in float32, and are rounded once."""

    @staticmethod
    def forward(ctx: Any, given: Any, hidden_TH: Tensor, *_: Tensor) -> Tensor:
        read_piece, _, num_rows, aligned_T = ctx.given = given
        ctx.save_for_backward(hidden_TH)
        result: Tensor | None = None
        for piece in _pieces(len(hidden_TH), num_rows):
            part = read_piece(hidden_TH[piece], *(aligned[piece] for aligned in aligned_T))
            result = part.new_empty(len(hidden_TH), *part.shape[1:]) if result is None else result
            result[piece] = part
        assert result is not None, "there are more tokens than fit into one piece"
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (hidden_TH,), (read_piece, weights, num_rows, aligned_T) = ctx.saved_tensors, ctx.given
        sums = [torch.zeros_like(weight, dtype=torch.float32) for weight in weights]
        slope_TH = torch.empty_like(hidden_TH)
        for piece in _pieces(len(hidden_TH), num_rows):
            with torch.enable_grad():
                hidden = hidden_TH[piece].detach().requires_grad_()
                result = read_piece(hidden, *(aligned[piece] for aligned in aligned_T))
            slope_TH[piece], *parts = torch.autograd.grad(result, [hidden, *weights], grad[piece])
            for total, part in zip(sums, parts, strict=True):
                total += part
        gradients = [total.to(weight.dtype) for total, weight in zip(sums, weights, strict=True)]
        return None, slope_TH, *gradients


def _pieces(num_tokens: int, num_rows: int) -> list[slice]:
    return [slice(start, start + num_rows) for start in range(0, num_tokens, num_rows)]
