"""Log-probabilities and entropies of tokens from logits, in float32.

Called by the trainer and the supervised loop, which give a large vocabulary's logits in pieces.

Shape letters: `T` tokens, `V` vocabulary.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, log_softmax


def token_logprobs(logits_TV: Tensor, token_ids_T: Tensor, *, temperature: float) -> Tensor:
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
    result: Tensor = _TokenLogprobs.apply(logits_TV, token_ids_T, temperature)  # type: ignore[no-untyped-call]
    return result


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

    logits_TV = _scaled(logits_TV if differentiable else logits_TV.detach(), temperature)
    logprobs_TV = log_softmax(logits_TV, dim=-1)
    return -(logprobs_TV.exp() * logprobs_TV).sum(dim=-1)


def _scaled(logits: Tensor, temperature: float) -> Tensor:
    # A division by one would change no bit, and read and write the whole vocabulary.
    return logits.float() if temperature == 1 else logits.float() / temperature


class _TokenLogprobs(torch.autograd.Function):
    """What `token_logprobs` says; `d logprob / d logits = (onehot - softmax) / temperature`.

    Only the logits are kept. `checkpoint` around the forward pass would do the same with more passes over the
    vocabulary, and with a cost per call that small models notice.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, token_ids: Tensor, temperature: float) -> Tensor:
        ctx.save_for_backward(logits, token_ids)
        ctx.temperature = temperature
        return -cross_entropy(_scaled(logits, temperature), token_ids, reduction="none")

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        logits, token_ids = ctx.saved_tensors
        grad = (grad / ctx.temperature).unsqueeze(1)
        gradient = _scaled(logits, ctx.temperature).softmax(dim=-1).mul_(-grad)
        return gradient.scatter_add_(1, token_ids.unsqueeze(1), grad).to(logits.dtype), None, None
