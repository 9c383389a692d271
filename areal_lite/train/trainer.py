"""One trainer rank: proximal pass, advantages, optimiser updates, scoring, checkpoint, export.

A Ray actor wraps it; every method is collective (the properties are not): all ranks call it. It does not fetch batches,
publish weights, or know that Ray exists.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from areal_lite.algo.logprobs import token_logprobs
from areal_lite.config import Config
from areal_lite.errors import LedgerError
from areal_lite.train.batch import PolicyBatch
from areal_lite.train.checkpoint import export_model, load_checkpoint, save_checkpoint
from areal_lite.train.distributed import sum_over_ranks
from areal_lite.train.micro_batch import MicroBatch, TokenRows, equalise, split_micro_batches
from areal_lite.train.model import completion_logits, load_model, reshard, shard_model
from areal_lite.train.objective import PolicyUpdateLoss
from areal_lite.train.schedule import learning_rate
from areal_lite.train.stats import StepStats, StepTally
from areal_lite.train.step import Learner
from areal_lite.types import Shard

__all__ = ["StepStats", "Trainer"]


class Trainer:
    """The model, its optimiser, and the trainer step."""

    def __init__(self, config: Config, *, model_folder: str, rank: int, world_size: int) -> None:
        """Load the model and spread it over the ranks; the process group exists, or there is one float32 rank.

        Args:
            config: The recipe.
            model_folder: Hugging Face folder with the initial weights and the tokenizer.
            rank: 0 .. world_size - 1.
            world_size: Trainer ranks.
        """
        self._config = config
        self._rank = rank
        self._model_folder = model_folder
        self._device = torch.device(config.run.device)
        whole = load_model(
            model_folder, device=self._device, activation_checkpointing=config.trainer.activation_checkpointing
        )
        dtype = getattr(torch, config.compute_dtype)
        self._model = shard_model(whole, world_size=world_size, device=self._device, compute_dtype=dtype)
        self._learner = Learner(self._model, settings=config.trainer, world_size=world_size)
        self._version = 0
        self._progress = 0

    @property
    def model(self) -> nn.Module:
        """The transformers model; its parameters are DTensors where FSDP2 is on."""
        return self._model

    @property
    def version(self) -> int:
        """Number of completed trainer steps."""
        return self._version

    @property
    def progress(self) -> int:
        """Grows with every forward pass, for whoever watches for stalls."""
        return self._progress

    def train_step(self, shard: Shard) -> StepStats:
        """Train one batch: `trainer.minibatches` optimiser updates, after which the version is one higher.

        Args:
            shard: This rank's rows of the batch, taken at the present version.

        Raises:
            LedgerError: The batch was taken at another version.
        """
        if shard.version != self._version:
            raise LedgerError(
                f"a batch must be taken at the trainer's version {self._version}, got {shard.version} for batch "
                f"{shard.batch_id}: restore queue and trainer from the same checkpoint"
            )
        seconds: dict[str, float] = {}
        with _timed(seconds, "train_s"):
            with _timed(seconds, "prepare_s"):
                batch, updates = self._prepare(shard)
            with _timed(seconds, "proximal_s"):
                proximal_logprobs_T = self._proximal_logprobs(batch, updates)
            with _timed(seconds, "update_s"):
                lr = learning_rate(self._version, total_steps=self._config.run.steps, settings=self._config.trainer)
                tally = self._run_updates(batch, updates, proximal_logprobs_T, lr=lr)
        self._version += 1
        return tally.reduce(shard, num_stale_tokens=batch.num_stale_tokens, lr=lr, seconds=seconds, device=self._device)

    def score(self, sequences: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[npt.NDArray[np.float32]]:
        """Return the completion logprobs of sequences under the present weights at temperature 1.

        Args:
            sequences: (prompt token ids, completion token ids) pairs; each rank may bring its own.

        Returns:
            Per sequence [T] float32 nats.
        """
        rows = TokenRows(sequences)
        token_ids_T = torch.from_numpy(rows.output_ids).to(self._device)
        logprobs_T = torch.empty(len(token_ids_T), device=self._device)
        (batches,) = self._micro_batches(rows, [range(len(rows))])
        self._score_into(logprobs_T, batches, token_ids_T, temperature=1.0)
        return rows.split(logprobs_T.cpu().numpy())

    def save(self, folder: Path) -> None:
        """Write a checkpoint into a folder, which the caller makes visible when all ranks are done."""
        save_checkpoint(folder, self._learner, version=self._version, rank=self._rank)

    def load(self, folder: Path) -> None:
        """Continue from a checkpoint, written by any number of ranks.

        Raises:
            CheckpointError: It is missing or broken, or of another model.
        """
        self._version = load_checkpoint(folder, self._learner, rank=self._rank)

    def export(self, folder: Path) -> None:
        """Write a Hugging Face folder with weights (float32) and tokenizer."""
        export_model(folder, self._model, tokenizer_folder=self._model_folder, rank=self._rank)

    def _prepare(self, shard: Shard) -> tuple[PolicyBatch, list[list[MicroBatch]]]:
        batch = PolicyBatch.from_shard(
            shard,
            max_staleness=self._config.queue.max_staleness,
            num_minibatches=self._config.trainer.minibatches,
            device=self._device,
        )
        return batch, self._micro_batches(batch.rows, batch.minibatches)

    def _micro_batches(self, rows: TokenRows, minibatches: Sequence[Sequence[int]]) -> list[list[MicroBatch]]:
        budget = self._config.trainer.micro_batch_tokens
        updates = [
            split_micro_batches(rows, chosen=chosen, max_tokens=budget, device=self._device) for chosen in minibatches
        ]
        return equalise(updates, device=self._device)

    def _proximal_logprobs(self, batch: PolicyBatch, updates: Sequence[Sequence[MicroBatch]]) -> Tensor:
        """Return the proximal logprobs, [T], as far as they are needed before the updates.

        The first update runs with the very weights of the moment the batch was taken: its current logprobs *are* the
        proximal ones, and the pass covers the later updates only. With one minibatch, `recompute` is `reuse`.
        """
        proximal_logprobs_T = batch.behaviour_logprobs_T.clone()
        if self._config.objective.proximal != "behaviour":
            later = [micro_batch for update in updates[1:] for micro_batch in update]
            temperature = self._config.rollout.temperature
            self._score_into(proximal_logprobs_T, later, batch.token_ids_T, temperature=temperature)
        return proximal_logprobs_T

    @torch.no_grad()
    def _score_into(
        self, logprobs_T: Tensor, batches: Sequence[MicroBatch], token_ids_T: Tensor, *, temperature: float
    ) -> None:
        for micro_batch in batches:
            logits = self._forward(micro_batch)
            token_ids = token_ids_T[micro_batch.tokens_T]
            logprobs_T[micro_batch.tokens_T] = token_logprobs(logits, token_ids_T=token_ids, temperature=temperature)
        reshard(self._model)

    def _forward(self, micro_batch: MicroBatch) -> Tensor:
        self._progress += 1
        return completion_logits(self._model, micro_batch)

    def _run_updates(
        self, batch: PolicyBatch, updates: Sequence[Sequence[MicroBatch]], proximal_logprobs_T: Tensor, *, lr: float
    ) -> StepTally:
        tally = StepTally()
        tokens = [torch.cat([part.tokens_T for part in update]) for update in updates]
        denominators = sum_over_ranks(torch.stack([batch.loss_mask_T[chosen].sum() for chosen in tokens])).tolist()
        for number, (update, denominator) in enumerate(zip(updates, denominators, strict=True)):
            if denominator == 0:
                tally.num_skipped += 1
                continue
            loss_of = PolicyUpdateLoss(
                batch,
                forward=self._forward,
                proximal_logprobs_T=proximal_logprobs_T,
                is_first=number == 0,
                denominator=denominator,
                config=self._config,
            )
            outcome = self._learner.update(update, loss_of, lr=lr)
            tally.max_age0_diff = max(tally.max_age0_diff, loss_of.max_age0_diff())
            if outcome.applied:
                ages = batch.ages_T[tokens[number]][batch.loss_mask_T[tokens[number]]]
                tally.add_update(loss_of.sums(), ages=ages.tolist(), grad_norm=outcome.grad_norm)
            else:
                tally.num_skipped += 1
        return tally


@contextmanager
def _timed(seconds: dict[str, float], name: str) -> Iterator[None]:
    start = time.perf_counter()
    yield
    seconds[name] = time.perf_counter() - start
