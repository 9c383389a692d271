"""The offline objectives: seeded batches, optimiser updates, evaluation; and one trainer rank of such a run.

It shares model, micro-batches, optimiser update and checkpoints with the RL trainer. The warm start of the built-in
model runs the loop in process, a Ray actor wraps the rank; every method is collective: all ranks call it.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from areal_lite.config.offline import OfflineConfig
from areal_lite.config.recipe import PARITY_LIMITS
from areal_lite.data.completions import Example, load_offline
from areal_lite.data.encode import load_tokenizer
from areal_lite.train.checkpoint import export_model, load_checkpoint, take_snapshot
from areal_lite.train.distributed import device_of, sum_over_ranks
from areal_lite.train.micro_batch import TokenRows, split_micro_batches
from areal_lite.train.model import load_model, load_reward_model, reshard
from areal_lite.train.offline_objectives import OBJECTIVES, Part, row_logprobs, weights
from areal_lite.train.optimiser import Learner


@dataclass(slots=True)
class OfflineRows:
    """The examples of a split, with what the reference model thinks of them."""

    examples: Sequence[Example]
    reference_N2: Tensor | None = None
    """[N, 2] float32 nats, the log-probability of both completions of each example; None without a reference."""


class OfflineLoop:
    """A seeded run; every rank holds the same examples and takes its share of each batch."""

    def __init__(
        self, model: nn.Module, rows: OfflineRows, config: OfflineConfig, *, padding: int = 0, rank: int = 0
    ) -> None:
        """Prepare a run.

        Args:
            model: A transformers model, sharded over the ranks if there are several; trained in place.
            rows: At least `batch_size` examples; all with one completion, or all with two.
            config: What is minimised, steps, batch size, the seed of the order of examples, which are shuffled anew
                in each epoch, and the trainer.
            padding: Token id behind shorter rows.
        """
        settings, batch_size = config.trainer, config.batch.batch_size
        if batch_size > (most := len(rows.examples)):
            raise ValueError(f"batch_size must be at most the number of examples, {most}, got {batch_size}")
        self.learner = Learner(model, settings=settings, total_steps=config.run.steps)
        self.progress = 0
        """Grows with every forward pass, for whoever watches for stalls."""
        self._rows, self._config, self._padding = rows, config, padding
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
        parts = self._parts(self._rows, next(self._batches))
        weight, num_tokens = self._weigh(parts)

        def loss_of(part: Part) -> tuple[Tensor, dict[str, Tensor]]:
            means_F = self._forward(part).sum(dim=0) / weight
            return means_F[0], {"means_F": means_F.detach()}

        update = self.learner.update([partial(loss_of, part) for part in parts], step=self.version)
        means_F = torch.stack([figures["means_F"] for figures in update.figures]).sum(dim=0)
        self.version += 1
        return {
            **self._figures(sum_over_ranks(means_F)),
            "tokens": num_tokens,
            "lr": self.learner.rate(self.version - 1),
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
        weights_E1 = torch.cat([weights(part, self._config.command) for part in parts]).unsqueeze(1)
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
        return OBJECTIVES[self._config.command](self.learner.model, part, self._config.preference)

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
        together = len(rows.examples[0].completions) if rows.examples else 1
        token_rows = TokenRows((example.prompt, output) for example in examples for output in example.completions)
        (batches,) = split_micro_batches(
            token_rows,
            [range(len(token_rows))],
            device=self._device,
            padding=self._padding,
            together=together,
            **self._config.trainer.micro_batches,
        )
        parts = []
        for batch in batches:
            places_E = self._integers([chosen[row // together] for row in batch.rows[::together]])
            lengths_B = self._integers([token_rows.output_lengths[row] for row in batch.rows])
            reference_E2 = None if rows.reference_N2 is None else rows.reference_N2[places_E]
            parts.append(Part(batch=batch, lengths_B=lengths_B, places_E=places_E, reference_E2=reference_E2))
        return parts

    def _integers(self, values: Sequence[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self._device)

    def _weigh(self, parts: Sequence[Part]) -> tuple[float, float]:
        """Return the weight of all examples and the number of completion tokens, over all parts and ranks."""
        command = self._config.command
        mine = [[int(weights(part, command).sum()), len(part.batch.tokens_T)] for part in parts]
        weight, num_tokens = sum_over_ranks(torch.tensor(mine, device=self._device).sum(dim=0)).tolist()
        return float(weight), float(num_tokens)

    def _figures(self, values_F: Tensor) -> dict[str, float]:
        return dict(zip(("loss", "accuracy", "margin"), values_F.tolist(), strict=False))


class OfflineTrainer(OfflineLoop):
    """The loop of a recipe; `prepare`, then `load` where a run goes on, come before the first step."""

    def __init__(self, config: OfflineConfig, *, model_folder: str, rank: int) -> None:
        """Load models and data; the process group exists, or there is one float32 rank.

        Args:
            config: The recipe; `run.steps` is the number of steps whatever `epochs` says.
            model_folder: Hugging Face folder with the initial weights and the tokenizer.
        """
        self._model_folder, self._limit = model_folder, PARITY_LIMITS[config.compute_dtype]
        tokenizer = load_tokenizer(model_folder, config.model)
        data = load_offline(config, tokenizer)
        self._held_out, self._checksum, padding = OfflineRows(data.held_out), data.checksum, 0
        if config.command == "reward_model":
            padding = _padding(tokenizer)
            model = load_reward_model(model_folder, config, pad_token_id=padding)
        else:
            model = load_model(model_folder, config, lora=config.trainer.lora)
        super().__init__(model, OfflineRows(data.train), config, padding=padding, rank=rank)
        folder = config.preference.reference_path
        self._reference = model if folder is None else load_model(folder, config, trained=False)

    def prepare(self) -> None:
        """Run the reference model, where there is one, once over all pairs; afterwards it is not needed any more."""
        if self._config.has_reference:
            for rows in (self._rows, self._held_out):
                if rows.examples:
                    rows.reference_N2 = self.reference_logprobs(self._reference, rows.examples)
        self._reference = self.learner.model

    def load(self, checkpoint: Path) -> None:
        """Load a checkpoint to go on from, after `prepare`: the initial weights may be the reference.

        Raises:
            CheckpointError: It is missing or broken, of another model, or does not say what it said when it was saved.
        """
        version, _ = load_checkpoint(checkpoint, self.learner, rank=self._rank, limit=self._limit)
        self.seek(version)

    def evaluate(self) -> dict[str, dict[str, float]]:
        """Return `figures` over the held-out rows and their `standard_errors`; empty where there are none."""
        return self.measure(self._held_out) if self._held_out.examples else {}

    def snapshot(self, *, copied: bool = False) -> Callable[[Path], None]:
        """Return what writes a checkpoint of this moment into a folder, from a thread if copied; both collective."""
        return take_snapshot(
            self.learner,
            version=self.version,
            rank=self._rank,
            limit=self._limit,
            coefficients={"data": self._checksum},
            copied=copied,
        )

    def export(self, folder: Path) -> None:
        """Write a Hugging Face folder with weights (`model.export_dtype`) and tokenizer."""
        dtype = self._config.model.export_dtype
        export_model(folder, self.learner.model, base_folder=self._model_folder, rank=self._rank, dtype=dtype)


def _padding(tokenizer: Any) -> int:
    """Return a token to pad with: transformers reads a score before all padding, so never the end of sequence."""
    known = (tokenizer.pad_token_id, tokenizer.unk_token_id, tokenizer.bos_token_id, 0, 1)
    return int(next(token for token in known if token not in (None, tokenizer.eos_token_id)))
