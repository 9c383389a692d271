"""One trainer rank of an offline run (SFT, reward model, DPO): seeded batches, updates, evaluation.

It shares model, micro-batches, optimiser and checkpoints with the RL trainer; `offline_objectives.py` has the losses.
A Ray actor wraps it, and the warm start of the built-in model runs it in process. Every method is collective.

Shape letters: `N` examples of a split, `E` of a forward pass, `F` figures (the loss first).
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import chain, count, islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AutoConfig

from areal_lite.config.offline import OfflineConfig
from areal_lite.config.recipe import PARITY_LIMITS
from areal_lite.data.completions import OfflineData, load_offline
from areal_lite.data.encode import end_tokens, load_tokenizer
from areal_lite.train.checkpoint import export_model, load_checkpoint, take_snapshot
from areal_lite.train.distributed import device_of, sum_over_ranks
from areal_lite.train.micro_batch import TokenRows, split_micro_batches
from areal_lite.train.model import load_model, load_reward_model, reshard
from areal_lite.train.offline_objectives import OBJECTIVES, Part, row_logprobs, weights
from areal_lite.train.optimiser import Learner


class OfflineTrainer:
    """A seeded run; every rank holds the same examples and takes its share of each batch.

    The order of a run: `prepare`, `load` where it resumes, then steps.
    """

    def __init__(
        self,
        config: OfflineConfig,
        model: nn.Module,
        data: OfflineData,
        *,
        reference: nn.Module | None = None,
        model_folder: str = "",
        padding: int = 0,
        rank: int = 0,
    ) -> None:
        """Prepare a run; `from_recipe` loads what a recipe names.

        Args:
            config: The loss, `run.steps`, the batch size, the seed of the order of examples, and the trainer.
            model: A transformers model, sharded over the ranks if there are several; trained in place.
            data: At least one example to train on.
            reference: None = the model before its first step.
            model_folder: Where an export takes the tokenizer from.
            padding: Token id after shorter rows.
        """
        settings = config.trainer
        self.learner = Learner(model, settings=settings, total_steps=config.run.steps)
        self.progress = 0
        """Grows with every forward pass, for the watchdog."""
        self._config, self._data, self._reference, self._model_folder = config, data, reference, model_folder
        self._reference_N2 = dict[str, Tensor]()
        """By split, [N, 2] float32 nats: the reference's log-probability of both completions of each example."""
        self._padding, self._rank, self._device = padding, rank, device_of(model)
        self._mine = slice(rank // settings.mesh.same_rows, None, settings.row_ranks)
        self._limit = PARITY_LIMITS[config.compute_dtype]
        self._seek(0)

    @classmethod
    def from_recipe(cls, config: OfflineConfig, *, model_folder: str, rank: int) -> "OfflineTrainer":
        """Load models and data; the process group exists, or there is one float32 rank.

        Args:
            config: The recipe; `run.steps` is the number of steps whatever `epochs` is.
            model_folder: Hugging Face folder with the initial weights and the tokenizer.
        """
        tokenizer, padding, reference = load_tokenizer(model_folder, config.model), 0, None
        data = load_offline(config, tokenizer)
        if config.command == "reward_model":
            padding = _padding(tokenizer, AutoConfig.from_pretrained(model_folder).get_text_config().vocab_size)
            model = load_reward_model(model_folder, config, pad_token_id=padding)
        else:
            model = load_model(model_folder, config)
        if (folder := config.preference.reference_path) is not None:
            reference = load_model(folder, config, trained=False)
        return cls(config, model, data, reference=reference, model_folder=model_folder, padding=padding, rank=rank)

    def prepare(self) -> None:
        """Run the reference model, where there is one, once over all pairs, and drop it."""
        if self._config.has_reference:
            for split in ("train", "held_out"):
                self._reference_N2[split] = self._reference_logprobs(split)
        self._reference = None

    def load(self, checkpoint: Path) -> None:
        """Load a checkpoint, after `prepare`: the initial weights may be the reference.

        Raises:
            CheckpointError: It is missing, broken, of another model, or the loaded model is not the saved one.
        """
        version, _ = load_checkpoint(checkpoint, self.learner, rank=self._rank, limit=self._limit)
        self._seek(version)

    def run(self, progress: Callable[[int, int, float], None] | None = None) -> None:
        """Run all remaining steps.

        Args:
            progress: Called after each step with (steps done, steps in all, loss of the step).
        """
        while self.version < self._config.run.steps:
            loss = self.step()["loss"]
            if progress is not None:
                progress(self.version, self._config.run.steps, loss)

    def step(self) -> dict[str, float]:
        """Train one batch.

        Returns:
            `loss` and the objective's figures, means over the batch before the update; `tokens` trained on; `lr`,
            `grad_norm` before clipping, and `step_skipped`, 1 where it was not finite and nothing was learned.
        """
        parts = self._parts("train", next(self._batches))
        weight, num_tokens = self._weigh(parts)

        def loss_of(part: Part) -> tuple[Tensor, dict[str, Tensor]]:
            means_F = self._forward(part).sum(dim=0) / weight
            return means_F[0], {"means_F": means_F.detach()}

        update = self.learner.update([partial(loss_of, part) for part in parts], step=self.version)
        means_F = torch.stack([figures["means_F"] for figures in update.figures]).sum(dim=0)
        self.version += 1
        return {
            **_figures(sum_over_ranks(means_F)),
            "tokens": num_tokens,
            "lr": self.learner.rate(self.version - 1),
            "grad_norm": update.grad_norm,
            "step_skipped": float(not update.applied),
        }

    @torch.no_grad()
    def evaluate(self) -> dict[str, dict[str, float]]:
        """Return `figures`, means over the held-out examples, and their `standard_errors`; empty where there are none.

        The error of a mean `m = sum v / W`, with weights that may differ: `sqrt(sum (v - m w)^2) / W`.
        """
        if not self._data.held_out:
            return {}
        parts = self._parts("held_out", range(len(self._data.held_out))[self._mine])
        weight, _ = self._weigh(parts)
        values_EF = torch.cat([self._forward(part) for part in parts])
        weights_E1 = torch.cat([weights(part, self._config.command) for part in parts]).unsqueeze(1)
        reshard(self.learner.model)
        means_F = sum_over_ranks(values_EF.sum(dim=0)) / weight
        errors_F = sum_over_ranks((values_EF - means_F * weights_E1).square().sum(dim=0)).sqrt() / weight
        return {"figures": _figures(means_F), "standard_errors": _figures(errors_F)}

    def snapshot(self, *, copied: bool = False) -> Callable[[Path], None]:
        """Return a function that writes a checkpoint of this moment into a folder, from a thread if copied."""
        return take_snapshot(
            self.learner,
            version=self.version,
            rank=self._rank,
            limit=self._limit,
            coefficients={"data": self._data.checksum},
            copied=copied,
        )

    def export(self, folder: Path) -> None:
        """Write a Hugging Face folder with weights, in the dtype of the initial model, and tokenizer."""
        export_model(folder, self.learner.model, base_folder=self._model_folder, rank=self._rank)

    def _seek(self, version: int) -> None:
        """Continue with the batch that follows so many steps; the order depends on the seed alone."""
        self.version = version
        """Completed steps."""
        self._batches = islice(self._all_batches(), version, None)

    @torch.no_grad()
    def _reference_logprobs(self, split: str) -> Tensor:
        """Return [N, 2] float32 nats on every rank; the ranks share the work."""
        model, number = self._reference or self.learner.model, len(getattr(self._data, split))
        logprobs_N2 = torch.zeros((number, 2), device=self._device)
        for part in self._parts(split, range(number)[self._mine]):
            self.progress += 1
            logprobs_N2[part.places_E] = row_logprobs(model, part).view(-1, 2)
        reshard(model)
        return sum_over_ranks(logprobs_N2)

    def _forward(self, part: Part) -> Tensor:
        self.progress += 1
        return OBJECTIVES[self._config.command](self.learner.model, part, self._config.preference)

    def _all_batches(self) -> Iterator[list[int]]:
        """Yield this rank's examples of each update, all shuffled in every epoch, without end."""
        rng, number = np.random.default_rng(self._config.run.seed), len(self._data.train)
        rows = chain.from_iterable(rng.permutation(number).tolist() for _ in count())
        while True:
            yield list(islice(rows, self._config.trainer.batch_size))[self._mine]

    def _parts(self, split: str, chosen: Sequence[int]) -> list[Part]:
        """Split examples into forward passes, with all completions of an example in the same one."""
        examples = [getattr(self._data, split)[index] for index in chosen]
        together = 1 if self._config.command == "sft" else 2
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
            reference_E2 = self._reference_N2[split][places_E] if split in self._reference_N2 else None
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


def _figures(values_F: Tensor) -> dict[str, float]:
    return dict(zip(("loss", "accuracy", "margin"), values_F.tolist(), strict=False))


def _padding(tokenizer: Any, num_embeddings: int) -> int:
    """Return a token to pad with: transformers reads a score before all padding, so never the end of sequence."""
    ends, added = end_tokens(tokenizer, tokenizer.name_or_path), tokenizer.added_tokens_decoder
    special = sorted(token for token in added if added[token].special and token not in ends and token < num_embeddings)
    known = (tokenizer.pad_token_id, tokenizer.unk_token_id, tokenizer.bos_token_id, *special, 0, 1)
    return int(next(token for token in known if token not in (None, tokenizer.eos_token_id)))
