"""The process of one rollout worker: a vLLM engine and the loop that keeps it full."""

import asyncio
import contextlib
import os
import signal
import sys
from multiprocessing import resource_tracker
from typing import Any

from areal_lite.actors.process import MeasuredProcess, log_to_file
from areal_lite.config.recipe import Config
from areal_lite.events import Event, EventBuffer
from areal_lite.network import local_address, use_interface_of
from areal_lite.rollout.engine import Interrupt
from areal_lite.rollout.runner import Workflows, load_workflows
from areal_lite.rollout.server_engine import ServerEngine
from areal_lite.rollout.vllm_engine import VllmEngine
from areal_lite.rollout.worker import RolloutWorker
from areal_lite.sample_queue.access import QueueAccess
from areal_lite.sample_queue.client import AsyncQueueClient
from areal_lite.types import Prompt, Sample


class RolloutActor(MeasuredProcess):
    """Delegates to `RolloutWorker` and `VllmEngine`; every call of the hand-over records an event."""

    def __init__(self, config: Config, *, name: str, model_folder: str, access: QueueAccess, log_folder: str) -> None:
        log_to_file(log_folder, name, environment=config.run.env)
        # Starting Python's resource tracker unblocks SIGTERM in this thread and in all that it starts later. Start it
        # now, and restore the mask.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, ())
        resource_tracker.ensure_running()
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        if (folder := os.getcwd()) in sys.path:  # Ray puts it first: its files would shadow libraries in the engine
            sys.path.remove(folder)
            sys.path.append(folder)
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
        workflows = load_workflows(self._config)  # first, so that a wrong name does not cost the start of an engine
        if self._config.weights.transport == "nccl" and self._config.run.network is not None:
            use_interface_of(local_address(self._config.run.network))  # as the ranks do; child processes inherit it
        self._engine = await self._start_engine()
        self._make_worker(self._access, workflows)

    async def _start_engine(self) -> VllmEngine:
        if servers := self._config.rollout.servers:
            server = servers[int(self._events.lane.partition("/")[2])]
            return await ServerEngine.connect(self._config, model_folder=self._model_folder, server=server)
        return await VllmEngine.start(self._config, model_folder=self._model_folder)

    async def stop(self) -> None:
        """End `run` and the engine."""
        await self._worker.stop()
        await self._engine.close()
        self._client.close()

    async def reconnect(self, access: QueueAccess) -> tuple[int, int]:
        """Continue at the sample queue that replaced a dead one, as the worker's `reconnect` does."""
        return await self._worker.reconnect(access)

    async def move_to(self, access: QueueAccess) -> None:
        """Drop a dead sample queue and all work for it; the next `run` serves the new one.

        Raises:
            EngineError: A request does not end.
        """
        await self._worker.stop()
        self._client.close()
        await self._until_resumed()
        await self._engine.reset()
        if self._open_update is not None:
            with contextlib.suppress(Exception):  # complete or not: a new trainer publishes all weights again
                if self._config.weights.staged:
                    await self._engine.weights_call("update_weights", self._open_update)
                await self._engine.weights_call("finish_weight_update")
            self._open_update = None
        self._opens_update = False
        self._make_worker(access, load_workflows(self._config))

    def _make_worker(self, access: QueueAccess, workflows: Workflows) -> None:
        self._client = AsyncQueueClient(access, timeout_s=self._config.queue.lease_timeout_s)
        self._worker = RolloutWorker(self._client, self._engine, self._config, events=self._events, workflows=workflows)

    async def run(self) -> None:
        """Serve until `stop`; raises the error that ended the worker."""
        await self._worker.run()

    async def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Join the trainer's transfer group."""
        await self._engine.weights_call("init_weight_transfer_engine", init_info)

    async def start_weight_update(self) -> None:
        """Open an update, in fact with the first `update_weights`, as each call costs up to one step of the engine."""
        self._events.emit("update_open")
        self._opens_update = True

    async def update_weights(self, update_info: dict[str, Any]) -> None:
        """Receive every parameter, or, over a transport that stages, start to while the engine generates."""
        opens, self._opens_update, self._open_update = self._opens_update, False, update_info
        calls = [("start_weight_update", None)] * opens + [("update_weights", update_info)]
        await asyncio.gather(*(self._engine.weights_call(*call) for call in calls))  # they arrive in this order
        if not self._config.weights.staged:
            self._events.emit("update_received")

    async def finish_weight_update(self) -> None:
        """Load the received parameters."""
        await self._engine.weights_call("finish_weight_update")
        self._open_update = None
        self._events.emit("update_loaded")

    async def install(self, interrupt: Interrupt, version: int) -> None:
        """Pause, load the staged parameters, and label tokens with the new version: one message for all three."""
        await self.pause(interrupt)
        self._events.emit("update_received")  # it was received before the pause, and takes no part of it
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
        """Generate again; returns before the engine answers."""
        # The engine resumes at once, but answers only after its first step, a prefill; the trainer must not wait.
        self._events.emit("resumed")
        self._resuming = asyncio.create_task(self._engine.resume())

    async def _until_resumed(self) -> None:
        if self._resuming is not None:
            await self._resuming  # raises its error

    async def evaluate(self, prompts: list[Prompt]) -> list[Sample | None]:
        """Run the episodes of prompts greedily; None for one that failed."""
        return await self._worker.evaluate(prompts)

    async def score(self, sequences: list[tuple[list[int], list[int]]]) -> list[Any]:
        """Return log-probabilities of stored sequences under the current weights, and the experts chosen."""
        return list(await asyncio.gather(*(self._engine.score(*pair) for pair in sequences)))

    async def parameter_squares(self) -> Any:
        """Return the fingerprints of each process's parameters (`weights/families.py`)."""
        return await self._engine.parameter_squares()

    async def progress(self) -> int:
        """Return the tokens generated so far: a number that grows while the engine works."""
        return self._engine.tokens_generated

    async def collect(self) -> tuple[list[Event], dict[str, Any]]:
        """Return the events since the last call, and the current figures."""
        self._engine.raise_if_dead()
        return self._events.drain(), self._worker.gauges()
