"""`areal-lite bench handover`: how long an engine is paused for new weights, over model sizes.

The hand-over is that of a run, to an engine that plain requests keep busy. Nobody trains and nobody asks the queue for
work; it only answers, once in every hand-over, as it does when its version moves.
"""

import functools
import itertools
import statistics
import tempfile
import time
import timeit
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers

from areal_lite.config.recipe import Config
from areal_lite.errors import ConfigError
from areal_lite.events import Event
from areal_lite.launch.bench.harness import finish, in_turns, ratios
from areal_lite.launch.bench.plan import planned_config
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

_MAX_CONTEXT = 256
_PROMPT_TOKENS = 16
"""Room for the longest prompt of the recipe, which nobody asks for."""


class Size(NamedTuple):
    """A built-in model's shape."""

    width: int
    """Hidden size."""
    layers: int

    def __str__(self) -> str:
        return f"{self.width}x{self.layers}"


@dataclass(frozen=True, kw_only=True)
class HandoverBench:
    """Settings of the bench."""

    sizes: Sequence[Size]
    repeats: int
    """Hand-overs per model."""
    requests: int
    """In flight all the time."""
    warm: int = 3
    """Hand-overs before them that do not count."""
    new_tokens: int = _MAX_CONTEXT - _PROMPT_TOKENS
    """Of each request."""
    every_s: float = 0.3
    """Seconds of generation between two hand-overs."""
    copies: int = 5
    """Memory copies behind each hand-over."""


def bench(settings: HandoverBench, *, out: Path) -> int:
    """Measure one model after another."""
    from areal_lite.launch.run.train import ray_session

    def measure(size: Size) -> dict[str, Any]:
        return measure_handovers(settings, size, logs=out / "logs" / str(size))

    with ray_session():
        rows = [row for (row,) in in_turns(settings.sizes, repeats=1, measure=measure).values()]
    # No targets: what a pause may take depends on what else there is to do; see `bench modes`.
    title = f"hand-over of weights to an engine with {settings.requests} requests in flight; milliseconds"
    described = asdict(settings) | {"sizes": [size._asdict() for size in settings.sizes]}
    return finish("handover", title, rows, settings=described, out=out)


def parse_size(text: str) -> Size:
    """Return the size that `WIDTHxLAYERS` names; a `ConfigError` says so where it names none."""
    width, _, layers = text.partition("x")
    if not (width.isdecimal() and layers.isdecimal() and int(width) >= 64 and int(width) % 64 == 0 and int(layers) > 0):
        raise ConfigError(f"a model is WIDTHxLAYERS, the width a multiple of 64, got {text!r}: try 256x4")
    return Size(int(width), int(layers))


def measure_handovers(settings: HandoverBench, size: Size, *, logs: Path) -> dict[str, Any]:
    """Return a model's row; needs a `ray_session`."""
    from areal_lite.launch.bench.one_engine import one_engine  # imports vLLM

    config = _config(settings, size)
    transformers.utils.logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as cache:
        folder = ensure_warm_start(config, cache_dir=Path(cache))
        tensors = list(transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).parameters())
        flat = torch.cat([tensor.detach().reshape(-1) for tensor in tensors])
        with one_engine(config, model_folder=folder, logs=logs) as engine:
            handovers = list(_handovers(settings, engine, flat=flat))
    events, copies_s = zip(*handovers[settings.warm :], strict=True)
    return row(size, parameters=flat.numel(), size_bytes=flat.numel() * flat.itemsize,
               handovers=list(map(parts, events)), copies_s=copies_s)  # fmt: skip


def _handovers(settings: HandoverBench, engine: Any, *, flat: Any) -> Iterator[tuple[list[Event], float]]:
    """Yield the events of each hand-over, and the time of a memory copy of the same bytes behind it."""
    requests = functools.partial(_requests, settings.requests, settings.new_tokens)
    with engine.filled(requests, settings.requests, alone=False):
        while engine.ask("count")[0] < settings.requests:
            time.sleep(0.01)
        copy = torch.empty_like(flat)
        for version in range(1, 1 + settings.warm + settings.repeats):
            time.sleep(settings.every_s)
            engine.ask("collect")
            stamp = engine.cluster.queue.status
            published = engine.publish(version=version, interrupt="recompute", stamp_ledger=stamp)
            events, _ = engine.ask("collect")
            threads = torch.get_num_threads()
            torch.set_num_threads(1)  # the engine has the other cores
            copies_s = timeit.repeat(functools.partial(copy.copy_, flat), number=1, repeat=settings.copies)
            torch.set_num_threads(threads)
            yield [*published, *events], statistics.median(copies_s)


def _requests(
    in_flight: int, new_tokens: int, _config: Config, _tokenizer: Any
) -> Iterator[tuple[list[int], Sampling]]:
    """Yield requests, of different lengths at first, so that they do not all end at the same time."""
    for number in itertools.count():
        longest = 1 + number * 7 % new_tokens if number < in_flight else new_tokens
        yield [2 + number % 10] * 8, Sampling(max_new_tokens=longest, temperature=1.0, ignore_end=True)


def _config(settings: HandoverBench, size: Size) -> Config:
    """Return a recipe for one model: random weights, one engine, one trainer rank, gloo."""
    changes = {
        "model.max_context": _MAX_CONTEXT, "model.warm_start.steps": 0, "model.warm_start.hidden_size": size.width,
        "model.warm_start.num_layers": size.layers, "rollout.slots": max(settings.requests, 1),
        "rollout.max_new_tokens": settings.new_tokens,
    }  # fmt: skip
    return planned_config("arith_cpu", str(size), [changes])


def parts(events: Iterable[Event]) -> dict[str, float]:
    """Return the seconds of each part of one hand-over, from the events of its lane and of one engine's."""
    times = {event["kind"]: event["time"] for event in events}
    return {part: times[end] - times[start] for part, (start, end) in PARTS.items()}


def row(
    size: Size, *, parameters: int, size_bytes: int, handovers: Sequence[Mapping[str, float]], copies_s: Sequence[float]
) -> dict[str, Any]:
    """Return a model's row: `handovers` from `parts`, and the time of a memory copy of the same bytes behind each."""
    return {
        **size._asdict(),
        "parameters": parameters,
        "size_bytes": size_bytes,
        **{part: [handover[part] for handover in handovers] for part in PARTS},
        "copy_s": list(copies_s),
        "over_copy": ratios((handover["paused_s"] for handover in handovers), copies_s),
    }
