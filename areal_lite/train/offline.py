"""One trainer rank of an offline run: model, reference, data, checkpoints, export; the loop is `offline_loop.py`.

A Ray actor wraps it; every method is collective: all ranks call it.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn

from areal_lite.config.offline import OfflineConfig
from areal_lite.config.recipe import PARITY_LIMITS
from areal_lite.data.completions import load_offline
from areal_lite.data.encode import load_tokenizer
from areal_lite.train.checkpoint import export_model, load_checkpoint, take_snapshot
from areal_lite.train.model import load_model, load_reward_model
from areal_lite.train.offline_loop import OfflineLoop, OfflineRows
from areal_lite.train.offline_objectives import DirectPreference, Objective, RewardModel, Supervised


class OfflineTrainer(OfflineLoop):
    """The loop of a recipe; `prepare`, then `load` where a run goes on, come before the first step."""

    def __init__(self, config: OfflineConfig, *, model_folder: str, rank: int) -> None:
        """Load models and data; the process group exists, or there is one float32 rank.

        Args:
            config: The recipe; `run.steps` is the number of steps whatever `epochs` says.
            model_folder: Hugging Face folder with the initial weights and the tokenizer.
        """
        self._model_folder = model_folder
        self._limit = PARITY_LIMITS[config.compute_dtype]
        tokenizer = load_tokenizer(model_folder, config.model)
        data = load_offline(config, tokenizer)
        self._held_out, self._checksum = OfflineRows(data.held_out), data.checksum
        padding = _padding(tokenizer) if config.command == "reward_model" else 0
        super().__init__(
            _load(config, model_folder, padding=padding),
            _objective(config),
            OfflineRows(data.train),
            config,
            padding=padding,
            rank=rank,
        )
        self._reference, folder = self.learner.model, config.preference.reference_path
        if folder is not None:
            self._reference = load_model(folder, config, trained=False)

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


def _load(config: OfflineConfig, folder: str, *, padding: int) -> nn.Module:
    if config.command == "reward_model":
        return load_reward_model(folder, config, pad_token_id=padding)
    return load_model(folder, config, lora=config.trainer.lora)


def _objective(config: OfflineConfig) -> Objective:
    if config.command == "sft":
        return Supervised()
    return RewardModel() if config.command == "reward_model" else DirectPreference(config.preference)


def _padding(tokenizer: Any) -> int:
    """Return a token to pad with: transformers reads a score before all padding, so never the end of sequence."""
    known = (tokenizer.pad_token_id, tokenizer.unk_token_id, tokenizer.bos_token_id, 0, 1)
    return int(next(token for token in known if token not in (None, tokenizer.eos_token_id)))
