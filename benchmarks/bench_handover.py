"""How long an engine is paused for new weights, over model sizes (about 4 minutes).

    python benchmarks/bench_handover.py 64x4 256x4

The hand-over is that of a run, to an engine that plain requests keep busy. Nothing trains, and nothing asks the queue
for work: it only answers once in every hand-over, as when its version moves. Each pause is compared with a plain memory
copy of the same bytes. The models have random weights.
"""

import functools
import itertools
import statistics
import tempfile
import time
import timeit
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any

import measuring
import torch
import transformers
import typer
from measuring import Size, parse_size
from one_engine import OneEngine, one_engine

from areal_lite.config.recipe import Config
from areal_lite.events import Event
from areal_lite.launch.bench.harness import ratios
from areal_lite.launch.bench.plan import planned_config
from areal_lite.launch.run.ray_session import ray_session
from areal_lite.rollout.engine import Sampling
from areal_lite.train.warm_start import ensure_warm_start

PARTS: dict[str, tuple[str, str]] = {
    "staging_s": ("handover_start", "handover_published"),
    "pausing_s": ("pause", "paused"),
    "loading_s": ("update_received", "update_loaded"),
    "resuming_s": ("update_loaded", "resumed"),
    "paused_s": ("pause", "resumed"),
}
"""Parts of a hand-over, from one event to another. While the weights are staged the engine generates."""
DEFAULT_SIZES = ("64x4", "128x4", "256x4", "512x4", "512x8")
WARM = 3
"""Hand-overs of each model that do not count."""
BETWEEN_S = 0.3
"""Seconds of generation between two hand-overs."""
COPIES = 5
"""Memory copies after each hand-over."""
_MAX_CONTEXT = 256
_NEW_TOKENS = _MAX_CONTEXT - 16
"""Of each request; the rest is room for the longest prompt of the recipe, which nobody asks for."""


def main(
    sizes: Annotated[list[str] | None, typer.Argument(metavar="[WIDTHxLAYERS]...")] = None,
    repeats: measuring.Repeats = 20,
    requests: int = 16,
    out: measuring.Out = Path("runs/bench-handover"),
) -> None:
    """Measure staging, pause, load and resume over model sizes, with so many requests in flight."""
    shapes = list(map(parse_size, sizes or DEFAULT_SIZES))

    def measure(size: Size) -> dict[str, Any]:
        return measure_handovers(size, repeats=repeats, requests=requests, logs=out / "logs" / str(size))

    with ray_session():
        rows = [row for (row,) in measuring.in_turns(shapes, repeats=1, measure=measure).values()]
    # No targets: an acceptable pause depends on the length of a step; see `bench modes`.
    title = f"hand-over of weights to an engine with {requests} requests in flight; milliseconds"
    settings = {
        "sizes": list(map(str, shapes)),
        "repeats": repeats,
        "requests": requests,
        "warm": WARM,
        "new_tokens": _NEW_TOKENS,
    }
    measuring.finish("handover", title, rows, settings=settings, out=out)


def measure_handovers(size: Size, *, repeats: int, requests: int, logs: Path) -> dict[str, Any]:
    """Return a model's row: seconds of each part of every hand-over, and of a memory copy of the same bytes after it.

    Needs a `ray_session`.
    """
    config = _config(size, requests)
    transformers.utils.logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as cache:
        folder = ensure_warm_start(config, cache_dir=Path(cache))
        tensors = list(transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).parameters())
        flat = torch.cat([tensor.detach().reshape(-1) for tensor in tensors])
        with one_engine(config, model_folder=folder, logs=logs) as engine:
            measured = list(_handovers(engine, flat=flat, count=WARM + repeats, requests=requests))[WARM:]
    times, copies_s = [parts(events) for events, _ in measured], [copy_s for _, copy_s in measured]
    return {
        **size._asdict(),
        "parameters": flat.numel(),
        "size_bytes": flat.numel() * flat.itemsize,
        **{part: [one[part] for one in times] for part in PARTS},
        "copy_s": copies_s,
        "over_copy": ratios((one["paused_s"] for one in times), copies_s),
    }


def _handovers(engine: OneEngine, *, flat: Any, count: int, requests: int) -> Iterator[tuple[list[Event], float]]:
    """Yield the events of each hand-over, and the time of a memory copy of the same bytes after it."""
    with engine.filled(functools.partial(_requests, requests), requests, alone=False):
        while engine.ask("count")[0] < requests:
            time.sleep(0.01)
        copy = torch.empty_like(flat)
        for version in range(1, 1 + count):
            time.sleep(BETWEEN_S)
            engine.ask("collect")
            stamp = engine.cluster.queue.status
            published = engine.publish(version=version, interrupt="recompute", stamp_ledger=stamp)
            events, _ = engine.ask("collect")
            threads = torch.get_num_threads()
            torch.set_num_threads(1)  # the engine has the other cores
            copies_s = timeit.repeat(functools.partial(copy.copy_, flat), number=1, repeat=COPIES)
            torch.set_num_threads(threads)
            yield [*published, *events], statistics.median(copies_s)


def _requests(in_flight: int, _config: Config, _tokenizer: Any) -> Iterator[tuple[list[int], Sampling]]:
    """Yield requests, of different lengths at first, so that they do not all end at the same time."""
    for number in itertools.count():
        longest = 1 + number * 7 % _NEW_TOKENS if number < in_flight else _NEW_TOKENS
        yield [2 + number % 10] * 8, Sampling(max_new_tokens=longest, temperature=1.0, ignore_end=True)


def _config(size: Size, requests: int) -> Config:
    """Return a recipe for one model: random weights, one engine, one trainer rank, gloo."""
    changes = {
        "model.max_context": _MAX_CONTEXT, "model.warm_start.steps": 0, "model.warm_start.hidden_size": size.width,
        "model.warm_start.num_layers": size.layers, "rollout.slots": max(requests, 1),
        "rollout.max_new_tokens": _NEW_TOKENS,
    }  # fmt: skip
    return planned_config("arith_cpu", str(size), [changes])


def parts(events: Iterable[Event]) -> dict[str, float]:
    """Return the seconds of each part of one hand-over, from the events of its lane and of one engine's."""
    times = {event["kind"]: event["time"] for event in events}
    return {part: times[end] - times[start] for part, (start, end) in PARTS.items()}


if __name__ == "__main__":
    measuring.run(main)
