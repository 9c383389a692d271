"""The process of one trainer rank.

The controller's process imports this module too, and has no use for torch, transformers and vLLM: seconds of its start.
"""

import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from areal_lite.actors.engine_client import EngineClient
from areal_lite.actors.process import MeasuredProcess, log_to_file, position
from areal_lite.config.recipe import Config
from areal_lite.network import local_address, port_range
from areal_lite.record.checkpoints import Digest, digests
from areal_lite.sample_queue.access import QueueAccess
from areal_lite.sample_queue.client import QueueClient

if TYPE_CHECKING:
    from areal_lite.train.trainer import Trainer


class TrainerActor(MeasuredProcess):
    """Delegates to a trainer; all ranks run the same method at the same time, one after another.

    `progress` and `ping` may be called beside, and `save` with what was copied.
    """

    _trainer: Any = None

    def __init__(self, config: Any, *, rank: int, log_folder: str) -> None:
        log_to_file(log_folder, f"trainer/{rank}", environment=config.run.env)
        import torch

        from areal_lite.train import distributed

        torch.manual_seed(config.run.seed)
        self._distributed = distributed
        self._config, self._rank = config, rank
        self._working: dict[int, tuple[str, float]] = {}
        self._writing, self._snapshots = threading.Lock(), list[Callable[[Path], None]]()
        if config.run.device == "cpu" or config.trainer.offload:
            torch.set_num_threads(config.trainer.threads)

    def open_store(self) -> str:
        """Open the store of the process group (on rank 0); returns its address."""
        self._store = self._distributed.open_store(
            local_address(self._config.run.network), port_range(self._config.run.ports)
        )
        return f"{self._store.host}:{self._store.port}"

    def progress(self) -> int:
        """Return a number that grows while this rank works."""
        return 0 if self._trainer is None else int(self._trainer.progress)

    def ping(self) -> str:
        """Describe what this rank is doing, for how long, and at which line; empty when it is free."""
        now, working = time.monotonic(), self._working.copy()
        return " and ".join(
            f"in {words} since {now - since:.0f} s ({position(thread)})" for thread, (words, since) in working.items()
        )

    def work(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Call a method of this class or of the trainer; `ping` reports it meanwhile."""
        words = " ".join([method, *(str(arg) for arg in args if isinstance(arg, str | Path))])
        self._working[threading.get_ident()] = words, time.monotonic()
        try:
            return getattr(self if hasattr(self, method) else self._trainer, method)(*args, **kwargs)
        finally:
            del self._working[threading.get_ident()]

    def _join(self, address: str) -> None:
        """Join the process group."""
        device, trainer = self._config.run.device, self._config.trainer
        options: dict[str, Any] = {"timeout_s": trainer.collective_timeout_s, "mesh": trainer.mesh}
        self._distributed.join_process_group(
            address, rank=self._rank, world_size=trainer.ranks, device=device, **options
        )

    def load(self, checkpoint: Path) -> int:
        """Load a checkpoint; returns the version."""
        self._trainer.load(checkpoint)
        return int(self._trainer.version)

    def snapshot(self, copied: bool) -> None:
        """Copy or reference the state for the next `save`, after a save in progress."""
        with self._writing:
            self._snapshots.clear()  # before there is another: each is a copy of everything
            self._snapshots.append(self._trainer.snapshot(copied=copied))

    def save(self, folder: Path) -> dict[str, Digest]:
        """Write the snapshot to a checkpoint and release it; returns the digests of the files that this rank wrote."""
        from areal_lite.train.checkpoint import files_of

        with self._writing:
            self._snapshots.pop()(folder)
            return digests(files_of(folder, self._rank))

    def export(self, folder: Path) -> dict[str, Digest]:
        """Write a Hugging Face folder, as the trainer does; rank 0 returns the digests of its files."""
        self._trainer.export(folder)
        return digests(path for path in folder.rglob("*") if path.is_file()) if self._rank == 0 else {}

    def stop(self) -> None:
        """Leave the process group."""
        self._distributed.leave_process_group()


class OnlineTrainerActor(TrainerActor):
    """Takes its batches from the sample queue, and publishes weights to the engines."""

    _config: Config
    _trainer: "Trainer"

    def start(self, *, address: str, model_folder: str, access: QueueAccess) -> None:
        """Join the process group and build the model."""
        import torch

        from areal_lite.train.trainer import Trainer
        from areal_lite.weights.publisher import WeightPublisher

        config = self._config
        self._join(address)
        self._trainer = Trainer(config, model_folder=model_folder, rank=self._rank)
        self._queue = QueueClient(access, timeout_s=config.run.stall_timeout_s)
        self._publisher = WeightPublisher(
            self._trainer.model,
            transport=config.weights.transport,
            dtype=getattr(torch, config.compute_dtype),
            rank=self._rank,
            host=local_address(config.run.network),
            ports=port_range(config.run.ports),
            timeout_s=config.weights.timeout_s,
        )
        self.squares = self._publisher.squares

    def reconnect(self, access: QueueAccess) -> None:
        """Connect to the queue that replaced a dead one."""
        self._queue.move_to(access)

    def connect(self, engines: dict[str, Any], kept: list[str]) -> dict[str, str | None]:
        """Make exactly these rollout actors the receivers of publications; `kept` ones are connected already."""
        ranks = self._config.rollout.tensor_parallel
        client = partial(EngineClient, ranks_per_engine=ranks, timeout_s=self._config.weights.timeout_s)
        clients = {name: client({name: handle}) for name, handle in engines.items()}
        return self._publisher.connect(
            clients, kept=kept, group_client=client(engines), num_engine_ranks=ranks * len(engines)
        )

    def publish(self) -> tuple[dict[str, str | None], dict[str, float]]:
        """Return per engine why it failed, or None, and the speed at which it received (`WeightPublisher`)."""
        return self._publisher.publish(), self._publisher.mb_per_s

    def step(self, batch_id: str) -> dict[str, Any]:
        """Fetch this rank's shard of a taken batch and train it."""
        rank = self._rank // self._config.trainer.mesh.same_rows
        return self._trainer.train_step(self._queue.fetch(batch_id=batch_id, rank=rank))

    def stop(self) -> None:
        """Leave the process group."""
        self._queue.close()
        super().stop()


class OfflineTrainerActor(TrainerActor):
    """Trains on rows of a file, by the methods of its trainer."""

    def start(self, *, address: str, model_folder: str) -> None:
        """Join the process group; load models and data."""
        from areal_lite.train.offline import OfflineTrainer

        self._join(address)
        self._trainer = OfflineTrainer.from_recipe(self._config, model_folder=model_folder, rank=self._rank)
