"""The process that holds the sample queue."""

import time
from collections.abc import Mapping

import ray

from areal_lite.actors.process import log_to_file
from areal_lite.config.recipe import Config
from areal_lite.data.mix import make_cursor
from areal_lite.sample_queue.ledger import Ledger, LedgerSettings
from areal_lite.sample_queue.server import QueueServer
from areal_lite.sample_queue.service import restore
from areal_lite.types import Prompt

__all__ = ["QueueActor"]


class QueueActor:
    """Owns the ledger, the data cursor and the ZeroMQ server around them."""

    def __init__(
        self,
        config: Config,
        *,
        log_folder: str,
        state: bytes | None,
        prompts: Mapping[str, list[Prompt]],
    ) -> None:
        """Make the ledger and serve."""
        log_to_file(log_folder, "queue")
        cursor = make_cursor(config, prompts)
        settings = LedgerSettings(
            max_staleness=config.queue.max_staleness,
            on_stale=config.queue.on_stale,
            groups_per_step=config.queue.groups_per_step,
            samples_per_group=config.queue.samples_per_group,
            total_steps=config.run.steps,
            max_attempts=config.queue.max_attempts,
            lease_timeout_s=config.queue.lease_timeout_s,
            reject=config.queue.reject,
        )
        clock = time.monotonic
        ledger = (
            Ledger(settings, clock=clock)
            if state is None
            else restore(state, settings=settings, cursor=cursor, clock=clock)
        )
        self._server = QueueServer(
            ledger,
            cursor,
            num_minibatches=config.trainer.minibatches,
            num_ranks=config.trainer.ranks,
            seed=config.run.seed,
            bind=config.queue.bind,
            max_message_bytes=config.queue.max_message_mb * 2**20,
        )
        self._endpoint = self._server.start()

    def endpoint(self) -> str:
        """Address that workers connect to: from anywhere, where the recipe binds to every interface."""
        return self._endpoint.replace("//0.0.0.0:", f"//{ray.util.get_node_ip_address()}:")

    def stop(self) -> None:
        """Stop serving."""
        self._server.close()
