"""KL estimators far from the reference (near it: test_losses.py; in expectation: train/test_enumerable_knobs.py), and
the adaptive coefficient."""

from typing import Any

import numpy as np
import pytest
import torch

from areal_lite.algo.kl import adapt_coefficient, kl_estimate


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
@pytest.mark.parametrize("gap", [1e4, -1e4])
def test_huge_gaps_stay_finite(estimator: Any, gap: float) -> None:
    """Seen failing without a bound on the exponent of k3."""
    leaf = torch.tensor([gap], requires_grad=True)
    estimate = kl_estimate(leaf, reference_logprobs_T=torch.zeros(1), estimator=estimator)
    estimate.sum().backward()
    assert estimate.isfinite().all()
    assert leaf.grad is not None
    assert leaf.grad.isfinite().all()


@pytest.mark.parametrize("gap", [-20.5, -25.0, -1e4, -np.inf])
def test_k3_pulls_a_lost_token_back(gap: float) -> None:
    """The truth's slope 1 - exp(-d) is below -4.8e8 there. Seen failing with the exponent bounded alone: slope +1."""
    leaf = torch.tensor([gap], dtype=torch.float64, requires_grad=True)
    estimate = kl_estimate(leaf, reference_logprobs_T=torch.zeros(1, dtype=torch.float64), estimator="k3")
    estimate.sum().backward()
    assert leaf.grad is not None
    assert float(leaf.grad) == pytest.approx(1 - np.exp(20))
    # On from the value at -20.
    assert float(estimate.detach()) == pytest.approx(np.expm1(20) - 20 + np.expm1(20) * (-gap - 20))


@pytest.mark.parametrize(
    ("measured", "expected"),
    [(0.0, 0.5), (0.1, 0.5), (0.133, 0.5), (0.134, 1.0), (0.2, 1.0), (0.3, 1.0), (0.301, 2.0), (9.0, 2.0), (-1.0, 0.5)],
)
def test_adaptive_coefficient_by_the_rule(measured: float, expected: float) -> None:
    """Target 0.2: halved below 0.1333, doubled above 0.3. Seen failing with the two exchanged."""
    assert adapt_coefficient(1.0, measured=measured, target=0.2) == expected


def test_an_unknown_divergence_leaves_the_coefficient() -> None:
    assert adapt_coefficient(0.7, measured=float("nan"), target=0.2) == 0.7
