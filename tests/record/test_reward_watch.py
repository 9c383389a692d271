"""When a watched reward falls while the trained one rises."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_lite.record.reward_watch import alarm

ROWS = 10


def evaluation(trained: Any, watched: Any, *, names: Any = range(ROWS)) -> dict[str, Any]:
    of_row = [dict(zip(map(str, names), map(float, values), strict=True)) for values in (trained, watched)]
    return {"rewards": of_row[0], "watched": {"truth": of_row[1]}}


BEST = evaluation([0] * ROWS, [1] * ROWS)
GAMED = evaluation([1, 3] * 5, [1, 0] * 5)


def test_an_alarm_names_the_steps_and_both_changes() -> None:
    """Trained changes 1 and 3, watched 0 and -1, five times each: standard errors 1/3 and 1/6 (stdev over root 10).

    Seen failing with the step of the first evaluation that showed it.
    """
    found = alarm({0: evaluation([-1] * ROWS, [0] * ROWS), 10: BEST, 20: GAMED, 30: GAMED})
    assert found is not None
    assert (found.verifier, found.best_step, found.before, found.step) == ("truth", 10, 20, 30)
    assert found.trained == (10, 2.0, pytest.approx(2 - 1.96 / 3), pytest.approx(2 + 1.96 / 3), 10, 0)
    assert found.watched == (10, -0.5, pytest.approx(-0.5 - 1.96 / 6), pytest.approx(-0.5 + 1.96 / 6), 0, 5)
    assert str(found) == (
        "the policy may be gaming its reward: since step 10, held-out trained reward +2.000 (+1.347 to +2.653) and "
        "watched truth -0.500 (-0.827 to -0.173), 95 % intervals, at steps 20 and 30. Fix: use a checkpoint near step "
        "10; raise objective.kl_coef, or improve the reward"
    )


@pytest.mark.parametrize(
    "evaluations",
    [
        [],
        [BEST, GAMED],  # once
        [BEST, GAMED, BEST],
        [GAMED, BEST, GAMED],  # the first one is no fall
        [BEST, evaluation([-1] * ROWS, [0] * ROWS), evaluation([-1] * ROWS, [0] * ROWS)],  # both fall
        [BEST, *[evaluation([1] * ROWS, [1] * 9 + [0])] * 2],  # one row of ten: it may be chance
        [BEST, *[evaluation([1] * 5 + [-1] * 5, [0] * ROWS)] * 2],  # trained reward has not risen
        [BEST, *[evaluation([9] * ROWS, [0] * ROWS, names=range(50, 60))] * 2],  # other rows
        [{"rewards": {"0": 0.0}, "watched": {}}] * 3,
        [evaluation([n], [-n], names=[0]) for n in range(3)],  # one row has no interval
    ],
)
def test_what_is_no_alarm(evaluations: list[dict[str, Any]]) -> None:
    """Seen failing with one evaluation, and with the fall alone."""
    assert alarm(dict(enumerate(evaluations))) is None


@given(st.integers(0, 2**32 - 1), st.integers(1, 6))
def test_it_agrees_with_arrays(seed: int, count: int) -> None:
    """Of drifting rewards, computed with numpy from matrices; the order of rows means nothing.

    Seen failing with the last evaluation as the best.
    """
    rng = np.random.default_rng(seed)
    drift = np.arange(count)[:, None]
    trained, watched = rng.normal(0.4 * drift, 1, (count, ROWS)), rng.normal(-0.4 * drift, 1, (count, ROWS))

    def shown(k: int) -> bool:
        if k < 1:
            return False
        best = watched[:k].mean(1).argmax()
        rise, fall = trained[k] - trained[best], watched[best] - watched[k]
        return all(one.mean() > 1.96 * one.std(ddof=1) / np.sqrt(ROWS) for one in (rise, fall))

    def shuffled(k: int) -> dict[str, Any]:
        order = rng.permutation(ROWS)
        return evaluation(trained[k][order], watched[k][order], names=order)

    found = alarm({k: shuffled(k) for k in range(count)})
    assert (found is not None) == (shown(count - 1) and shown(count - 2))
