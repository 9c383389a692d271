"""Losses on pairs of a chosen and a rejected answer: reward model, DPO, IPO, SimPO. Called by the offline trainers.

All of them are functions of one number per pair, how much more the model prefers the chosen answer. A sequence's
log-probability is the sum over its completion tokens. The arithmetic keeps the dtype that comes in.

Shape letter: `P` pairs.
"""

from typing import Literal

from torch import Tensor
from torch.nn.functional import logsigmoid


def bradley_terry_loss(chosen_P: Tensor, rejected_P: Tensor, *, margin: float = 0.0) -> Tensor:
    """Return the negative log-likelihood of the preferences under the Bradley-Terry model.

    `loss = -log sigmoid(chosen - rejected - margin)`

    Args:
        chosen_P: [P] the reward model's score of each chosen answer.
        rejected_P: [P] of the rejected one.
        margin: How much better the chosen one should score, in units of the score.

    Returns:
        [P] losses in nats, finite for any finite scores; the caller takes the mean.

    Raises:
        ValueError: The shapes differ.

    Source:
        arXiv 2203.02155 eq. 1 (there with all pairs of a prompt's K answers in one mean); the margin is that of
        arXiv 2307.09288 eq. 2 (there one for each pair).

    >>> import torch
    >>> bradley_terry_loss(torch.tensor([1.0, -200.0]), torch.tensor([1.0, 200.0]))
    tensor([  0.6931, 400.0000])
    """
    _check(chosen_P, rejected_P)
    return -logsigmoid(chosen_P - rejected_P - margin)


def dpo_loss(
    chosen_P: Tensor,
    rejected_P: Tensor,
    *,
    reference_chosen_P: Tensor,
    reference_rejected_P: Tensor,
    beta: float,
    kind: Literal["sigmoid", "ipo"] = "sigmoid",
    label_smoothing: float = 0.0,
    chosen_lengths_P: Tensor | None = None,
    rejected_lengths_P: Tensor | None = None,
) -> Tensor:
    """Return the direct preference loss of each pair.

    `h = log(pi / ref)(chosen) - log(pi / ref)(rejected)`, each term divided by its answer's length if lengths are
    given; `loss = (1 - label_smoothing) * f(h) + label_smoothing * f(-h)` with `f(h) = -log sigmoid(beta * h)`
    (sigmoid) or `f(h) = (h - 1 / (2 * beta))^2` (ipo). IPO's is least at h = 1 / (2 * beta), so that a pair that is
    already preferred enough is not pushed further.

    Args:
        chosen_P: [P] log-probability of each chosen answer under the policy; the gradient flows through it.
        rejected_P: [P] of the rejected one.
        reference_chosen_P: [P] the same under the reference model; detached here.
        reference_rejected_P: [P] the same.
        beta: Strength of the tie to the reference, > 0.
        kind: `sigmoid` (DPO) or `ipo`.
        label_smoothing: Share of the preferences taken to be the wrong way round, in 0..0.5.
        chosen_lengths_P: [P] completion tokens of each chosen answer, > 0; None = sums as they are.
        rejected_lengths_P: [P] the same; both or neither.

    Returns:
        [P] losses; the caller takes the mean.

    Raises:
        ValueError: The shapes differ, a length is missing or 0, or beta or the smoothing is out of range.

    Source:
        sigmoid: arXiv 2305.18290 eq. 7; smoothing: E. Mitchell, "A note on DPO with noisy preferences" (cDPO);
        ipo: arXiv 2310.12036 eq. 17, its tau is our beta; lengths: arXiv 2411.15124 §5 (length-normalised DPO).
        Smoothing of ipo by the same rule is ours (its optimum moves to (1 - 2 * label_smoothing) / (2 * beta)).

    >>> import torch
    >>> one = torch.tensor([-1.0])
    >>> dpo_loss(one + 0.5, one, reference_chosen_P=one, reference_rejected_P=one, beta=1.0, kind="ipo")
    tensor([0.])
    """
    if kind not in ("sigmoid", "ipo"):
        raise ValueError(f"expected the kind sigmoid or ipo, got {kind!r}")
    if beta <= 0 or not 0.0 <= label_smoothing <= 0.5:
        raise ValueError(f"expected beta > 0 and label_smoothing in 0..0.5, got {beta} and {label_smoothing}")
    _check(chosen_P, rejected_P, reference_chosen_P, reference_rejected_P)
    chosen_ratio_P = chosen_P - reference_chosen_P.detach()
    rejected_ratio_P = rejected_P - reference_rejected_P.detach()
    if chosen_lengths_P is not None or rejected_lengths_P is not None:
        chosen_ratio_P = _per_token(chosen_ratio_P, chosen_lengths_P)
        rejected_ratio_P = _per_token(rejected_ratio_P, rejected_lengths_P)
    preference_P = chosen_ratio_P - rejected_ratio_P

    def loss_of(preference_P: Tensor) -> Tensor:
        if kind == "ipo":
            return (preference_P - 1.0 / (2.0 * beta)).square()
        return -logsigmoid(beta * preference_P)

    return (1.0 - label_smoothing) * loss_of(preference_P) + label_smoothing * loss_of(-preference_P)


def simpo_loss(
    chosen_P: Tensor,
    rejected_P: Tensor,
    *,
    chosen_lengths_P: Tensor,
    rejected_lengths_P: Tensor,
    beta: float,
    margin: float,
) -> Tensor:
    """Return the reference-free, length-normalised preference loss of each pair.

    `loss = -log sigmoid(beta * chosen / chosen_length - beta * rejected / rejected_length - margin)`

    Args:
        chosen_P: [P] log-probability of each chosen answer under the policy.
        rejected_P: [P] of the rejected one.
        chosen_lengths_P: [P] completion tokens of each chosen answer, > 0.
        rejected_lengths_P: [P] of the rejected one.
        beta: Scale of the mean log-probability, > 0.
        margin: Target reward margin (the paper's gamma), in units of beta times nats per token.

    Returns:
        [P] losses; the caller takes the mean.

    Raises:
        ValueError: The shapes differ, a length is 0, or beta is out of range.

    Source:
        arXiv 2405.14734 eq. 6.
    """
    if beta <= 0:
        raise ValueError(f"expected beta > 0, got {beta}")
    return bradley_terry_loss(
        beta * _per_token(chosen_P, chosen_lengths_P), beta * _per_token(rejected_P, rejected_lengths_P), margin=margin
    )


def _per_token(logprobs_P: Tensor, lengths_P: Tensor | None) -> Tensor:
    if lengths_P is None or lengths_P.shape != logprobs_P.shape or bool((lengths_P < 1).any()):
        raise ValueError(f"expected one length >= 1 for each of {len(logprobs_P)} answers, got {lengths_P}")
    return logprobs_P / lengths_P


def _check(*values_P: Tensor) -> None:
    shapes = [tuple(values.shape) for values in values_P]
    if len(set(shapes)) > 1 or len(shapes[0]) != 1:
        raise ValueError(f"expected vectors with one number for each pair, got the shapes {shapes}")
