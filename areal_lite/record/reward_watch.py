"""Whether a policy is gaming the reward that it trains on: it earns more of that, and less of one that is only watched.

Gao et al. (arXiv 2210.10760) measured this for learned rewards: the further a policy is pushed, the lower the true one.
"""

from collections.abc import Mapping
from statistics import fmean
from typing import Any, NamedTuple

from areal_lite.record.intervals import Paired, paired
from areal_lite.record.run_files import numbers, table

WATCHED = "watch/"
"""Begins the names of the metrics that hold the rewards of `reward_watch`."""

Row = Mapping[str, Any]


class Alarm(NamedTuple):
    """What an evaluation and the one before it found, compared with the best evaluation of the watched reward."""

    verifier: str
    best_step: int
    before: int
    """Step of the evaluation before."""
    step: int
    trained: Paired
    """Change of the trained reward since the best step."""
    watched: Paired
    """Change of the watched one."""

    def __str__(self) -> str:
        changes = [f"{one.difference:+.3f} ({one.low:+.3f} to {one.high:+.3f})" for one in (self.trained, self.watched)]
        return (
            f"the policy may be gaming its reward: since step {self.best_step}, held-out trained reward "
            f"{changes[0]} and watched {self.verifier} {changes[1]}, 95 % intervals, at steps {self.before} and "
            f"{self.step}. Fix: use a checkpoint near step {self.best_step}; raise objective.kl_coef, or improve the "
            "reward"
        )


def alarm(evaluations: Mapping[int, Row]) -> Alarm | None:
    """Return what the last two evaluations both show of the same watched reward, if anything.

    An evaluation shows it where, since the earlier evaluation with the highest mean watched reward, trained rewards
    have risen and watched ones fallen, each by more than the 95 % interval of the mean difference of the same rows. Two
    in a row are asked for because the best of many noisy means is too high.

    Args:
        evaluations: By completed steps; each with `rewards`, the trained ones by held-out row (None = failed), and
            `watched`, the same by verifier. Others are left out.
    """
    known = {step: found for step, found in sorted(evaluations.items()) if table(found.get("watched"))}
    if len(known) < 3:
        return None
    *_, before, last = known
    for name in known[last]["watched"]:
        first, second = (_shown(known, name, step) for step in (before, last))
        if first is not None and second is not None:
            best_step, trained, watched = second
            return Alarm(name, best_step, before, last, trained, watched)
    return None


def _shown(evaluations: Mapping[int, Row], name: str, step: int) -> tuple[int, Paired, Paired] | None:
    """Return the best step before this one and both changes since, where the trained reward rose and this one fell."""
    watched = {at: numbers(found["watched"].get(name)) for at, found in evaluations.items()}
    means = {at: fmean(values.values()) for at, values in watched.items() if at < step and values}
    if not means:
        return None
    best = max(means, key=lambda at: means[at])
    rewards = [numbers(evaluations[at].get("rewards")) for at in (best, step)]
    rise, fall = paired(*rewards), paired(watched[best], watched[step])
    if rise is None or fall is None or not rise.low > 0 > fall.high:
        return None
    return best, rise, fall


def by_verifier(metrics: Mapping[str, Mapping[str, float]]) -> dict[str, dict[str, float]]:
    """Return the watched rewards among the metrics of rows, by verifier and row.

    >>> by_verifier({"a/0": {"watch/truth": 1.0, "turns": 2.0}, "a/1": {}})
    {'truth': {'a/0': 1.0}}
    """
    found: dict[str, dict[str, float]] = {}
    for row, figures in metrics.items():
        for name, value in figures.items():
            if name.startswith(WATCHED):
                found.setdefault(name.removeprefix(WATCHED), {})[row] = value
    return found
