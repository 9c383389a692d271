"""Engines in the tests' own process: an event loop to drive them from, and the hand-over to them."""

import asyncio
import os
import threading
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any, TypeVar
from unittest import mock

import torch
from torch import nn
from warm_workers import copy_engine_cores

from areal_lite.config.recipe import Config
from areal_lite.events import EventBuffer
from areal_lite.rollout.engine import Interrupt
from areal_lite.rollout.engine_settings import engine_environment
from areal_lite.rollout.vllm_engine import VllmEngine
from areal_lite.weights.handover import EngineGroup, hand_over

T = TypeVar("T")

_CALL_TIMEOUT_S = 300.0


class BackgroundLoop:
    """An event loop in a thread of its own, for tests that are not coroutines."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, name="test-loop", daemon=True)
        self._thread.start()

    def call(self, coroutine: Coroutine[Any, Any, T], *, timeout_s: float = _CALL_TIMEOUT_S) -> T:
        """Run a coroutine to its end."""
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(timeout_s)

    def close(self) -> None:
        """Cancel what still runs, as `asyncio.run` would, and end the thread."""
        self.call(_cancel_others())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()


async def _cancel_others() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)


class SyncClient:
    """What vLLM calls a weight-sync client, for one engine in this process."""

    def __init__(self, engine: Any, loop: asyncio.AbstractEventLoop) -> None:
        self._engine, self._loop = engine, loop

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self._call("init_weight_transfer_engine", init_info)

    def start_weight_update(self) -> None:
        self._call("start_weight_update")

    def update_weights(self, update_info: Any) -> None:
        self._call("update_weights", update_info)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._call("finish_weight_update")

    def _call(self, method: str, argument: dict[str, Any] | None = None) -> None:
        call = self._engine.weights_call(method, argument)
        asyncio.run_coroutine_threadsafe(call, self._loop).result(_CALL_TIMEOUT_S)


class LocalEngine:
    """An `EngineGroup` of one engine in this process, which may not fail."""

    def __init__(self, engine: Any, loop: asyncio.AbstractEventLoop) -> None:
        self._engine, self._loop = engine, loop

    def begin(self, method: str, *args: Any) -> None:
        self.each(method, *args)

    def each(self, method: str, *args: Any) -> None:
        call = _install(self._engine, *args) if method == "install" else getattr(self._engine, method)(*args)
        asyncio.run_coroutine_threadsafe(call, self._loop).result(_CALL_TIMEOUT_S)

    def drop(self, name: str, reason: str) -> None:
        raise AssertionError(f"{name} was lost in the hand-over: {reason}")

    def raise_if_none(self) -> None:
        """Do nothing: it is there."""


def publisher_to(engine: Any, background: BackgroundLoop, model: nn.Module, *, transport: str, ranks: int = 1) -> Any:
    """Connect a publisher of a model to one engine in this process."""
    from areal_lite.weights.publisher import WeightPublisher

    client = SyncClient(engine, background.loop)
    places: dict[str, Any] = {"host": "127.0.0.1", "ports": range(20000, 22000), "timeout_s": 60}
    publisher = WeightPublisher(model, transport=transport, dtype=torch.float32, rank=0, **places)
    failures = publisher.connect({"engine": client}, group_client=client, num_engine_ranks=ranks)
    assert failures == {"engine": None}
    return publisher


def publish_to(engine: Any, background: BackgroundLoop, publisher: Any, *, version: int, staged: bool = True) -> None:
    """Hand a publisher's weights over to one engine, as a run does."""
    run_hand_over(LocalEngine(engine, background.loop), publisher.publish, version=version, staged=staged)


def run_hand_over(
    engines: EngineGroup,
    publish: Callable[[], Mapping[str, str | None]],
    *,
    version: int,
    staged: bool = False,
    stamp_ledger: Callable[[], None] = lambda: None,
    events: EventBuffer | None = None,
) -> None:
    hand_over(
        engines,
        publish=publish,
        staged=staged,
        stamp_ledger=stamp_ledger,
        version=version,
        interrupt="recompute",
        events=events or EventBuffer("handover"),
    )


async def _install(engine: Any, interrupt: Interrupt, version: int) -> None:
    """What `RolloutActor.install` does."""
    await engine.pause(interrupt)
    await engine.weights_call("finish_weight_update")
    await engine.stamp(version)


@contextmanager
def vllm_engine(config: Config, model_folder: str) -> Iterator[tuple[VllmEngine, BackgroundLoop]]:
    """Start an engine, on a CPU as a copy of this process; the environment variables that it sets end with it."""
    background = BackgroundLoop()
    seen_by_imports = {"VLLM_LOGGING_LEVEL": "WARNING", **engine_environment(config)}
    with (
        mock.patch.dict(os.environ, seen_by_imports),
        copy_engine_cores() if config.run.device == "cpu" else nullcontext(),
    ):
        try:
            engine = background.call(VllmEngine.start(config, model_folder=model_folder))
            try:
                yield engine, background
            finally:
                background.call(engine.close())
        finally:
            background.close()
