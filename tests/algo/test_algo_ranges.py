"""Numbers out of the range that a docstring of `algo` gives are refused, not computed with."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from areal_lite.algo.advantages import gae, returns_to_go
from areal_lite.algo.aggregation import aggregate
from areal_lite.algo.losses import policy_loss, value_loss

ONE, MASK, ROWS, LENGTHS = torch.ones(1), torch.tensor([True]), torch.tensor([0]), torch.tensor([1])


def policy(**settings: Any) -> None:
    values = {name: ONE for name in ("proximal_logprobs_T", "behaviour_weights_T", "advantages_T", "token_weights_T")}
    how: dict[str, Any] = {"surrogate": "ratio", "ratio_level": "token", "clip_low": None, "clip_high": None}
    policy_loss(ONE, **values, loss_mask_T=MASK, rows_T=ROWS, num_rows=1, **how | settings)


def value(**settings: Any) -> None:
    value_loss(ONE, old_values_T=ONE, targets_T=ONE, loss_mask_T=MASK, token_weights_T=ONE, **settings)


def advantages(**settings: Any) -> None:
    gae(ONE, values_T=ONE, lengths_B=LENGTHS, **{"gamma": 1.0, "gae_lambda": 1.0} | settings)


def to_go(**settings: Any) -> None:
    returns_to_go(ONE, lengths_B=LENGTHS, **settings)


def weights(**settings: Any) -> None:
    aggregate(MASK, rows_T=ROWS, num_rows=1, kind="constant", **settings)


@pytest.mark.parametrize(
    ("function", "name", "good", "bad"),
    [
        (policy, "clip_low", [None, 0.0, 1.0], [-0.1, 1.1, float("nan")]),
        (policy, "clip_high", [None, 0.0, 5.0], [-0.1, float("nan")]),
        (policy, "clip_dual", [None, 1.1], [1.0, 0.0, float("nan")]),
        (policy, "soft_positive", [0.1], [0.0, -1.0, float("nan")]),
        (policy, "soft_negative", [0.1], [0.0, -1.0, float("nan")]),
        (value, "clip", [None, 0.1], [0.0, -0.1, float("nan")]),
        (advantages, "gamma", [0.0, 1.0], [-0.1, 1.1, float("nan")]),
        (advantages, "gae_lambda", [0.0, 1.0], [-0.1, 1.1, float("nan")]),
        (to_go, "gamma", [0.0, 1.0], [-0.1, 1.1]),
        (weights, "max_new_tokens", [1], [0, -1]),
    ],
)
def test_ranges(function: Callable[..., None], name: str, good: list[Any], bad: list[Any]) -> None:
    """Seen failing without each of the checks."""
    for number in good:
        function(**{name: number})
    for number in bad:
        with pytest.raises(ValueError, match=rf"expected .*{name}.* got "):
            function(**{name: number})
