"""Log-probabilities and entropies of tokens from logits, in float32 and in pieces.

Called by the trainer and the supervised loop. A piece at a time keeps the float32 copies of a large
vocabulary small; in the backward pass each piece is computed again instead of being kept.

Shape letters: `T` tokens, `V` vocabulary.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, log_softmax
from torch.utils.checkpoint import checkpoint

__all__ = ["token_entropies", "token_logprobs"]

_PIECE_ELEMENTS = 2**25
"""Logits of one piece: 128 MiB in float32."""


def token_logprobs(logits_TV: Tensor, *, token_ids_T: Tensor, temperature: float) -> Tensor:
    """Return `log softmax(logits / temperature)` at the given tokens.

    Args:
        logits_TV: [T, V] logits of any float dtype; row t predicts token t.
        token_ids_T: [T] int64 tokens.
        temperature: The sampling temperature, > 0; 1 gives the model's own distribution.

    Returns:
        [T] float32 log-probabilities in nats, differentiable.

    Raises:
        ValueError: The shapes do not belong together.
    """
    if logits_TV.ndim != 2 or token_ids_T.shape != logits_TV.shape[:1]:
        raise ValueError(
            f"expected logits [tokens, vocabulary] and as many token ids, got {tuple(logits_TV.shape)} and "
            f"{tuple(token_ids_T.shape)}"
        )

    def of_piece(logits: Tensor, token_ids: Tensor) -> Tensor:
        return -cross_entropy(logits.float() / temperature, token_ids, reduction="none")

    num_rows = _piece_rows(logits_TV)
    pieces = zip(torch.split(logits_TV, num_rows), torch.split(token_ids_T, num_rows), strict=True)
    return torch.cat([_recomputed(of_piece, *piece) for piece in pieces])


def token_entropies(logits_TV: Tensor, *, temperature: float, differentiable: bool = False) -> Tensor:
    """Return the entropy of `softmax(logits / temperature)` in each row.

    `H = - sum over the vocabulary of p * log p`

    Args:
        logits_TV: [T, V] logits of any float dtype.
        temperature: The sampling temperature, > 0.
        differentiable: For a bonus in the loss; otherwise for observation only, without gradient.

    Returns:
        [T] float32 entropies in nats.

    Raises:
        ValueError: The logits are not a matrix.
    """
    if logits_TV.ndim != 2:
        raise ValueError(f"expected logits [tokens, vocabulary], got {tuple(logits_TV.shape)}")

    def of_piece(logits: Tensor) -> Tensor:
        logprobs = log_softmax(logits.float() / temperature, dim=-1)
        return -(logprobs.exp() * logprobs).sum(dim=-1)

    logits_TV = logits_TV if differentiable else logits_TV.detach()
    return torch.cat([_recomputed(of_piece, piece) for piece in torch.split(logits_TV, _piece_rows(logits_TV))])


def _piece_rows(logits_TV: Tensor) -> int:
    return max(1, _PIECE_ELEMENTS // logits_TV.shape[1])


def _recomputed(function: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
    result: Tensor = checkpoint(function, *inputs, use_reentrant=False, preserve_rng_state=False)
    return result
