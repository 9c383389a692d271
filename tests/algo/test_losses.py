"""The terms of the online objective: loss and gradient against independent numpy derivations, and relations.

KL estimators in expectation: train/test_enumerable_trainer.py.
"""

from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from algo_builders import Case, make_case, tensor

from areal_lite.algo.kl import adapt_coefficient, kl_estimate
from areal_lite.algo.losses import entropy_bonus, kl_penalty, policy_loss, value_loss

NAN = float("nan")
JUNK = [NAN, np.inf, -np.inf, 1e30]
KNOBS: dict[str, Any] = {"surrogate": "ratio", "ratio_level": "token", "clip_low": 0.2, "clip_high": 0.3}
Numbers = dict[str, np.ndarray]


def numbers(case: Case, seed: int = 0) -> Numbers:
    """Advantages, weights and targets of every token; a fifth of the behaviour weights is 0."""
    rng = np.random.default_rng(seed + 100)
    size = len(case.mask)
    return {
        "current": case.current,
        "proximal": case.proximal,
        "advantages": rng.normal(0, 1, size),
        "weights": rng.uniform(0.3, 2.0, size) * (rng.random(size) < 0.8),
        "token_weights": rng.uniform(0.01, 0.2, size),
    }


def run(case: Case, given: Numbers, **changes: Any) -> tuple[float, np.ndarray, int]:
    """Return loss, gradient by current logprobs, and the number of clipped tokens."""
    current = tensor(given["current"]).clone().requires_grad_()
    loss, sums = policy_loss(
        current,
        proximal_logprobs_T=tensor(given["proximal"]),
        behaviour_weights_T=tensor(given["weights"]),
        advantages_T=tensor(given["advantages"]),
        loss_mask_T=tensor(case.mask),
        token_weights_T=tensor(given["token_weights"]),
        rows_T=tensor(case.rows),
        num_rows=len(case.lengths),
        **KNOBS | changes,
    )
    loss.backward()
    assert current.grad is not None
    assert set(sums) == {"clipped"}
    assert not sums["clipped"].requires_grad
    return float(loss.detach()), current.grad.numpy(), int(sums["clipped"])


def derive(case: Case, given: Numbers, **changes: Any) -> tuple[float, np.ndarray, int]:
    """Derive the same token by token, by cases on the sign of the advantage.

    ratio: with A > 0 the minimum is `min(r, high) A`, slope `r A` below `high` and 0 above; with A < 0 it is
    `max(r, low) A`, slope `r A` above `low` and 0 below (d r / d log pi_current = r). At the sequence level r is the
    geometric mean over the row's tokens that count, and d r / d log pi_current of each of its n tokens is r / n.
    clip_dual: with A < 0 also 0 above it. clip_unit probability: the bounds are where pi_current is pi_proximal - 0.1
    or + 0.05. soft_ratio: with the sigmoid p, the slope by r is 4 p (1 - p) A.
    """
    knobs = KNOBS | {"clip_unit": "ratio", "clip_dual": None, "soft_positive": 1.0, "soft_negative": 1.05} | changes
    loss, gradient, num_clipped = 0.0, np.zeros(len(case.mask)), 0
    counts = case.mask & (given["weights"] != 0)
    for t in np.flatnonzero(counts):
        alike = [t] if knobs["ratio_level"] == "token" else np.flatnonzero(counts & (case.rows == case.rows[t]))
        ratios = np.exp(given["current"][alike]) / np.exp(given["proximal"][alike])
        ratio = np.prod(ratios) ** (1 / len(alike))
        advantage, scale = given["advantages"][t], given["weights"][t] * given["token_weights"][t]
        chance = np.exp(given["proximal"][t]) if knobs["clip_unit"] == "probability" else 1.0
        low = -np.inf if knobs["clip_low"] is None else (chance - knobs["clip_low"]) / chance
        high = np.inf if knobs["clip_high"] is None else (chance + knobs["clip_high"]) / chance
        dual = np.inf if knobs["clip_dual"] is None else knobs["clip_dual"]
        if knobs["surrogate"] == "ratio":
            is_held = ratio > high if advantage > 0 else not low <= ratio <= dual
            loss -= scale * (min(ratio, high) if advantage > 0 else min(max(ratio, low), dual)) * advantage
            for u in alike:
                gradient[u] -= 0.0 if is_held else scale * ratio * advantage / len(alike)
            num_clipped += is_held
        elif knobs["surrogate"] == "soft_ratio":
            tau = knobs["soft_positive"] if advantage > 0 else knobs["soft_negative"]
            p = 1 / (1 + np.exp(-tau * (ratio - 1)))
            loss -= scale * 4 / tau * p * advantage
            for u in alike:
                gradient[u] -= scale * 4 * p * (1 - p) * advantage * ratio / len(alike)
        elif knobs["surrogate"] == "weighted_likelihood":
            slope = scale * min(max(ratio, low), high) * advantage
            loss -= slope * given["current"][t]
            gradient[t] -= slope
            num_clipped += not low <= ratio <= high
        else:
            loss -= scale * given["current"][t]
            gradient[t] -= scale
    return loss, gradient, num_clipped


SURROGATES = ["ratio", "soft_ratio", "weighted_likelihood", "likelihood"]
CLIPS = [(0.2, 0.3), (None, 0.3), (0.2, None), (None, None), (3e-4, 4e-4)]
CLIPPING = ("ratio", "weighted_likelihood")


def check(seed: int, **knobs: Any) -> tuple[Case, Numbers, float, int]:
    """Compare loss, gradient and count with what is derived; return what they are made of, the loss and the count."""
    case = make_case(seed)
    given = numbers(case, seed)
    loss, gradient, num_clipped = run(case, given, **knobs)
    expected_loss, expected_gradient, expected_clipped = derive(case, given, **knobs)
    assert loss == pytest.approx(expected_loss)
    np.testing.assert_allclose(gradient, expected_gradient, atol=1e-12)
    assert num_clipped == expected_clipped
    return case, given, loss, num_clipped


@pytest.mark.parametrize(("clip_low", "clip_high"), CLIPS)
@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("surrogate", SURROGATES)
def test_policy_loss_against_numpy(surrogate: str, level: str, clip_low: float | None, clip_high: float | None) -> None:
    """Seen failing with max for min, the clip bounds swapped, the weight left out, the ratio of weighted_likelihood
    not detached, the sequence's mean replaced by its sum, and its mean taken over masked tokens too, or over tokens of
    weight 0."""
    knobs = {"surrogate": surrogate, "ratio_level": level, "clip_low": clip_low, "clip_high": clip_high}
    total_clipped = sum(check(seed, **knobs)[-1] for seed in range(3))
    assert (total_clipped > 0) == (surrogate in CLIPPING and (clip_low, clip_high) != (None, None))


@pytest.mark.parametrize(
    "knobs",
    [
        {"clip_dual": 1.5},
        {"clip_dual": 1.1, "clip_low": None, "clip_high": None},
        {"clip_dual": 1.2, "ratio_level": "sequence"},
        {"clip_unit": "probability", "clip_low": 0.1, "clip_high": 0.05},
        {"clip_unit": "probability", "clip_low": 0.1, "clip_high": 0.05, "clip_dual": 1.5},
        {"clip_unit": "probability", "clip_low": 0.1, "clip_high": 0.05, "surrogate": "weighted_likelihood"},
        {"surrogate": "soft_ratio", "soft_positive": 0.5, "soft_negative": 3.0},
    ],
    ids=lambda knobs: "-".join(map(str, knobs.values())),
)
def test_other_bounds_against_numpy(knobs: dict[str, Any]) -> None:
    """Seen failing with the dual clip on positive advantages too, with it below the upper clip alone, with pi_current
    for pi_proximal as the unit, and with the two temperatures swapped."""
    plain = 0.0
    for seed in range(3):
        case, given, loss, _ = check(seed, **knobs)
        plain += abs(loss - run(case, given, surrogate=knobs.get("surrogate", "ratio"))[0])
    assert plain > 0.01, "the setting made no difference"


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("surrogate", SURROGATES)
def test_masked_slots_may_hold_anything(surrogate: str, level: str) -> None:
    """Current logprobs too: their gradient is 0 there. Seen failing with the mask multiplied instead of chosen, and
    with the choice made on the products instead of on what goes into them."""
    case = make_case()
    given = numbers(case)
    expected = run(case, given, surrogate=surrogate, ratio_level=level)
    for shift, name in enumerate(given):
        given[name] = np.where(case.mask, given[name], np.roll(np.resize(JUNK, len(case.mask)), shift))
    got = run(case, given, surrogate=surrogate, ratio_level=level)
    assert got[0] == expected[0]
    np.testing.assert_array_equal(got[1], expected[1])
    assert got[2] == expected[2]


@pytest.mark.parametrize("junk", [-np.inf, NAN])
@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("surrogate", SURROGATES)
def test_a_token_of_weight_zero_trains_nothing_whatever_it_holds(surrogate: str, level: str, junk: float) -> None:
    """0 * inf must not become the loss, nor a NaN its row's ratio.

    Seen failing with the weight multiplied alone, and with such tokens in the sequence's mean.
    """
    case = make_case()
    given = numbers(case)
    loss, gradient, _ = run(case, given, surrogate=surrogate, ratio_level=level)
    token = int(np.flatnonzero(case.mask & (given["weights"] == 0))[0])
    given["current"] = np.where(np.arange(len(case.mask)) == token, junk, given["current"])
    got_loss, got_gradient, _ = run(case, given, surrogate=surrogate, ratio_level=level)
    assert got_loss == pytest.approx(loss, abs=1e-15)
    np.testing.assert_array_equal(got_gradient, gradient)


@pytest.mark.parametrize(("surrogate", "level"), list(product(SURROGATES, ["token", "sequence"])))
@pytest.mark.parametrize("clips", [(0.2, 0.3), (None, None)])
@pytest.mark.parametrize("unit", ["ratio", "probability"])
@pytest.mark.parametrize("gap", [1e3, -1e3, 1e30, -1e30])
def test_huge_log_ratios_stay_finite(surrogate: str, level: str, clips: Any, unit: str, gap: float) -> None:
    """In float32, in both directions, advantages of both signs. Seen failing without the bound on the exponent."""
    case = make_case()
    given = {name: values.astype(np.float32) for name, values in numbers(case).items()}
    given["proximal"] = (given["current"] - np.float32(gap)).astype(np.float32)
    bounds = {"clip_low": clips[0], "clip_high": clips[1], "clip_unit": unit}
    loss, gradient, _ = run(case, given, surrogate=surrogate, ratio_level=level, **bounds)
    assert np.isfinite(loss)
    assert np.isfinite(gradient).all()


def derive_kl(d: np.ndarray, estimator: str) -> tuple[np.ndarray, np.ndarray]:
    """Value and slope of an estimator by its d."""
    return {"k1": (d, d * 0 + 1), "k2": (d * d / 2, d), "k3": (np.exp(-d) - 1 + d, 1 - np.exp(-d))}[estimator]


@pytest.mark.parametrize("direction", ["to_other", "from_other"])
@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_kl_penalty_against_numpy(estimator: Any, direction: Any) -> None:
    """to_other: d = current - other; from_other: d = other - current, so that k3 is r - 1 - log r.

    Seen failing with the directions exchanged, without the behaviour weight, with the sign of d turned in k3, and
    without the half in k2.
    """
    case = make_case()
    given = numbers(case)
    hidden = ~case.mask | (given["weights"] == 0)
    current = tensor(np.where(hidden, np.resize(JUNK, len(hidden)), case.current)).clone().requires_grad_()
    penalty = kl_penalty(
        current,
        other_logprobs_T=tensor(np.where(hidden, np.resize(JUNK[::-1], len(hidden)), case.reference)),
        behaviour_weights_T=tensor(given["weights"]),
        loss_mask_T=tensor(case.mask),
        token_weights_T=tensor(given["token_weights"]),
        estimator=estimator,
        direction=direction,
    )
    penalty.backward()
    sign = 1 if direction == "to_other" else -1
    value, slope = derive_kl(sign * (case.current - case.reference), estimator)
    scale = np.where(hidden, 0.0, given["weights"] * given["token_weights"])
    assert float(penalty.detach()) == pytest.approx(float((scale * value).sum()))
    np.testing.assert_allclose(current.grad, sign * scale * slope, atol=1e-12)


def test_entropy_bonus_against_numpy() -> None:
    case = make_case()
    given = numbers(case)
    entropies = np.random.default_rng(0).uniform(0, 2, len(case.mask))
    leaf = tensor(np.where(case.mask, entropies, NAN)).clone().requires_grad_()
    bonus = entropy_bonus(leaf, loss_mask_T=tensor(case.mask), token_weights_T=tensor(given["token_weights"]))
    bonus.backward()
    scale = np.where(case.mask, given["token_weights"], 0.0)
    assert float(bonus.detach()) == pytest.approx(float((scale * entropies).sum()))
    np.testing.assert_allclose(leaf.grad, scale)


@pytest.mark.parametrize("clip", [None, 0.2, 1.0])
def test_value_loss_against_numpy(clip: float | None) -> None:
    """By cases: within the clip the slope is v - t; outside, the held value is old +- clip, and where its error is the
    larger one it counts, with slope 0.

    Seen failing with min for max, without the 0.5, and with the clip around the target.
    """
    case = make_case()
    rng = np.random.default_rng(3)
    values, old, targets = rng.normal(0, 1, (3, len(case.mask)))
    token_weights = numbers(case)["token_weights"]
    loss, gradient, num_clipped = 0.0, np.zeros(len(case.mask)), 0
    for t in np.flatnonzero(case.mask):
        error, slope = (values[t] - targets[t]) ** 2, values[t] - targets[t]
        if clip is not None and abs(values[t] - old[t]) > clip:
            held = old[t] + np.sign(values[t] - old[t]) * clip
            if (held - targets[t]) ** 2 > error:
                error, slope, num_clipped = (held - targets[t]) ** 2, 0.0, num_clipped + 1
        loss += 0.5 * token_weights[t] * error
        gradient[t] = token_weights[t] * slope
    junk = np.resize(JUNK, len(case.mask))
    leaf = tensor(np.where(case.mask, values, junk)).clone().requires_grad_()
    got = value_loss(
        leaf,
        old_values_T=tensor(np.where(case.mask, old, junk)),
        targets_T=tensor(np.where(case.mask, targets, junk)),
        loss_mask_T=tensor(case.mask),
        token_weights_T=tensor(np.where(case.mask, token_weights, junk)),
        clip=clip,
    )
    got.backward()
    assert float(got.detach()) == pytest.approx(loss)
    np.testing.assert_allclose(leaf.grad, gradient, atol=1e-12)
    assert (num_clipped > 0) == (clip is not None)


# --- KL estimators far from the reference, and the adaptive coefficient ---


@pytest.mark.parametrize("gap", [-20.5, -25.0, -1e4, -np.inf])
def test_k3_pulls_a_lost_token_back(gap: float) -> None:
    """The truth's slope 1 - exp(-d) is below -4.8e8 there.

    Seen failing with the exponent bounded alone: slope +1; and without a bound on it.
    """
    leaf = torch.tensor([gap], dtype=torch.float64, requires_grad=True)
    estimate = kl_estimate(leaf, reference_logprobs_T=torch.zeros(1, dtype=torch.float64), estimator="k3")
    estimate.sum().backward()
    assert leaf.grad is not None
    assert float(leaf.grad) == pytest.approx(1 - np.exp(20))
    # On from the value at -20.
    assert float(estimate.detach()) == pytest.approx(np.expm1(20) - 20 + np.expm1(20) * (-gap - 20))


@pytest.mark.parametrize(
    ("measured", "expected"),
    [
        *[(0.0, 0.5), (0.1, 0.5), (0.133, 0.5), (0.134, 1.0), (0.2, 1.0), (0.3, 1.0), (0.301, 2.0), (9.0, 2.0)],
        *[(-1.0, 0.5), (NAN, 1.0)],
    ],
)
def test_adaptive_coefficient_by_the_rule(measured: float, expected: float) -> None:
    """Target 0.2: halved below 0.1333, doubled above 0.3; an unknown divergence leaves it. Seen failing with the two
    exchanged."""
    assert adapt_coefficient(1.0, measured=measured, target=0.2) == expected
