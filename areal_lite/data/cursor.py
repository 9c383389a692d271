"""The seeded, resumable walk over the training prompts that feeds the sample queue.

Called by the queue server, from its one thread. Every epoch is a new shuffle; a prompt's id is
`source/epoch/index`, so that it can be found again after a resume. Holds prompts, never groups.
"""

import dataclasses
import json
import random
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

from areal_lite.errors import CheckpointError, DataError
from areal_lite.types import Prompt

__all__ = ["PromptCursor"]


class PromptCursor:
    """Endless iteration over prompts: each epoch gives every prompt once, in an order of its own."""

    def __init__(self, prompts: Sequence[Prompt], *, source: str, seed: int) -> None:
        """Start before the first prompt of epoch 0.

        Args:
            prompts: At least one.
            source: First part of every prompt id, without a slash.
            seed: Seed of the shuffles.

        Raises:
            DataError: There are no prompts.
        """
        if not prompts:
            raise DataError(f"the cursor over {source!r} needs at least one prompt, got none: check the data source")
        self._prompts = prompts
        self._seed = seed
        self._identity = {
            "source": source,
            "seed": seed,
            "num_prompts": len(prompts),
            "checksum": zlib.crc32("\0".join(map(_content, prompts)).encode(errors="surrogatepass")),
        }
        self._epoch = 0
        self._position = 0
        self._order = self._shuffled()

    def next(self) -> Prompt:
        """Return the next prompt; after the last one a new epoch begins."""
        if self._position == len(self._order):
            self._epoch, self._position = self._epoch + 1, 0
            self._order = self._shuffled()
        index = self._order[self._position]
        self._position += 1
        return self._prompt(self._epoch, index)

    def get(self, prompt_id: str) -> Prompt:
        """Return the prompt of an id given out before, in this run or the one it continues.

        Raises:
            DataError: The id is not one of this source.
        """
        source, _, rest = prompt_id.partition("/")
        epoch, _, index = rest.partition("/")
        known = source == self._identity["source"] and epoch.isdecimal() and index.isdecimal()
        if not known or int(index) >= len(self._prompts):
            raise DataError(
                f"a prompt id is {self._identity['source']}/<epoch>/<index below {len(self._prompts)}>, "
                f"got {prompt_id!r}: it belongs to another data source"
            )
        return self._prompt(int(epoch), int(index))

    def observe(self, prompt_id: str, pass_rate: float) -> None:
        """Take the result of one group: the plain shuffle does not depend on any."""

    def state(self) -> dict[str, Any]:
        """Return what `load` needs, as plain numbers and texts."""
        return {**self._identity, "epoch": self._epoch, "position": self._position}

    def load(self, state: Mapping[str, Any]) -> None:
        """Continue where `state` was taken.

        Raises:
            CheckpointError: The state belongs to other prompts, or to another seed.
        """
        different = [name for name, value in self._identity.items() if state.get(name) != value]
        if different:
            raise CheckpointError(
                "the checkpoint's data cursor belongs to other data: "
                + ", ".join(f"{name} was {state.get(name)!r} and is {self._identity[name]!r}" for name in different)
                + ". Resume with the data and the run.seed of the first run"
            )
        self._epoch, self._position = int(state["epoch"]), int(state["position"])
        self._order = self._shuffled()

    def _shuffled(self) -> list[int]:
        order = list(range(len(self._prompts)))
        # A text seed is hashed with SHA-512: the same order on every machine and Python version.
        random.Random(f"{self._seed}/{self._epoch}").shuffle(order)
        return order

    def _prompt(self, epoch: int, index: int) -> Prompt:
        prompt_id = f"{self._identity['source']}/{epoch}/{index}"
        return dataclasses.replace(self._prompts[index], prompt_id=prompt_id)


def _content(prompt: Prompt) -> str:
    return f"{prompt.text}\0{prompt.answer}\0{json.dumps(dict(prompt.row), sort_keys=True, default=str)}"
