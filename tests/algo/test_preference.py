"""Losses on preference pairs: values and gradients against an independent numpy derivation, and relations."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from areal_lite.algo.preference import bradley_terry_loss, dpo_loss, simpo_loss

CHOSEN = np.array([-3.0, -10.0, -0.5, -7.0])
REJECTED = np.array([-4.0, -2.0, -0.5, -9.5])
REFERENCE_CHOSEN = np.array([-3.5, -9.0, -0.5, -6.0])
REFERENCE_REJECTED = np.array([-3.0, -4.0, -0.5, -9.0])
CHOSEN_LENGTHS, REJECTED_LENGTHS = np.array([2, 5, 1, 4]), np.array([4, 2, 1, 5])
REFERENCES = {
    "reference_chosen_P": torch.tensor(REFERENCE_CHOSEN),
    "reference_rejected_P": torch.tensor(REFERENCE_REJECTED),
}
LENGTHS = {"chosen_lengths_P": torch.tensor(CHOSEN_LENGTHS), "rejected_lengths_P": torch.tensor(REJECTED_LENGTHS)}


def run(
    loss: Callable[..., Tensor], chosen: np.ndarray = CHOSEN, rejected: np.ndarray = REJECTED, **arguments: Any
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the losses and the gradients of their sum by the chosen and the rejected numbers."""
    chosen_P = torch.tensor(chosen, dtype=torch.float64, requires_grad=True)
    rejected_P = torch.tensor(rejected, dtype=torch.float64, requires_grad=True)
    losses_P = loss(chosen_P, rejected_P, **arguments)
    losses_P.sum().backward()
    assert chosen_P.grad is not None
    assert rejected_P.grad is not None
    return losses_P.detach().numpy(), chosen_P.grad.numpy(), rejected_P.grad.numpy()


def wrong_probability(z: np.ndarray) -> np.ndarray:
    """Return 1 - sigmoid(z): the slope of -log sigmoid at z is minus this."""
    return 1.0 / (1.0 + np.exp(z))


def derive(
    *, beta: float, kind: str = "sigmoid", smoothing: float = 0.0, by_length: bool = False
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Derive DPO's losses and gradients by hand from the definitions.

    With h the difference of log-ratios: -log sigmoid(beta h) = log(1 + exp(-beta h)) and its slope is
    -beta (1 - sigmoid(beta h));
    its mirror image f(-h) = log(1 + exp(beta h)), slope +beta sigmoid(beta h). IPO: slopes 2 (h - c) and 2 (h + c) with
    c = 1 / (2 beta). dh/dchosen = 1 / length (or 1), dh/drejected = -1 / length.
    """
    chosen_lengths = CHOSEN_LENGTHS if by_length else np.ones(4)
    rejected_lengths = REJECTED_LENGTHS if by_length else np.ones(4)
    h = (CHOSEN - REFERENCE_CHOSEN) / chosen_lengths - (REJECTED - REFERENCE_REJECTED) / rejected_lengths
    if kind == "sigmoid":
        right, wrong = np.log(1 + np.exp(-beta * h)), np.log(1 + np.exp(beta * h))
        right_slope, wrong_slope = -beta * wrong_probability(beta * h), beta * (1 - wrong_probability(beta * h))
    else:
        c = 1 / (2 * beta)
        right, wrong, right_slope, wrong_slope = (h - c) ** 2, (h + c) ** 2, 2 * (h - c), 2 * (h + c)
    slope = (1 - smoothing) * right_slope + smoothing * wrong_slope
    return (1 - smoothing) * right + smoothing * wrong, slope / chosen_lengths, -slope / rejected_lengths


def assert_equal(actual: tuple[np.ndarray, ...], expected: tuple[np.ndarray, ...]) -> None:
    for one, other in zip(actual, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("margin", [0.0, 0.75])
def test_bradley_terry_against_numpy(margin: float) -> None:
    """Seen failing with chosen and rejected swapped, and with the margin added."""
    z = CHOSEN - REJECTED - margin
    slope = wrong_probability(z)
    assert_equal(run(bradley_terry_loss, margin=margin), (np.log(1 + np.exp(-z)), -slope, slope))


def test_scores_of_another_shape_are_refused() -> None:
    """Seen failing without the check: [4] and [4, 1] made [4, 4] losses."""
    with pytest.raises(ValueError, match=r"got the shapes .*\(4, 1\)"):
        bradley_terry_loss(torch.ones(4), torch.ones(4, 1))


@pytest.mark.parametrize("by_length", [False, True])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("kind", ["sigmoid", "ipo"])
def test_dpo_against_numpy(kind: str, smoothing: float, by_length: bool) -> None:
    """Seen failing with the reference left out, beta outside the sigmoid, IPO's target 1 / beta, smoothing that scales
    the loss without its mirror image, and the chosen length for both answers."""
    lengths = LENGTHS if by_length else {}
    actual = run(dpo_loss, beta=0.3, kind=kind, label_smoothing=smoothing, **REFERENCES, **lengths)
    assert_equal(actual, derive(beta=0.3, kind=kind, smoothing=smoothing, by_length=by_length))


def test_simpo_against_numpy() -> None:
    """z = beta (chosen / length - rejected / length) - margin; slopes beta / length times -+(1 - sigmoid(z)).

    Seen failing with sums instead of means, and with the margin multiplied by beta.
    """
    beta, margin = 2.5, 0.6
    z = beta * (CHOSEN / CHOSEN_LENGTHS - REJECTED / REJECTED_LENGTHS) - margin
    slope = beta * wrong_probability(z)
    expected = np.log(1 + np.exp(-z)), -slope / CHOSEN_LENGTHS, slope / REJECTED_LENGTHS
    assert_equal(run(simpo_loss, beta=beta, margin=margin, **LENGTHS), expected)


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_huge_differences_stay_finite(sign: float) -> None:
    """In float32, whose exp overflows at 89. Seen failing with log(1 + exp(-z)) and with -log(sigmoid(z))."""
    chosen = torch.tensor([sign * 5000.0], requires_grad=True)
    zero, lengths = torch.zeros(1), torch.ones(1, dtype=torch.int64)
    losses = (
        bradley_terry_loss(chosen, zero),
        dpo_loss(chosen, zero, reference_chosen_P=zero, reference_rejected_P=zero, beta=1.0),
        simpo_loss(chosen, zero, chosen_lengths_P=lengths, rejected_lengths_P=lengths, beta=1.0, margin=0.0),
    )
    for loss in losses:
        (slope,) = torch.autograd.grad(loss.sum(), chosen)
        assert (loss.item(), slope.item()) == ((0.0, 0.0) if sign > 0 else (5000.0, -1.0))
