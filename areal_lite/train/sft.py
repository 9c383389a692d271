"""Supervised learning on worked completions: cross-entropy over completion tokens, prompts left out.

It shares model, micro-batches and optimiser update with the RL trainer; its first use is the warm start of the
built-in model. It writes no files.

Shape letter: `T` completion tokens of a micro-batch.
"""

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor, nn

from areal_lite.algo.logprobs import token_logprobs
from areal_lite.config import TrainerConfig
from areal_lite.train.distributed import sum_over_ranks
from areal_lite.train.micro_batch import MicroBatch, TokenRows, equalise, split_micro_batches
from areal_lite.train.model import completion_logits
from areal_lite.train.schedule import learning_rate
from areal_lite.train.step import Learner

__all__ = ["Example", "SftLoop"]

Example = tuple[Sequence[int], Sequence[int]]
"""Prompt token ids, completion token ids with the end-of-sequence token."""


class SftLoop:
    """A seeded supervised run; every rank holds the same examples and takes its share of each batch."""

    def __init__(
        self,
        model: nn.Module,
        examples: Sequence[Example],
        *,
        steps: int,
        batch_size: int,
        seed: int,
        settings: TrainerConfig,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        """Prepare a run.

        Args:
            model: A transformers model, sharded over the ranks if there are several; trained in place.
            examples: At least `batch_size`.
            steps: Optimiser updates.
            batch_size: Examples of an update over all ranks, at least `world_size`.
            seed: Of the order of examples, which are shuffled anew in each epoch.
            settings: Optimiser, learning rate and micro-batches.
            rank: 0 .. world_size - 1.
            world_size: Ranks.
        """
        if not world_size <= batch_size <= len(examples):
            raise ValueError(
                f"batch_size must be between the number of ranks, {world_size}, and of examples, {len(examples)}, "
                f"got {batch_size}"
            )
        self._model, self._examples, self._settings = model, examples, settings
        self._steps, self._batch_size, self._seed = steps, batch_size, seed
        self._rank, self._world_size = rank, world_size
        self._device = next(model.parameters()).device
        self._learner = Learner(model, settings=settings, world_size=world_size)

    def run(self, progress: Callable[[int, int, float], None] | None = None) -> float:
        """Run all steps; collective.

        Args:
            progress: Called after each step with (steps done, steps in all, loss of the step).

        Returns:
            Loss of the last step: mean cross-entropy over its completion tokens before the update, in nats.
        """
        loss = 0.0
        for step, chosen in zip(range(self._steps), self._batches(), strict=False):
            lr = learning_rate(step, total_steps=self._steps, settings=self._settings)
            loss = self._step([self._examples[index] for index in chosen], lr=lr)
            if progress is not None:
                progress(step + 1, self._steps, loss)
        return loss

    def _batches(self) -> Iterator[list[int]]:
        """Yield each update's examples of this rank, for ever."""
        rng = np.random.default_rng(self._seed)
        while True:
            order = rng.permutation(len(self._examples)).tolist()
            for start in range(0, len(order) - self._batch_size + 1, self._batch_size):
                yield order[start : start + self._batch_size][self._rank :: self._world_size]

    def _step(self, examples: Sequence[Example], *, lr: float) -> float:
        rows = TokenRows(examples)
        token_ids_T = torch.from_numpy(rows.output_ids).to(self._device)
        num_tokens = float(sum_over_ranks(torch.tensor(len(token_ids_T), device=self._device)))
        batches = split_micro_batches(
            rows, chosen=range(len(rows)), max_tokens=self._settings.micro_batch_tokens, device=self._device
        )
        (batches,) = equalise([batches], device=self._device)
        shares: list[Tensor] = []

        def loss_of(batch: MicroBatch) -> Tensor:
            logits_TV = completion_logits(self._model, batch)
            logprobs_T = token_logprobs(logits_TV, token_ids_T=token_ids_T[batch.tokens_T], temperature=1.0)
            loss = -logprobs_T.sum() / num_tokens
            shares.append(loss.detach())
            return loss

        self._learner.update(batches, loss_of, lr=lr)
        return float(sum_over_ranks(torch.stack(shares).sum()))
