"""A walk over the prompts that prefers those which are neither too easy nor too hard for the policy as it is.

Called like `PromptCursor`, around which it is built; `data.curriculum` says how much. A prompt's pass rate p is
observed whenever a group of it is scored, and its variance p (1 - p) is largest at 1/2: that is where samples differ,
and a group can teach something. What nobody has seen counts as 1/2.
"""

import random
from collections.abc import Mapping
from typing import Any

from areal_lite.config.sections import CurriculumConfig
from areal_lite.data.cursor import PromptCursor
from areal_lite.types import Prompt

__all__ = ["CurriculumCursor"]

_PATIENCE = 4
"""Times `candidates`: how often a prompt is passed over before it counts as unseen. The policy has changed by then, and
prompts that are always solved, or never, cost at most a share of 1 / `_PATIENCE` of what a plain shuffle gives them."""


class CurriculumCursor:
    """Gives out, for a share `strength` of the prompts, the best of the next few of the shuffle.

    The others of these are passed over until the next epoch. So an epoch still gives a prompt at most once, but not
    every prompt. None starves: having been passed over `_PATIENCE * candidates` times it counts as unseen, and among
    equals the one passed over most goes first.
    """

    def __init__(self, cursor: PromptCursor, *, settings: CurriculumConfig, seed: int) -> None:
        """Start without observations.

        Args:
            cursor: The shuffle, at its beginning.
            settings: With a strength above 0.
            seed: Of the draws that say which prompts are picked.
        """
        self._cursor, self._settings, self._seed = cursor, settings, seed
        self._num_given = 0
        self._rates: dict[int, float] = {}
        """Observed pass rate, by the prompt's index."""
        self._passed_over: dict[int, int] = {}
        """Times since a prompt was given out last, where any, by its index."""

    def next(self) -> Prompt:
        """Return the next prompt: picked, or simply the next of the shuffle."""
        # A text seed for each draw needs no generator's state to be saved.
        draw = random.Random(f"{self._seed}/curriculum/{self._num_given}").random()
        self._num_given += 1
        num_candidates = self._settings.candidates if draw < self._settings.strength else 1
        candidates = [self._cursor.next() for _ in range(num_candidates)]
        chosen = min(candidates, key=self._rank)
        for prompt in candidates:
            index = _index(prompt.prompt_id)
            self._passed_over[index] = self._passed_over.get(index, 0) + 1
        self._passed_over.pop(_index(chosen.prompt_id))
        return chosen

    def observe(self, prompt_id: str, pass_rate: float) -> None:
        """Take the result of one group.

        Args:
            prompt_id: Given out before, in this run or the one it continues.
            pass_rate: 0..1; the past counts with weight `memory`.
        """
        index, memory = _index(prompt_id), self._settings.memory
        before = self._rates.get(index, pass_rate)
        self._rates[index] = memory * before + (1 - memory) * pass_rate

    def get(self, prompt_id: str) -> Prompt:
        """Return the prompt of an id given out before, in this run or the one it continues."""
        return self._cursor.get(prompt_id)

    def state(self) -> dict[str, Any]:
        """Return what `load` needs, as plain numbers, texts and lists."""
        return {
            **self._cursor.state(),
            "curriculum": {
                "num_given": self._num_given,
                "rates": [[index, rate] for index, rate in self._rates.items()],
                "passed_over": [[index, count] for index, count in self._passed_over.items()],
            },
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Continue where `state` was taken; without observations where it is a plain cursor's.

        Raises:
            CheckpointError: The state belongs to other prompts, or to another seed.
        """
        self._cursor.load(state)
        saved = state.get("curriculum", {})
        self._num_given = saved.get("num_given", 0)
        self._rates = dict(map(tuple, saved.get("rates", [])))
        self._passed_over = dict(map(tuple, saved.get("passed_over", [])))

    def _rank(self, prompt: Prompt) -> tuple[float, int]:
        """Return what the best candidate has least of; of equals the first in the shuffle is chosen."""
        index = _index(prompt.prompt_id)
        passed_over = self._passed_over.get(index, 0)
        is_unseen = index not in self._rates or passed_over >= _PATIENCE * self._settings.candidates
        return (0.0 if is_unseen else abs(self._rates[index] - 0.5), -passed_over)


def _index(prompt_id: str) -> int:
    return int(prompt_id.rpartition("/")[2])
