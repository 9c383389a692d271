"""The requests of a rollout worker without the worker: what `bench rollout` gives vLLM alone."""

import functools
from collections.abc import Callable, Iterator
from typing import Protocol

from areal_lite.config.recipe import Config
from areal_lite.errors import ConfigError
from areal_lite.launch.bench.longtail import draw_length, drawn_length
from areal_lite.rollout.engine import Sampling, token_limit
from areal_lite.rollout.runner import load_workflows
from areal_lite.rollout.worker import sample_seed
from areal_lite.rollout.workflows import single_turn
from areal_lite.types import Prompt

__all__ = ["plain_requests", "sampling_of"]


class _Cursor(Protocol):
    def next(self) -> Prompt: ...


def plain_requests(config: Config, cursor: _Cursor) -> Iterator[tuple[list[int], Sampling]]:
    """Yield prompt and sampling of each request that a worker would make, in the order of its leases, without end.

    Args:
        config: The recipe.
        cursor: Like that of the worker's queue.
    """
    sampling = sampling_of(config)
    while True:
        prompt = cursor.next()
        for index in range(config.queue.samples_per_group):
            seed = sample_seed(config.run.seed, f"{prompt.prompt_id}#0", index)
            yield list(prompt.token_ids), sampling(prompt, seed)


def sampling_of(config: Config) -> Callable[[Prompt, int], Sampling]:
    """Return the recipe's workflow as a function from prompt and seed to the one request that it makes.

    Raises:
        ConfigError: The workflow is another one than can be written so.
        PluginError: It cannot be loaded.
    """
    workflows = load_workflows(config)
    function, arguments = workflows.loaded[workflows.default]
    if function not in (single_turn, drawn_length):
        raise ConfigError(
            "bench rollout compares with single requests to vLLM, so rollout.workflow must be single_turn or "
            f"areal_lite.launch.bench.longtail:drawn_length, got {config.rollout.workflow}: choose another recipe"
        )

    def sampling(prompt: Prompt, seed: int, *, draws: bool) -> Sampling:
        longest = token_limit(prompt, default=config.rollout.max_new_tokens)
        return Sampling(
            max_new_tokens=draw_length(seed, longest=longest, **arguments) if draws else longest,
            temperature=config.rollout.temperature,
            seed=seed,
            ignore_end=draws,
        )

    return functools.partial(sampling, draws=function is drawn_length)
