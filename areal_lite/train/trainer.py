"""One trainer rank, and the trainer step from a shard of a batch to new weights; a Ray actor wraps it.

Data flow of a step: rows become tensors (`batch.py`), the models score them (`score.py`), rewards become advantages
(`advantages.py`), tokens get their weights, and each minibatch updates the policy (`objective.py`, `optimiser.py`) and
the critic. Every method is collective: it waits until all ranks have called it.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from areal_lite.config.recipe import Config
from areal_lite.errors import LedgerError
from areal_lite.train.advantages import batch_advantages, find_advantage_function
from areal_lite.train.batch import PolicyBatch
from areal_lite.train.checkpoint import export_model, load_checkpoint, take_snapshot
from areal_lite.train.micro_batch import TokenRows, split_micro_batches
from areal_lite.train.model import completion_logprobs, load_model, load_value_model
from areal_lite.train.objective import KLCoefficient, UpdateLoss, critic_loss, find_loss_function, weigh_tokens
from areal_lite.train.optimiser import Learner
from areal_lite.train.routes import replay_routes
from areal_lite.train.score import fill_in, filter_tokens, score_batch
from areal_lite.train.stats import StepTally
from areal_lite.types import Shard


class Trainer:
    """The policy, its optimiser, the models that the objective needs beside it, and the trainer step."""

    def __init__(self, config: Config, *, model_folder: str, rank: int) -> None:
        """Load the models and spread them over the ranks; the process group exists, or there is one float32 rank.

        Args:
            model_folder: Hugging Face folder with the initial weights and the tokenizer.

        Raises:
            PluginError: A loss or advantage function of the recipe cannot be found, or does not take its settings.
        """
        objective = config.objective
        self._config, self._rank, self._model_folder = config, rank, model_folder
        self._device = torch.device(config.run.device)
        self._policy_term, self._compare = find_loss_function(objective), find_advantage_function(objective)
        self.model = load_model(model_folder, config)
        """The transformers model; its parameters are DTensors where FSDP2 shards it."""
        if config.rollout.replay_routes:
            replay_routes(self.model)
        self.learner = Learner(self.model, settings=config.trainer, total_steps=config.run.steps)
        self.reference: nn.Module | None = None
        if objective.kl != "none":
            self.reference = self.model
            # Without a reference of its own, a model with adapters is the reference while they are off.
            if config.trainer.lora is None or objective.reference_path is not None:
                folder = objective.reference_path or model_folder
                self.reference = load_model(folder, config, trained=False)
        self.critic: Learner | None = None
        if objective.baseline == "critic":
            value_model = load_value_model(config.critic.path or model_folder, config)
            settings = config.trainer.model_copy(update={"lr": config.critic.lr})
            self.critic = Learner(value_model, settings=settings, total_steps=config.run.steps)
        self._kl = KLCoefficient(objective.kl_coef, target=objective.kl_target)
        self.version = 0
        """Number of completed trainer steps."""
        self.progress = 0
        """Grows with every forward pass, for the watchdog."""
        for model in filter(None, {self.model, self.reference, self.critic.model if self.critic else None}):
            model.register_forward_pre_hook(self._count_pass)

    def train_step(self, shard: Shard) -> dict[str, Any]:
        """Train one batch, `trainer.minibatches` optimiser updates, and raise the version by one.

        Args:
            shard: This rank's rows of the batch, taken at the current version.

        Returns:
            The step's metrics by name, of all ranks.

        Raises:
            LedgerError: The batch was taken at another version.
        """
        if shard.version != self.version:
            raise LedgerError(
                f"a batch must be taken at the trainer's version {self.version}, got {shard.version} for batch "
                f"{shard.batch_id}. Fix: restore queue and trainer from the same checkpoint"
            )
        config, tally = self._config, StepTally()
        if on_gpu := self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
            tally.add(gpu_rest_gib=torch.cuda.memory_allocated() / 2**30)
        with _timed(tally, "train_s"):
            with _timed(tally, "prepare_s"):
                batch = PolicyBatch.from_shard(shard, config=config, device=self._device)
            with _timed(tally, "proximal_s"):
                critic = self.critic.model if self.critic else None
                score_batch(batch, policy=self.model, reference=self.reference, critic=critic, config=config)
            with _timed(tally, "prepare_s"):
                figures = batch_advantages(batch, config=config, kl_coef=self._kl.value, compare=self._compare)
                is_empty = weigh_tokens(batch, config)
            with _timed(tally, "update_s"):
                for number in range(len(batch.updates)):
                    if is_empty[number]:
                        tally.add(step_skipped=1)
                    else:
                        self._update(batch, number, tally)
        if on_gpu:
            tally.add(gpu_peak_gib=torch.cuda.max_memory_allocated() / 2**30)
        tally.add_shard(shard)
        tally.add_batch(batch)
        objective, tokens = config.objective, batch.tokens
        num_filtered = int((tokens.loss_mask_T & ~tokens.kept_T).sum())
        tally.add(
            **figures,
            lr=self.learner.rate(self.version),
            tokens_filtered=None if objective.behaviour_filter == "none" else num_filtered,
            kl_coef=None if objective.kl == "none" else self._kl.value,
        )
        stats = tally.reduce(self._device, own_loss=objective.loss_function is not None)
        self._kl.adapt(stats["kl_ref"])
        self.version += 1
        return stats

    def score(
        self, sequences: Sequence[tuple[Sequence[int], Sequence[int]]], routes: Sequence[Any] | None = None
    ) -> list[npt.NDArray[np.float32]]:
        """Return the completion logprobs of sequences under the current weights at temperature 1.

        Args:
            sequences: (prompt token ids, completion token ids) pairs; ranks may have different ones.
            routes: `Sample.routes` of each sequence; None = the routers choose.

        Returns:
            Per sequence [T] float32 nats.
        """
        rows, budget = TokenRows(sequences, routes), self._config.trainer.micro_batches
        (parts,) = split_micro_batches(rows, [range(len(rows))], device=self._device, **budget)
        unknown_T = torch.empty(len(rows.output_ids), device=self._device)
        logprobs_T = fill_in(unknown_T, parts, model=self.model, output=completion_logprobs)
        return rows.split(logprobs_T.cpu().numpy())

    def snapshot(self, *, copied: bool = False) -> Callable[[Path], None]:
        """Return a function that writes a checkpoint of this moment, in a thread if copied; both are collective."""
        return take_snapshot(
            self.learner,
            version=self.version,
            rank=self._rank,
            limit=self._config.parity_limit(),
            critic=self.critic,
            coefficients={"kl": self._kl.value},
            copied=copied,
        )

    def load(self, folder: Path) -> None:
        """Continue from a checkpoint that any number of ranks wrote.

        Raises:
            CheckpointError: It is missing, broken, of another model, or without the critic that the recipe has, or the
                loaded model is not the saved one.
        """
        limit, critic = self._config.parity_limit(), self.critic
        self.version, saved = load_checkpoint(folder, self.learner, rank=self._rank, limit=limit, critic=critic)
        self._kl.restore(saved.get("kl"))

    def export(self, folder: Path) -> None:
        """Write a Hugging Face folder with weights, in the dtype of the initial model, and tokenizer."""
        export_model(folder, self.model, base_folder=self._model_folder, rank=self._rank)

    def _count_pass(self, *_: object) -> None:
        self.progress += 1

    def _update(self, batch: PolicyBatch, number: int, tally: StepTally) -> None:
        """Update policy and critic on a minibatch in which some token trains."""
        # An untrained critic would turn the rewards into noise.
        if self.critic is None or self.version >= self._config.critic.warmup_steps:
            self._update_policy(batch, number, tally)
        if self.critic is not None:
            loss_of = partial(critic_loss, model=self.critic.model, batch=batch, config=self._config)
            update = self.critic.update([partial(loss_of, part) for part in batch.updates[number]], step=self.version)
            tally.add_update(update, critic_updates=1)

    def _update_policy(self, batch: PolicyBatch, number: int, tally: StepTally) -> None:
        filter_tokens(batch, number, policy=self.model, config=self._config)
        loss_of = UpdateLoss(
            batch=batch,
            model=self.model,
            config=self._config,
            is_first=number == 0,
            kl_coef=self._kl.value,
            policy_term=self._policy_term,
        )
        update = self.learner.update([partial(loss_of, part) for part in batch.updates[number]], step=self.version)
        tally.add_update(update, policy_updates=1, grad_norm=update.grad_norm)
        if update.applied:
            places_T = torch.cat([part.tokens_T for part in batch.updates[number]])
            tally.add_tokens(batch.tokens.ages_T[places_T][batch.tokens.loss_mask_T[places_T]].tolist())


@contextmanager
def _timed(tally: StepTally, name: str) -> Iterator[None]:
    start = time.perf_counter()
    yield
    tally.add(**{name: time.perf_counter() - start})
