"""What `areal-lite bench handover` runs: the hand-over of a run, to an engine that is kept busy by plain requests.

The processes are those of a run. Nobody trains and nobody asks the queue for work; it only answers, once in every
hand-over, as it does when its version moves.
"""

import asyncio
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers

from areal_lite.actors.calls import result
from areal_lite.actors.rollout import RolloutActor
from areal_lite.config.recipe import Config
from areal_lite.events import Event, EventBuffer
from areal_lite.launch.bench.handover import HandoverBench, Size, bench_config, parts, row
from areal_lite.launch.run.cluster import Cluster
from areal_lite.rollout.engine import Sampling
from areal_lite.train.warm_start import ensure_warm_start
from areal_lite.weights.handover import hand_over

__all__ = ["measure_handovers"]

_LANE = "rollout/0"


def measure_handovers(bench: HandoverBench, size: Size, *, logs: Path) -> dict[str, Any]:
    """Return a model's row; needs a `ray_session`.

    Args:
        bench: How often, and what is generated meanwhile.
        size: The model, which is made first.
        logs: Gets a log per process.

    Raises:
        ArealLiteError: Something does not start, or an engine is lost.
    """
    config = bench_config(bench, size)
    transformers.utils.logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as cache:
        folder = ensure_warm_start(config, cache_dir=Path(cache))
        tensors = list(transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).parameters())
        with _busy_cluster(bench, config, model_folder=folder, logs=logs) as (cluster, actor):
            handovers, copies_s = [], []
            flat = torch.cat([tensor.detach().reshape(-1) for tensor in tensors])
            copy = torch.empty_like(flat)
            for number in range(bench.warm + bench.repeats):
                time.sleep(bench.every_s)
                events = _hand_over(cluster, actor, version=number + 1)
                copy_s = statistics.median(_timed_copy(flat, copy) for _ in range(bench.copies))
                if number >= bench.warm:
                    handovers.append(parts(events))
                    copies_s.append(copy_s)
    return row(
        size,
        parameters=flat.numel(),
        size_bytes=flat.numel() * flat.itemsize,
        handovers=handovers,
        copies_s=copies_s,
    )


@contextmanager
def _busy_cluster(
    bench: HandoverBench, config: Config, *, model_folder: Path, logs: Path
) -> Iterator[tuple[Cluster, Any]]:
    """Yield the processes of a run, the engine generating."""
    logs = logs.resolve()
    logs.mkdir(parents=True, exist_ok=True)
    cluster = Cluster(config, model_folder=model_folder, log_folder=logs, queue_state=None, rollout_actor=_BusyActor)
    try:
        cluster.start(checkpoint=None, on_progress=lambda _: None)
        actor = cluster.engines.handles[_LANE]
        result(actor.keep_busy.remote(bench.requests, bench.new_tokens))
        yield cluster, actor
        result(actor.end.remote())
    finally:
        cluster.stop()


def _hand_over(cluster: Cluster, actor: Any, *, version: int) -> list[Event]:
    """Hand over; returns the events of it."""
    lane = EventBuffer("handover")
    result(actor.collect.remote())
    hand_over(
        cluster.engines,
        publish=cluster.publish,
        staged=True,
        stamp_ledger=lambda: _ask(cluster),
        version=version,
        interrupt="recompute",
        events=lane,
    )
    cluster.engines.finish()
    events, _ = result(actor.collect.remote())
    return [*lane.drain(), *events]


def _ask(cluster: Cluster) -> None:
    """Send a message to the queue and wait for its answer: what moving the ledger's version takes."""
    cluster.queue.status()


def _timed_copy(source: torch.Tensor, target: torch.Tensor) -> float:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the engine has the other cores
    begins = time.perf_counter()
    target.copy_(source)
    seconds = time.perf_counter() - begins
    torch.set_num_threads(threads)
    return seconds


class _BusyActor(RolloutActor):
    """A rollout actor whose engine is busy without a queue."""

    async def keep_busy(self, requests: int, new_tokens: int) -> None:
        """Keep so many requests in flight until `end`, and return once all generate."""
        self._busy = [asyncio.create_task(self._generate(seed, new_tokens)) for seed in range(requests)]
        while self._engine.tokens_generated < requests:
            self._engine.raise_if_dead()
            await asyncio.sleep(0.01)

    async def end(self) -> None:
        """End them."""
        for task in self._busy:
            task.cancel()
        await asyncio.wait(self._busy) if self._busy else None

    async def _generate(self, seed: int, new_tokens: int) -> None:
        # Of different lengths at first, so that they do not all end at the same time.
        sampling = Sampling(max_new_tokens=1 + seed * 7 % new_tokens, temperature=1.0, ignore_end=True)
        while True:
            await self._engine.generate([2 + seed % 10] * 8, sampling)
            sampling = Sampling(max_new_tokens=new_tokens, temperature=1.0, ignore_end=True)
