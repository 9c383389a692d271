"""A seeded, resumable iterator over training prompts: a shuffle per epoch, and a curriculum within it.

With several sources (`data.mix`) each has its own, and gets its share of the prompts at any time.

With `data.curriculum`, prompts that are neither too easy nor too hard for the current policy come first. A prompt's
pass rate p is observed whenever one of its groups is scored. Its variance p (1 - p) is largest at 1/2, where samples
differ and a group can teach something. An unseen prompt counts as 1/2.
"""

import dataclasses
import json
import random
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

from areal_lite.config.data import CHAT
from areal_lite.config.recipe import Config
from areal_lite.errors import CheckpointError, DataError
from areal_lite.types import Prompt

_CANDIDATES = 8
"""Prompts that a curriculum compares for each pick."""
_MEMORY = 0.5
"""Weight of the past in a prompt's observed pass rate."""
_PATIENCE = 4 * _CANDIDATES
"""How often a prompt is passed over before it counts as unseen. The policy has changed by then, and prompts that are
always solved, or never, cost at most a quarter of what a plain shuffle gives them."""


class PromptCursor:
    """Endless iteration over prompts: each epoch gives every prompt once, in an order of its own.

    A curriculum picks, for a share `strength` of the prompts, the best of the next few of the shuffle. The others of
    these are passed over until the next epoch: it gives a prompt at most once, but not every prompt. None starves:
    having been passed over `_PATIENCE` times it counts as unseen, and among equals the one passed over
    most goes first.
    """

    def __init__(self, prompts: Sequence[Prompt], *, source: str, seed: int, strength: float = 0.0) -> None:
        """Start before the first prompt of epoch 0, without observations.

        Args:
            prompts: At least one, else a `DataError`.
            source: First part of every prompt id, `source/epoch/index`; without a slash.
            seed: Of the shuffles, and of the draws between curriculum and plain shuffle.
            strength: Share of the prompts that the curriculum picks, 0..1; 0 = the plain shuffle.
        """
        if not prompts:
            raise DataError(f"the cursor over {source!r} needs at least one prompt, got none: check the data source")
        self._prompts, self._seed = prompts, seed
        rows = (json.dumps(prompt.row, sort_keys=True, default=str) for prompt in prompts)
        # Not the text of a chat, into which its template may write the date.
        texts = ("" if CHAT in prompt.row else prompt.text for prompt in prompts)
        contents = (f"{text}\0{prompt.answer}\0{row}" for text, prompt, row in zip(texts, prompts, rows, strict=True))
        self._strength = strength
        self._identity = {
            "source": source,
            "seed": seed,
            "num_prompts": len(prompts),
            "checksum": zlib.crc32("\0".join(contents).encode(errors="surrogatepass")),
        }
        self._epoch = self._position = self._num_given = 0
        self._order = self._shuffled()
        self._rates: dict[int, float] = {}
        """Observed pass rate, by the prompt's index."""
        self._passed_over: dict[int, int] = {}
        """Times since a prompt was given out last, where any, by its index."""

    def next(self) -> Prompt:
        """Return the next prompt: picked, or simply the next of the shuffle; after the last one a new epoch begins."""
        if self._strength == 0:
            return self._prompt(*self._step())
        # A text seed for each draw needs no generator's state to be saved.
        draw = random.Random(f"{self._seed}/curriculum/{self._num_given}").random()
        self._num_given += 1
        num_candidates = _CANDIDATES if draw < self._strength else 1
        candidates = [self._step() for _ in range(num_candidates)]
        chosen = min(candidates, key=lambda candidate: self._rank(candidate[1]))
        for _, index in candidates:
            self._passed_over[index] = self._passed_over.get(index, 0) + 1
        self._passed_over.pop(chosen[1])
        return self._prompt(*chosen)

    def get(self, prompt_id: str) -> Prompt:
        """Return the prompt of an id given out before, by this run or the one it continues."""
        _, epoch, index = prompt_id.split("/")
        return self._prompt(int(epoch), int(index))

    def observe(self, prompt_id: str, pass_rate: float) -> None:
        """Take the result of one group, 0..1, of a prompt given out before; the plain shuffle depends on none."""
        if self._strength > 0:
            index = int(prompt_id.rpartition("/")[2])
            before = self._rates.get(index, pass_rate)
            self._rates[index] = _MEMORY * before + (1 - _MEMORY) * pass_rate

    def state(self) -> dict[str, Any]:
        """Return what `load` needs, as plain numbers, texts and lists."""
        place = {**self._identity, "epoch": self._epoch, "position": self._position}
        if self._strength == 0:
            return place
        observed = {"rates": self._rates.items(), "passed_over": self._passed_over.items()}
        lists = {name: [list(pair) for pair in pairs] for name, pairs in observed.items()}
        return {**place, "curriculum": {"num_given": self._num_given, **lists}}

    def load(self, state: Mapping[str, Any]) -> None:
        """Continue where `state` was taken; a `CheckpointError` where it belongs to other prompts or another seed."""
        different = [name for name, value in self._identity.items() if state.get(name) != value]
        if different:
            raise CheckpointError(
                "the checkpoint's data cursor belongs to other data: "
                + ", ".join(f"{name} was {state.get(name)!r} and is {self._identity[name]!r}" for name in different)
                + ". Resume with the data (random rows need a seed), run.seed and areal-lite of the first run"
            )
        self._epoch, self._position = int(state["epoch"]), int(state["position"])
        self._order = self._shuffled()
        saved = state.get("curriculum", {})
        self._num_given = saved.get("num_given", 0)
        self._rates, self._passed_over = dict(saved.get("rates", [])), dict(saved.get("passed_over", []))

    def _step(self) -> tuple[int, int]:
        """Return epoch and index of the next prompt of the shuffle."""
        if self._position == len(self._order):
            self._epoch, self._position = self._epoch + 1, 0
            self._order = self._shuffled()
        self._position += 1
        return self._epoch, self._order[self._position - 1]

    def _rank(self, index: int) -> tuple[float, int]:
        """Return what the best candidate has least of; of equals the first in the shuffle is chosen."""
        passed_over = self._passed_over.get(index, 0)
        is_unseen = index not in self._rates or passed_over >= _PATIENCE
        return (0.0 if is_unseen else abs(self._rates[index] - 0.5), -passed_over)

    def _shuffled(self) -> list[int]:
        order = list(range(len(self._prompts)))
        # A text seed is hashed with SHA-512: the same order on every machine and Python version.
        random.Random(f"{self._seed}/{self._epoch}").shuffle(order)
        return order

    def _prompt(self, epoch: int, index: int) -> Prompt:
        prompt_id = f"{self._identity['source']}/{epoch}/{index}"
        return dataclasses.replace(self._prompts[index], prompt_id=prompt_id)


class MixedCursor:
    """Takes the next prompt from the source that lags most behind its share.

    Not drawn by lot: in every stretch of the run, a batch among them, each source then has its share to within about
    one prompt, so that batches do not differ by chance in what they are about, and a source of small weight is never
    missing for long. It takes no state but the counts.
    """

    def __init__(self, cursors: Mapping[str, PromptCursor], *, weights: Mapping[str, float]) -> None:
        """Start before the first prompt of every source: names begin their prompts' ids, weights are above 0."""
        self._cursors, self._weights = cursors, weights
        self._num_given = dict.fromkeys(cursors, 0)

    def next(self) -> Prompt:
        """Return the next prompt; the recipe's order breaks ties between sources."""
        total_weight, number = sum(self._weights.values()), sum(self._num_given.values()) + 1
        name = max(self._cursors, key=lambda name: self._weights[name] * number / total_weight - self._num_given[name])
        self._num_given[name] += 1
        return self._cursors[name].next()

    def get(self, prompt_id: str) -> Prompt:
        """Return the prompt of an id given out before, by this run or the one it continues."""
        return self._source_of(prompt_id).get(prompt_id)

    def observe(self, prompt_id: str, pass_rate: float) -> None:
        """Pass the result of one group, 0..1, to the prompt's source."""
        self._source_of(prompt_id).observe(prompt_id, pass_rate)

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

    def _source_of(self, prompt_id: str) -> PromptCursor:
        return self._cursors[prompt_id.partition("/")[0]]


Cursor = PromptCursor | MixedCursor
"""Where prompts come from: endless, seeded, resumable."""


def make_cursor(config: Config, prompts: Mapping[str, Sequence[Prompt]]) -> Cursor:
    """Build the iterator over the training prompts (by source) that a recipe asks for."""
    seed, strength = config.run.seed, config.data.curriculum
    cursors = {
        name: PromptCursor(of_source, source=name, seed=seed, strength=strength) for name, of_source in prompts.items()
    }
    if not config.data.mix:
        return next(iter(cursors.values()))
    return MixedCursor(cursors, weights={name: source.weight for name, source in config.data.mix.items()})
