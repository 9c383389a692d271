"""The process that holds the sample queue."""

from collections.abc import Mapping

from areal_lite.actors.process import MeasuredProcess, log_to_file
from areal_lite.config.recipe import Config
from areal_lite.data.cursor import make_cursor
from areal_lite.network import local_address, port_range
from areal_lite.sample_queue.access import QueueAccess, Role
from areal_lite.sample_queue.ledger import Ledger, LedgerSettings
from areal_lite.sample_queue.server import QueueServer
from areal_lite.sample_queue.service import QueueService, restore
from areal_lite.types import Prompt


class QueueActor(MeasuredProcess):
    """Owns the ledger, the data cursor and the ZeroMQ server around them."""

    def __init__(
        self,
        config: Config,
        *,
        log_folder: str,
        state: bytes | None,
        prompts: Mapping[str, list[Prompt]],
        keep_batch: bool = False,
    ) -> None:
        """Restore or create the ledger and serve; a batch in training is returned to it unless kept."""
        log_to_file(log_folder, "queue", environment=config.run.env)
        cursor = make_cursor(config, prompts)
        settings = LedgerSettings(total_steps=config.run.steps, **config.queue.model_dump())
        ledger = Ledger(settings)
        if state is not None:
            ledger = restore(state, settings=settings, cursor=cursor, keep_batch=keep_batch)
        trainer = config.trainer
        self._server = QueueServer(
            QueueService(
                ledger, cursor, num_minibatches=trainer.minibatches, num_ranks=trainer.row_ranks, seed=config.run.seed
            ),
            bind=local_address(config.run.network),
            ports=port_range(config.run.ports),
            max_message_bytes=config.queue.max_message_mb * 2**20,
        )
        self._server.start()

    def access(self) -> dict[Role, QueueAccess]:
        """Return endpoint and keys of each role."""
        return {role: self._server.access(role) for role in Role}

    def ping(self) -> None:
        """Answer, as proof that this process is alive."""

    def stop(self) -> None:
        """Stop serving."""
        self._server.close()
