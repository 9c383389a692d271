"""The loop of the offline objectives: seeded batches, optimiser updates, evaluation.

It shares model, micro-batches and optimiser update with the RL trainer. The warm start of the built-in model
runs it in process, `offline.py` on every trainer rank. It writes no files.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice

import numpy as np
import torch
from torch import Tensor, nn

from areal_lite.config.offline import OfflineConfig
from areal_lite.data.completions import Example
from areal_lite.train.distributed import device_of, sum_over_ranks
from areal_lite.train.micro_batch import TokenRows, equalise, micro_batch, pack_rows
from areal_lite.train.model import reshard
from areal_lite.train.offline_objectives import Objective, Part, row_logprobs
from areal_lite.train.optimiser import Learner, learning_rate


@dataclass(slots=True)
class OfflineRows:
    """The examples of a split, with what the reference model thinks of them."""

    examples: Sequence[Example]
    reference_N2: Tensor | None = None
    """[N, 2] float32 nats, the log-probability of both completions of each example; None without a reference."""


class OfflineLoop:
    """A seeded run; every rank holds the same examples and takes its share of each batch."""

    def __init__(
        self,
        model: nn.Module,
        objective: Objective,
        rows: OfflineRows,
        config: OfflineConfig,
        *,
        padding: int = 0,
        rank: int = 0,
    ) -> None:
        """Prepare a run.

        Args:
            model: A transformers model, sharded over the ranks if there are several; trained in place.
            rows: At least `batch_size` examples; all with one completion, or all with two.
            config: Steps, batch size, the seed of the order of examples, which are shuffled anew in each epoch, and
                the trainer.
            padding: Token id behind shorter rows.
        """
        settings, batch_size = config.trainer, config.batch.batch_size
        if batch_size > len(rows.examples):
            raise ValueError(
                f"batch_size must be at most the number of examples, {len(rows.examples)}, got {batch_size}"
            )
        self.learner = Learner(model, settings=settings)
        self.progress = 0
        """Grows with every forward pass, for whoever watches for stalls."""
        self._objective, self._rows, self._config, self._padding = objective, rows, config, padding
        self._rank, self._mine = rank, slice(rank // settings.mesh.same_rows, None, settings.row_ranks)
        self._device = device_of(model)
        self.seek(0)

    def seek(self, version: int) -> None:
        """Go on with the batch that follows so many steps; the order depends on the seed alone."""
        self.version = version
        """Completed steps."""
        self._batches = islice(self._all_batches(), version, None)

    def run(self, progress: Callable[[int, int, float], None] | None = None) -> None:
        """Run all remaining steps; collective.

        Args:
            progress: Called after each step with (steps done, steps in all, loss of the step).
        """
        while self.version < self._config.run.steps:
            loss = self.step()["loss"]
            if progress is not None:
                progress(self.version, self._config.run.steps, loss)

    def step(self) -> dict[str, float]:
        """Train one batch; collective.

        Returns:
            `loss` and the objective's figures, means over the batch before the update; `tokens` trained on; `lr`,
            `grad_norm` before clipping, and `step_skipped`, 1 where it was not finite and nothing was learned.
        """
        lr = learning_rate(self.version, total_steps=self._config.run.steps, settings=self._config.trainer)
        parts = self._parts(self._rows, next(self._batches))
        weight, num_tokens = self._weigh(parts)
        sums: list[Tensor] = []

        def loss_of(part: Part) -> tuple[Tensor, dict[str, Tensor]]:
            means = self._forward(part).sum(dim=0) / weight
            sums.append(means.detach())
            return means[0], {}

        update = self.learner.update([partial(loss_of, part) for part in parts], lr=lr)
        self.version += 1
        return {
            **self._figures(sum_over_ranks(torch.stack(sums).sum(dim=0))),
            "tokens": num_tokens,
            "lr": lr,
            "grad_norm": update.grad_norm,
            "step_skipped": float(not update.applied),
        }

    @torch.no_grad()
    def measure(self, rows: OfflineRows) -> dict[str, dict[str, float]]:
        """Return `figures`, loss and the objective's, means over the examples, and their `standard_errors`; collective.

        The error of a mean `m = sum v / W`, with weights that may differ: `sqrt(sum (v - m w)^2) / W`.
        """
        parts = self._parts(rows, range(len(rows.examples))[self._mine])
        weight, _ = self._weigh(parts)
        values_EF = torch.cat([self._forward(part) for part in parts])
        weights_E1 = torch.cat([self._objective.weights(part) for part in parts]).unsqueeze(1)
        reshard(self.learner.model)
        means_F = sum_over_ranks(values_EF.sum(dim=0)) / weight
        errors_F = sum_over_ranks((values_EF - means_F * weights_E1).square().sum(dim=0)).sqrt() / weight
        return {"figures": self._figures(means_F), "standard_errors": self._figures(errors_F)}

    @torch.no_grad()
    def reference_logprobs(self, model: nn.Module, examples: Sequence[Example]) -> Tensor:
        """Return [N, 2] float32 nats, the log-probability of both completions of each example; collective.

        Args:
            model: The reference, sharded as the trained model is.
            examples: N of them; the ranks share the work, and each gets the whole result.
        """
        rows = OfflineRows(examples)
        logprobs_N2 = torch.zeros((len(examples), 2), device=self._device)
        for part in self._parts(rows, range(len(examples))[self._mine]):
            self.progress += 1
            logprobs_N2[part.places_E] = row_logprobs(model, part).view(-1, 2)
        reshard(model)
        return sum_over_ranks(logprobs_N2)

    def _forward(self, part: Part) -> Tensor:
        self.progress += 1
        return self._objective.values(self.learner.model, part)

    def _all_batches(self) -> Iterator[list[int]]:
        """Yield each update's examples of this rank, for ever."""
        rng, size = np.random.default_rng(self._config.run.seed), self._config.batch.batch_size
        while True:
            order = rng.permutation(len(self._rows.examples)).tolist()
            for start in range(0, len(order) - size + 1, size):
                yield order[start : start + size][self._mine]

    def _parts(self, rows: OfflineRows, chosen: Sequence[int]) -> list[Part]:
        """Split examples into forward passes, the completions of an example in one; collective."""
        examples = [rows.examples[index] for index in chosen]
        num_completions = len(rows.examples[0].completions) if rows.examples else 1
        token_rows = TokenRows((example.prompt, output) for example in examples for output in example.completions)
        lengths = [len(example.prompt) + max(map(len, example.completions)) for example in examples]
        max_tokens, packed = self._config.trainer.micro_batch_tokens // num_completions, self._config.trainer.packing
        groups = pack_rows(lengths, max_tokens=max_tokens, packed=packed)
        row_groups = [
            [index * num_completions + k for index in group for k in range(num_completions)] for group in groups
        ]
        build = partial(micro_batch, token_rows, device=self._device, padding=self._padding, packed=packed)
        (batches,) = equalise([[build(group) for group in row_groups]], device=self._device)
        token_ids = torch.from_numpy(token_rows.output_ids).to(self._device)
        parts = []
        for number, batch in enumerate(batches):  # where other ranks have more of them, the last ones are empty
            group, row_group = (groups[number], row_groups[number]) if number < len(groups) else ([], [])
            places_E = self._integers([chosen[index] for index in group])
            parts.append(
                Part(
                    batch=batch,
                    token_ids_T=token_ids[batch.tokens_T],
                    lengths_B=self._integers([token_rows.output_lengths[row] for row in row_group]),
                    places_E=places_E,
                    reference_E2=None if rows.reference_N2 is None else rows.reference_N2[places_E],
                )
            )
        return parts

    def _integers(self, values: Sequence[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self._device)

    def _weigh(self, parts: Sequence[Part]) -> tuple[float, float]:
        """Return the objective's weight and the number of completion tokens, over all parts and ranks."""
        mine = [
            sum(int(self._objective.weights(part).sum()) for part in parts),
            sum(len(part.token_ids_T) for part in parts),
        ]
        weight, num_tokens = sum_over_ranks(torch.tensor(mine, device=self._device)).tolist()
        return float(weight), float(num_tokens)

    def _figures(self, values_F: Tensor) -> dict[str, float]:
        return dict(zip(("loss", *self._objective.figures), values_F.tolist(), strict=True))
