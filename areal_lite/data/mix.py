"""Several sources of prompts as one, each with its own epochs and shuffles, in exact shares."""

from collections.abc import Mapping, Sequence
from typing import Any

from areal_lite.config.recipe import Config
from areal_lite.data.cursor import PromptCursor
from areal_lite.errors import CheckpointError, DataError
from areal_lite.types import Prompt


class MixedCursor:
    """Takes the next prompt from the source that is furthest behind its share.

    Not drawn by lot: in every stretch of the run, a batch among them, each source then has its share to within about
    one prompt, so that batches do not differ by chance in what they are about, and a source of small weight is never
    missing for long. It takes no state but the counts.
    """

    def __init__(self, cursors: Mapping[str, PromptCursor], *, weights: Mapping[str, float]) -> None:
        """Start before the first prompt of every source: names begin their prompts' ids, weights are above 0."""
        self._cursors, self._weights = cursors, weights
        self._num_given = dict.fromkeys(cursors, 0)

    def next(self) -> Prompt:
        """Return the next prompt; of sources equally far behind the first in the recipe gives it."""
        total_weight, number = sum(self._weights.values()), sum(self._num_given.values()) + 1
        name = max(self._cursors, key=lambda name: self._weights[name] * number / total_weight - self._num_given[name])
        self._num_given[name] += 1
        return self._cursors[name].next()

    def get(self, prompt_id: str) -> Prompt:
        """Return the prompt of an id given out before, by this run or the one it continues; `DataError` for others."""
        return self._find(prompt_id).get(prompt_id)

    def observe(self, prompt_id: str, pass_rate: float) -> None:
        """Tell the prompt's source how a group of it was scored, 0..1."""
        self._find(prompt_id).observe(prompt_id, pass_rate)

    def state(self) -> dict[str, Any]:
        """Return what `load` needs, as plain numbers, texts, lists and mappings."""
        return {
            "weights": dict(self._weights),
            "num_given": dict(self._num_given),
            "sources": {name: cursor.state() for name, cursor in self._cursors.items()},
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Continue where `state` was taken; a `CheckpointError` where sources, prompts, weights or the seed differ."""
        if (saved := state.get("weights", "none: it is of one source")) != self._weights:
            raise CheckpointError(
                f"the checkpoint's data cursor must be of this data.mix, of the weights {dict(self._weights)}, its "
                f"own are {saved}: resume with the sources and weights of the first run"
            )
        for name, cursor in self._cursors.items():
            try:
                cursor.load(state["sources"][name])
            except CheckpointError as error:
                raise CheckpointError(f"data.mix.{name}: {error}") from error
        self._num_given = {name: int(state["num_given"][name]) for name in self._cursors}

    def _find(self, prompt_id: str) -> PromptCursor:
        name = prompt_id.partition("/")[0]
        if name not in self._cursors:
            raise DataError(
                f"a prompt id begins with the name of its source, one of {', '.join(self._cursors)}, got "
                f"{prompt_id!r}: it belongs to another recipe"
            )
        return self._cursors[name]


def make_cursor(config: Config, prompts: Mapping[str, Sequence[Prompt]]) -> PromptCursor | MixedCursor:
    """Build the walk over the training prompts, given by the source's name, that a recipe asks for."""
    seed, curriculum = config.run.seed, config.data.curriculum
    cursors = {
        name: PromptCursor(of_source, source=name, seed=seed, curriculum=curriculum)
        for name, of_source in prompts.items()
    }
    if not config.data.mix:
        return next(iter(cursors.values()))
    return MixedCursor(cursors, weights={name: source.weight for name, source in config.data.mix.items()})
