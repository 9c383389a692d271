"""A workflow for benchmarks: real decoding of completions whose lengths are drawn from a log-normal distribution.

The lengths of a model's answers decide what asynchrony gains, and a tiny model's answers are all short. So each sample
gets a length of its own, and the engine decodes exactly that many tokens, end-of-sequence tokens included. Such samples
teach nothing: use this workflow in benchmarks only (`launch/recipes/longtail_cpu.yaml`).
"""

import math
import random
from collections.abc import Mapping
from typing import Any

from areal_lite.rollout.episode import EpisodeEngine, Turn
from areal_lite.rollout.workflows import checked_by

LONGTAIL = "areal_lite.launch.bench.longtail:drawn_length"
"""The workflow below, as recipes name it."""


def draw_length(seed: int, *, median: float, sigma: float, longest: int) -> int:
    """Draw one length, `exp(N(log median, sigma^2))`, rounded and cut to `1..longest`; the same seed, the same length.

    At `sigma` 0 all are equal, at 0.9 one in ten is longer than 3.2 medians.
    """
    return min(longest, max(1, round(random.Random(seed).lognormvariate(math.log(median), sigma))))


def _check(*, median: float, sigma: float) -> None:
    if median < 1 or sigma < 0:
        raise ValueError(f"median must be at least 1 and sigma at least 0, got {median} and {sigma}")


@checked_by(_check)
async def drawn_length(engine: EpisodeEngine, row: Mapping[str, Any], *, median: float, sigma: float) -> list[Turn]:
    """Generate one completion of a length drawn by `draw_length`, at most the room in the context.

    In an evaluation the length is the model's own.
    """
    if engine.seed is None:
        return [await engine.generate(engine.prompt_ids)]
    length = draw_length(engine.seed, median=median, sigma=sigma, longest=engine.room)
    return [await engine.generate(engine.prompt_ids, max_new_tokens=length, ignore_end=True)]
