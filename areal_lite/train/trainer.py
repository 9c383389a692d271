"""One trainer rank: scoring passes, advantages, optimiser updates, checkpoint, export.

A Ray actor wraps it; every method is collective (the properties are not): all ranks call it. It does not fetch batches,
publish weights, or know that Ray exists.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from areal_lite.config.recipe import Config
from areal_lite.errors import LedgerError
from areal_lite.train.batch import PolicyBatch
from areal_lite.train.checkpoint import export_model, load_checkpoint, load_coefficients, save_checkpoint
from areal_lite.train.coefficients import Coefficients
from areal_lite.train.critic import Critic, explained_variance
from areal_lite.train.micro_batch import MicroBatch, TokenRows, equalise, split_micro_batches
from areal_lite.train.model import load_model, shard_model
from areal_lite.train.passes import Scores, fill_in_logprobs
from areal_lite.train.plan import StepPlan, make_plan
from areal_lite.train.ptx import PtxDocuments
from areal_lite.train.reference import load_reference
from areal_lite.train.schedule import learning_rate
from areal_lite.train.scoring import proximal_kl, score_batch
from areal_lite.train.stats import StepTally
from areal_lite.train.step import Learner
from areal_lite.train.updates import StepUpdates
from areal_lite.types import Shard

__all__ = ["Trainer"]


class Trainer:
    """The policy, its optimiser, the models that the objective needs beside it, and the trainer step."""

    def __init__(self, config: Config, *, model_folder: str, rank: int, world_size: int) -> None:
        """Load the models and spread them over the ranks; the process group exists, or there is one float32 rank.

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
        self._reference = load_reference(config, model_folder=model_folder, world_size=world_size, device=self._device)
        self._critic: Critic | None = None
        if config.objective.baseline == "critic":
            self._critic = Critic(config, model_folder=model_folder, world_size=world_size, device=self._device)
        self._ptx: PtxDocuments | None = None
        if config.objective.ptx_coef > 0:
            self._ptx = PtxDocuments(config, tokenizer_folder=model_folder, rank=rank, world_size=world_size)
        self._coefficients = Coefficients.first(config.objective)
        self._version = 0
        self._progress = 0
        for model in (self._model, self._reference, None if self._critic is None else self._critic.model):
            if model is not None:
                model.register_forward_pre_hook(self._count_pass)

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

    def train_step(self, shard: Shard) -> dict[str, Any]:
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
                batch = PolicyBatch.from_shard(shard, config=self._config, device=self._device)
                updates = self._micro_batches(batch.rows, batch.minibatches)
            with _timed(seconds, "proximal_s"):
                scores = self._score(batch, updates)
            with _timed(seconds, "prepare_s"):
                plan = make_plan(batch, updates, scores, config=self._config, coefficients=self._coefficients)
            with _timed(seconds, "update_s"):
                tally = self._updates().run(batch, updates, scores=scores, plan=plan)
                moved = self._moved(batch, updates, scores) if tally["policy_updates"] else None
        tally.add_shard(shard)
        tally.add(proximal_kl=moved, **seconds)
        self._add_facts(tally, batch, scores, plan)
        stats = tally.reduce(self._device)
        self._coefficients = plan.coefficients.adapted(
            self._config.objective, kl=stats["kl_ref"], proximal_kl=stats["proximal_kl"]
        )
        self._version += 1
        return stats

    def score(self, sequences: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[npt.NDArray[np.float32]]:
        """Return the completion logprobs of sequences under the present weights at temperature 1.

        Args:
            sequences: (prompt token ids, completion token ids) pairs; each rank may bring its own.

        Returns:
            Per sequence [T] float32 nats.
        """
        rows = TokenRows(sequences)
        token_ids_T = torch.from_numpy(rows.output_ids).to(self._device)
        (batches,) = self._micro_batches(rows, [range(len(rows))])
        logprobs_T = fill_in_logprobs(
            torch.empty(len(token_ids_T), device=self._device),
            batches,
            model=self._model,
            token_ids_T=token_ids_T,
            temperature=1.0,
        )
        return rows.split(logprobs_T.cpu().numpy())

    def save(self, folder: Path) -> None:
        """Write a checkpoint into a folder, which the caller makes visible when all ranks are done."""
        save_checkpoint(
            folder,
            self._learner,
            version=self._version,
            rank=self._rank,
            critic=self._critic_learner,
            coefficients=self._coefficients.state(),
        )

    def load(self, folder: Path) -> None:
        """Continue from a checkpoint, written by any number of ranks.

        Raises:
            CheckpointError: It is missing or broken, of another model, or without the critic that the recipe has.
        """
        self._version = load_checkpoint(folder, self._learner, rank=self._rank, critic=self._critic_learner)
        self._coefficients = Coefficients.restored(self._config.objective, load_coefficients(folder))

    def export(self, folder: Path) -> None:
        """Write a Hugging Face folder with weights (float32) and tokenizer."""
        export_model(folder, self._model, tokenizer_folder=self._model_folder, rank=self._rank)

    @property
    def _critic_learner(self) -> Learner | None:
        return None if self._critic is None else self._critic.learner

    def _count_pass(self, *_: object) -> None:
        self._progress += 1

    def _micro_batches(self, rows: TokenRows, minibatches: Sequence[Sequence[int]]) -> list[list[MicroBatch]]:
        budget = self._config.trainer.micro_batch_tokens
        updates = [
            split_micro_batches(rows, chosen=chosen, max_tokens=budget, device=self._device) for chosen in minibatches
        ]
        return equalise(updates, device=self._device)

    def _score(self, batch: PolicyBatch, updates: Sequence[Sequence[MicroBatch]]) -> Scores:
        return score_batch(
            batch,
            updates,
            model=self._model,
            reference=self._reference,
            critic=self._critic,
            config=self._config,
        )

    def _updates(self) -> StepUpdates:
        return StepUpdates(
            self._config, learner=self._learner, critic=self._critic, ptx=self._ptx, version=self._version
        )

    def _moved(self, batch: PolicyBatch, updates: Sequence[Sequence[MicroBatch]], scores: Scores) -> float | None:
        """Measure how far the step has moved the policy, where a coefficient follows it."""
        if self._config.objective.proximal_kl_target is None:
            return None
        return proximal_kl(batch, updates, scores=scores, model=self._model, config=self._config)

    def _add_facts(self, tally: StepTally, batch: PolicyBatch, scores: Scores, plan: StepPlan) -> None:
        """Add what is known beside the updates; collective."""
        objective, targets_T = self._config.objective, plan.advantages.targets_T
        variance = None
        if scores.values_T is not None and targets_T is not None:
            variance = explained_variance(scores.values_T, targets_T=targets_T, loss_mask_T=batch.loss_mask_T)
        num_filtered = int((batch.loss_mask_T & ~plan.kept_T).sum())
        tally.add(
            lr=learning_rate(self._version, total_steps=self._config.run.steps, settings=self._config.trainer),
            tokens_masked_stale=batch.num_stale_tokens,
            tokens_filtered=None if objective.behaviour_filter == "none" else num_filtered,
            kl_coef=None if objective.kl == "none" else plan.coefficients.kl,
            proximal_kl_coef=plan.coefficients.proximal_kl if objective.proximal_kl_coef > 0 else None,
            advantage_std=plan.advantages.std,
            value_explained_variance=variance,
            reward_shaped_mean=plan.advantages.reward_shaped_mean,
        )


@contextmanager
def _timed(seconds: dict[str, float], name: str) -> Iterator[None]:
    start = time.perf_counter()
    yield
    seconds[name] = seconds.get(name, 0.0) + time.perf_counter() - start
