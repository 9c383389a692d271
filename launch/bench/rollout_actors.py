"""What `areal-lite bench rollout` runs: one engine, filled by the rollout worker or by a plain loop, in one process.

The processes are those of a run: queue, verifier, trainer ranks, which only publish, and a rollout actor that can also
drive its engine without worker and queue. Both take the prompts of the recipe in the same order, with the same seeds.
"""

import asyncio
import itertools
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Self

import ray

from areal_lite.actors.calls import result
from areal_lite.actors.rollout import RolloutActor
from areal_lite.config.recipe import Config
from areal_lite.data.mix import make_cursor
from areal_lite.data.prompts import load_sources
from areal_lite.events import EventBuffer
from areal_lite.launch.bench.rollout import Case, Measurement, RolloutBench
from areal_lite.launch.bench.rollout_requests import plain_requests
from areal_lite.launch.run.cluster import Cluster
from areal_lite.record.paths import with_absolute_paths
from areal_lite.rollout.engine import Interrupt
from areal_lite.rollout.runner import load_workflows
from areal_lite.rollout.vllm_engine import sampling_params
from areal_lite.weights.handover import hand_over

__all__ = ["MeasuredRollout"]

_LANE = "rollout/0"
_POLL_S = 0.25
"""How often the controller of a run collects events; so do we."""


class MeasuredRollout:
    """Measures one case after another on the same engine. A context manager, within a `ray_session`."""

    def __init__(self, bench: RolloutBench, config: Config, *, model_folder: Path, logs: Path) -> None:
        """Prepare; nothing starts yet.

        Args:
            bench: Lengths and cadence.
            config: From `bench_config`.
            model_folder: Hugging Face folder.
            logs: Gets a log per process.
        """
        self._bench, self._config = bench, with_absolute_paths(config)
        self._model_folder, self._logs = model_folder, logs.resolve()
        self._version = 0
        self._batches = (f"step-{number}" for number in itertools.count(1))

    def __enter__(self) -> Self:
        """Start everything.

        Raises:
            ArealLiteError: Something does not start.
        """
        config, model_folder, logs = self._config, self._model_folder, self._logs
        logs.mkdir(parents=True, exist_ok=True)
        self._cluster = Cluster(
            config, model_folder=model_folder, log_folder=logs, queue_state=None, rollout_actor=_RolloutActor
        )
        try:
            self._cluster.start(checkpoint=None, on_progress=lambda _: None)
            self._actor = self._cluster.engines.handles[_LANE]
            self._verifying = [verifier.run.remote() for verifier in self._cluster.verifiers.values()]
            self._cluster.queue.open_admission()
            self._hand_over("recompute")
            self._ask("end_worker")
        except BaseException:
            self._cluster.stop()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self._cluster.stop()

    def measure(self, case: Case) -> Measurement:
        """Fill the engine in one way, and count its tokens once it is warm."""
        with self._alone() if case == "vllm" else self._worker():
            self._wait(time.monotonic() + self._bench.warm_s)
            if case == "drain" or case == "recompute":
                return self._published(case)
            before = self._count()
            self._wait(time.monotonic() + self._bench.measured_s)
            return _between(before, self._count())

    def _published(self, interrupt: Interrupt) -> Measurement:
        """Publish at the cadence, and count from the beginning of the second publication to that of the last."""
        counts: list[tuple[int, float]] = []
        handovers_s: list[float] = []
        begins = time.monotonic()
        while True:
            self._wait(begins)
            begins = max(begins, time.monotonic())
            counts.append(self._count())
            if len(counts) > 2 and counts[-1][1] - counts[1][1] >= self._bench.measured_s:
                return _between(counts[1], counts[-1], handovers_s=tuple(handovers_s[1:]))
            self._hand_over(interrupt)
            handovers_s.append(time.monotonic() - begins)
            begins += self._bench.publish_every_s

    def _hand_over(self, interrupt: Interrupt) -> None:
        """Publish the same weights once more, as a new version where there is a batch that could have been trained."""
        batch_id = next(self._batches)
        is_taken = self._cluster.queue.take(batch_id=batch_id, wait_s=0.0) is not None
        self._version += is_taken

        def stamp_ledger() -> None:
            if is_taken:
                self._cluster.queue.complete_step(batch_id=batch_id)

        hand_over(
            self._cluster.engines,
            publish=self._cluster.publish,
            staged=self._config.weights.staged,
            stamp_ledger=stamp_ledger,
            version=self._version,
            interrupt=interrupt,
            events=EventBuffer("handover"),
        )
        self._cluster.engines.finish()

    @contextmanager
    def _worker(self) -> Iterator[None]:
        self._ask("begin_worker")
        self._serving = self._actor.run.remote()
        self._ask("resume")
        yield
        self._ask("end_worker")
        result(self._serving)
        self._cluster.queue.forget(worker=_LANE)
        self._drop_ready()

    @contextmanager
    def _alone(self) -> Iterator[None]:
        self._serving = self._actor.run_alone.remote()
        yield
        self._ask("end_alone")
        result(self._serving)

    def _drop_ready(self) -> None:
        """Let the queue forget the groups that are done."""
        queue = self._cluster.queue
        while queue.take(batch_id=(batch_id := next(self._batches)), wait_s=0.0) is not None:
            queue.complete_step(batch_id=batch_id)
            self._version += 1

    def _wait(self, until: float) -> None:
        """Collect events as a controller does, until a time; raise what ended generation or verification."""
        while (left := until - time.monotonic()) > 0:
            ended, _ = ray.wait([self._serving, *self._verifying], timeout=min(left, _POLL_S))
            for reference in ended:
                result(reference)
            self._cluster.collect()

    def _count(self) -> tuple[int, float]:
        tokens, at = self._ask("count")
        return tokens, at

    def _ask(self, method: str) -> Any:
        return result(getattr(self._actor, method).remote())


class _RolloutActor(RolloutActor):
    """A rollout actor that can also drive its engine the plain way, and have several workers one after another."""

    def __init__(self, config: Config, **arguments: Any) -> None:
        super().__init__(config, **arguments)
        self._served = asyncio.Event()
        self._served.set()

    async def count(self) -> tuple[int, float]:
        """Tokens so far, and seconds of this process's clock."""
        return self._engine.tokens_generated, time.monotonic()

    async def begin_worker(self) -> None:
        """Have a worker again, after `end_worker`."""
        self._make_worker(load_workflows(self._config))

    async def end_worker(self) -> None:
        """End `run` and every request; the engine stays, paused and empty."""
        await self._worker.stop()
        await self._served.wait()
        await self._until_resumed()
        await self._engine.reset()
        self._client.close()

    async def run(self) -> None:
        """Serve until `end_worker`."""
        self._served.clear()
        try:
            await super().run()
        finally:
            self._served.set()

    async def run_alone(self) -> None:
        """Keep as many requests in flight as the worker has slots, until `end_alone`; what comes out is let go."""
        config = self._config
        if not hasattr(self, "_requests"):
            prompts = load_sources(config, self._engine.tokenizer, "train")
            self._requests = enumerate(plain_requests(config, make_cursor(config, prompts)))
        await self._engine.resume()
        self._alone = asyncio.gather(*(self._one_in_flight() for _ in range(config.rollout.slots)))
        with suppress(asyncio.CancelledError):
            await self._alone

    async def end_alone(self) -> None:
        """End `run_alone`; the engine stays, paused and empty."""
        self._alone.cancel()
        await self._engine.reset()

    async def _one_in_flight(self) -> None:
        llm = self._engine._llm
        for number, (prompt_ids, sampling) in self._requests:
            async for _ in llm.generate({"prompt_token_ids": prompt_ids}, sampling_params(sampling), f"alone-{number}"):
                pass


def _between(
    before: tuple[int, float], after: tuple[int, float], *, handovers_s: tuple[float, ...] = ()
) -> Measurement:
    return Measurement(tokens=after[0] - before[0], seconds=after[1] - before[1], handovers_s=handovers_s)
