"""Cases for the tests of objectives: rows of a batch in the flat order, in numpy."""

from dataclasses import dataclass, replace

import numpy as np
import torch

MAX_NEW_TOKENS = 8


@dataclass(frozen=True, kw_only=True)
class Case:
    """N groups of G samples, row i = sample i % G of group i // G; per-token arrays are flat over the rows."""

    rewards: np.ndarray
    """[N, G]."""
    lengths: np.ndarray
    """[B]."""
    truncated: np.ndarray
    """[B] booleans."""
    mask: np.ndarray
    """[T] booleans: young tokens of scored samples."""
    current: np.ndarray
    proximal: np.ndarray
    behaviour: np.ndarray
    reference: np.ndarray
    values: np.ndarray

    @property
    def rows(self) -> np.ndarray:
        """[T] the row of each token."""
        return np.repeat(np.arange(len(self.lengths)), self.lengths)

    def change(self, **changes: np.ndarray) -> "Case":
        return replace(self, **changes)


def make_case(seed: int = 0) -> Case:
    """Draw rows of 1..8 tokens; the policies differ enough for every clip and cap to bite somewhere."""
    rng, num_rows = np.random.default_rng(seed), 3 * 4
    lengths = rng.integers(1, MAX_NEW_TOKENS + 1, num_rows)
    lengths[0] = MAX_NEW_TOKENS
    rewards = rng.normal(0, 1, (3, 4)).round(2)
    rewards[0, 1] = np.nan
    num_tokens = int(lengths.sum())
    proximal = rng.uniform(-3, -0.5, num_tokens)
    young = rng.random(num_tokens) < 0.85
    return Case(
        rewards=rewards,
        lengths=lengths,
        truncated=lengths == MAX_NEW_TOKENS,
        mask=young & ~np.isnan(np.repeat(rewards.reshape(-1), lengths)),
        # Whole rows moved too, so that ratios of sequences leave their clips.
        current=proximal + rng.normal(0, 0.4, num_tokens) + np.repeat(rng.normal(0, 0.3, num_rows), lengths),
        proximal=proximal,
        behaviour=proximal + rng.normal(0, 0.9, num_tokens),
        reference=proximal + rng.normal(0, 0.5, num_tokens),
        values=rng.normal(0, 1, num_tokens),
    )


def tensor(array: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(array))
