"""The process of one rollout worker: a vLLM engine and the loop that keeps it full."""

import asyncio
import contextlib
import signal
from multiprocessing import resource_tracker
from typing import Any

from areal_lite.actors.process import MeasuredProcess, log_to_file
from areal_lite.config.recipe import Config
from areal_lite.events import Event, EventBuffer
from areal_lite.network import local_address, use_interface_of
from areal_lite.rollout.engine import Interrupt
from areal_lite.rollout.runner import Workflows, load_workflows
from areal_lite.rollout.vllm_engine import VllmEngine
from areal_lite.rollout.worker import RolloutWorker
from areal_lite.sample_queue.access import QueueAccess
from areal_lite.sample_queue.client import AsyncQueueClient
from areal_lite.types import Prompt, Sample


class RolloutActor(MeasuredProcess):
    """Delegates to `RolloutWorker` and `VllmEngine`; every call of the hand-over leaves an event."""

    def __init__(self, config: Config, *, name: str, model_folder: str, access: QueueAccess, log_folder: str) -> None:
        log_to_file(log_folder, name, environment=config.run.env)
        # Once, when it starts, it lets SIGTERM through to the thread that needs it, and to all that this one starts.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, ())
        resource_tracker.ensure_running()
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        self._opens_update = False
        self._open_update: dict[str, Any] | None = None
        self._resuming: asyncio.Task[None] | None = None
        self._config, self._model_folder, self._access = config, model_folder, access
        self._events = EventBuffer(name)

    async def start(self) -> None:
        """Load the model; the first hand-over brings weights and version.

        Raises:
            EngineError: The engine cannot start.
            PluginError: A workflow of the recipe cannot be loaded.
        """
        workflows = load_workflows(self._config)  # first, as a wrong name should not cost the start of an engine
        if self._config.weights.transport == "nccl" and self._config.run.network is not None:
            use_interface_of(local_address(self._config.run.network))  # as the ranks, for its processes inherit it
        self._engine = await VllmEngine.start(self._config, model_folder=self._model_folder)
        self._make_worker(workflows)

    async def stop(self) -> None:
        """End `run` and the engine."""
        await self._worker.stop()
        await self._engine.close()
        self._client.close()

    async def reconnect(self, access: QueueAccess) -> tuple[int, int]:
        """Go on at the sample queue that took a dead one's place, as the worker's `reconnect` does."""
        self._access = access
        return await self._worker.reconnect(access)

    async def move_to(self, access: QueueAccess) -> None:
        """Leave a sample queue that is gone, and all work for it, for another; `run` serves that one.

        Raises:
            EngineError: A request does not end.
        """
        self._access = access
        await self._leave_queue()
        if self._open_update is not None:
            with contextlib.suppress(Exception):  # whole or not: all weights come anew, from another trainer
                if self._config.weights.staged:
                    await self._engine.weights_call("update_weights", self._open_update)
                await self._engine.weights_call("finish_weight_update")
            self._open_update = None
        self._opens_update = False
        self._make_worker(load_workflows(self._config))

    async def _leave_queue(self) -> None:
        await self._worker.stop()
        self._client.close()
        await self._until_resumed()
        await self._engine.reset()

    def _make_worker(self, workflows: Workflows) -> None:
        self._client = AsyncQueueClient(self._access, timeout_s=self._config.queue.lease_timeout_s)
        self._worker = RolloutWorker(self._client, self._engine, self._config, events=self._events, workflows=workflows)

    async def run(self) -> None:
        """Serve until `stop`; raises what ended the worker."""
        await self._worker.run()

    async def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Join the trainer's transfer group."""
        await self._engine.weights_call("init_weight_transfer_engine", init_info)

    async def start_weight_update(self) -> None:
        """Open an update, together with the first `update_weights`: an engine answers between two steps only."""
        self._events.emit("update_open")
        self._opens_update = True

    async def update_weights(self, update_info: dict[str, Any]) -> None:
        """Receive every parameter; over a transport that stages, begin to, while the engine generates."""
        opens, self._opens_update, self._open_update = self._opens_update, False, update_info
        calls = [("start_weight_update", None)] * opens + [("update_weights", update_info)]
        await asyncio.gather(*(self._engine.weights_call(*call) for call in calls))  # received in this order
        if not self._config.weights.staged:
            self._events.emit("update_received")

    async def finish_weight_update(self) -> None:
        """Load what was received."""
        await self._engine.weights_call("finish_weight_update")
        self._open_update = None
        self._events.emit("update_loaded")

    async def install(self, interrupt: Interrupt, version: int) -> None:
        """Pause, load what is staged, and label tokens with its version from then on: one message for the three."""
        await self.pause(interrupt)
        self._events.emit("update_received")  # before the pause, in truth: of the pause it takes nothing
        await self.finish_weight_update()
        await self.stamp(version)

    async def pause(self, interrupt: Interrupt) -> None:
        """Stop generating."""
        await self._until_resumed()
        self._events.emit("drain" if interrupt == "drain" else "pause")
        await self._engine.pause(interrupt)
        self._events.emit("paused")

    async def stamp(self, version: int) -> None:
        """Label tokens with the new version."""
        await self._engine.stamp(version)
        self._events.emit("stamped", version=version)

    async def resume(self) -> None:
        """Go on generating; returns before the engine answers."""
        # The engine goes on at once, but its answer waits behind the first step, the re-prefill: the trainer must not.
        self._events.emit("resumed")
        self._resuming = asyncio.create_task(self._engine.resume())

    async def _until_resumed(self) -> None:
        if self._resuming is not None:
            await self._resuming  # Raises what the last resume met.

    async def evaluate(self, prompts: list[Prompt]) -> list[Sample | None]:
        """Run the episodes of prompts greedily; None for one that failed."""
        return await self._worker.evaluate(prompts)

    async def score(self, sequences: list[tuple[list[int], list[int]]]) -> list[Any]:
        """Log-probabilities of stored sequences under the engine's present weights, and the experts chosen."""
        return list(await asyncio.gather(*(self._engine.score(*pair) for pair in sequences)))

    async def parameter_squares(self) -> Any:
        """Return what each process of the engine holds, as fingerprints (`weights/families.py`)."""
        return await self._engine.parameter_squares()

    async def progress(self) -> int:
        """Tokens generated so far: a number that grows while the engine works."""
        return self._engine.tokens_generated

    async def collect(self) -> tuple[list[Event], dict[str, Any]]:
        """Events since the last call, and figures of this moment."""
        self._engine.raise_if_dead()
        return self._events.drain(), self._worker.gauges()
