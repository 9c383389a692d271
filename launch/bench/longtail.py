"""A workflow for benchmarks: real decoding of completions whose lengths are drawn from a log-normal distribution.

How long a model's answers are decides what asynchrony gains, and a tiny model's are all short. So each sample gets a
length of its own, and the engine decodes exactly that many tokens, end-of-sequence tokens included. Nothing useful is
learned from such samples: name this workflow in recipes of benchmarks only (`launch/recipes/longtail_cpu.yaml`).
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

    At `sigma` 0 all are alike, at 0.9 one of ten is longer than 3.2 medians.
    """
    return min(longest, max(1, round(random.Random(seed).lognormvariate(math.log(median), sigma))))


def _check(*, median: float, sigma: float) -> None:
    if median < 1 or sigma < 0:
        raise ValueError(f"median must be at least 1 and sigma at least 0, got {median} and {sigma}")


@checked_by(_check)
async def drawn_length(engine: EpisodeEngine, row: Mapping[str, Any], *, median: float, sigma: float) -> list[Turn]:
    """Generate one completion of a length that `draw_length` draws, at most the room there is.

    In an evaluation it is a plain one.
    """
    if engine.seed is None:
        return [await engine.generate(engine.prompt_ids)]
    length = draw_length(engine.seed, median=median, sigma=sigma, longest=engine.room)
    return [await engine.generate(engine.prompt_ids, max_new_tokens=length, ignore_end=True)]
