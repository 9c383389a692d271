"""The weights of the KL terms, which may follow a measured KL. The trainer keeps them; a checkpoint carries them on."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace

from areal_lite.algo.kl import adapt_coefficient
from areal_lite.config.presets import ObjectiveConfig

__all__ = ["Coefficients"]

_FURTHEST = 100.0
"""An adaptive coefficient stays within this factor of the recipe's: the distance to a reference starts at 0, and a
coefficient halved at every step until it grows would take as many steps to come back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Coefficients:
    """The weights of one trainer step."""

    kl: float
    """Of the KL to the reference."""
    proximal_kl: float
    """Of KL(proximal || current)."""

    @classmethod
    def first(cls, objective: ObjectiveConfig) -> "Coefficients":
        """Return those of the recipe."""
        return cls(kl=objective.kl_coef, proximal_kl=objective.proximal_kl_coef)

    def adapted(self, objective: ObjectiveConfig, *, kl: float | None, proximal_kl: float | None) -> "Coefficients":
        """Return those of the next step: a coefficient with a target follows what was measured, if anything was.

        Args:
            objective: Its `kl_target` and `proximal_kl_target`.
            kl: Mean KL to the reference, in nats per token.
            proximal_kl: Mean KL(proximal || current) after the step, in nats per token.
        """
        return replace(
            self,
            kl=_adapted(self.kl, first=objective.kl_coef, measured=kl, target=objective.kl_target),
            proximal_kl=_adapted(
                self.proximal_kl,
                first=objective.proximal_kl_coef,
                measured=proximal_kl,
                target=objective.proximal_kl_target,
            ),
        )

    def state(self) -> dict[str, float]:
        """Return plain values for a checkpoint."""
        return asdict(self)

    @classmethod
    def restored(cls, objective: ObjectiveConfig, state: Mapping[str, float]) -> "Coefficients":
        """Return the saved ones where they follow a target, and the recipe's where they are fixed."""
        fixed = Coefficients.first(objective)
        return cls(
            kl=fixed.kl if objective.kl_target is None else state.get("kl", fixed.kl),
            proximal_kl=fixed.proximal_kl
            if objective.proximal_kl_target is None
            else state.get("proximal_kl", fixed.proximal_kl),
        )


def _adapted(coefficient: float, *, first: float, measured: float | None, target: float | None) -> float:
    if measured is None or target is None:
        return coefficient
    moved = adapt_coefficient(coefficient, measured=measured, target=target)
    return min(max(moved, first / _FURTHEST), first * _FURTHEST)
