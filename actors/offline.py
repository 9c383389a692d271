"""The process of one trainer rank of an offline run."""

from pathlib import Path

import ray
import torch

from areal_lite.actors.process import log_to_file
from areal_lite.config.offline import OfflineConfig
from areal_lite.train.distributed import join_process_group, leave_process_group, open_store
from areal_lite.train.offline import OfflineTrainer

__all__ = ["OfflineActor"]


class OfflineActor:
    """Delegates to `OfflineTrainer`; `progress` may be called beside any other method."""

    def __init__(self, config: OfflineConfig, *, rank: int, log_folder: str) -> None:
        log_to_file(log_folder, f"trainer/{rank}")
        self._config, self._rank = config, rank
        self._trainer: OfflineTrainer | None = None
        if config.run.device == "cpu":
            torch.set_num_threads(config.trainer.threads)

    def open_store(self) -> str:
        """Open the store at which the ranks meet (rank 0 is asked); returns its address."""
        self._store = open_store(ray.util.get_node_ip_address())
        return f"{self._store.host}:{self._store.port}"

    def start(self, *, address: str, model_folder: str, reference_folder: str | None) -> None:
        """Join the other ranks, load models and data."""
        config = self._config
        join_process_group(
            address,
            rank=self._rank,
            world_size=config.trainer.ranks,
            device=config.run.device,
            timeout_s=config.run.stall_timeout_s,
        )
        self._trainer = OfflineTrainer(
            config,
            model_folder=model_folder,
            reference_folder=reference_folder,
            rank=self._rank,
            world_size=config.trainer.ranks,
        )

    @property
    def _started(self) -> OfflineTrainer:
        assert self._trainer is not None, "start comes first"
        return self._trainer

    def prepare(self) -> None:
        """Run the reference model."""
        self._started.prepare()

    def load(self, checkpoint: str) -> int:
        """Load a checkpoint; returns the version."""
        return self._started.load(Path(checkpoint))

    def step(self) -> dict[str, float]:
        """Train one batch."""
        return self._started.step()

    def evaluate(self) -> dict[str, float]:
        """Measure on the held-out rows."""
        return self._started.evaluate()

    def ping(self) -> None:
        """Answer once this rank is free."""

    def progress(self) -> int:
        """Return a number that grows while this rank works."""
        return 0 if self._trainer is None else self._trainer.progress

    def save(self, folder: str) -> None:
        """Write a checkpoint."""
        self._started.save(Path(folder))

    def export(self, folder: str) -> None:
        """Write a Hugging Face folder."""
        self._started.export(Path(folder))

    def stop(self) -> None:
        """Leave the process group."""
        leave_process_group()
