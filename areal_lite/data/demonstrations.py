"""Worked tasks that the built-in model learns before a run, of every source of the recipe that has some.

Chained sums are worked out, more or less carefully; other sources bring a demonstration with each task, files none.
"""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from areal_lite.config.data import FILE_SOURCES, SourceConfig
from areal_lite.config.offline import OfflineConfig
from areal_lite.config.recipe import Config
from areal_lite.config.sections import WarmStartConfig
from areal_lite.data.arith import CHARACTERS, worked_solutions
from areal_lite.data.completions import Example
from areal_lite.data.encode import Tokenizer, encode_texts
from areal_lite.data.sources import load_tasks
from areal_lite.data.tasks import Task
from areal_lite.errors import ConfigError

PRINTABLE = "\n" + "".join(map(chr, range(ord(" "), ord("~") + 1)))
"""ASCII without control characters but the end of a line; what chained sums are made of is among it."""


def demonstrations(config: Config | OfflineConfig, *, count: int) -> list[Task]:
    """Return `count` worked tasks of the recipe's sources, in the shares that training has; a short source is repeated.

    Their prompts are inside the source's template, as in training.

    Raises:
        ConfigError: No source has any, and `model.warm_start.steps` is not 0.
    """
    warm_start, shown = config.model.warm_start, list[Task]()
    teaching = {name: source for name, source in _sources(config).items() if source.source not in FILE_SOURCES}
    weights = {name: getattr(source, "weight", 1.0) for name, source in teaching.items()}  # one alone has none
    for name, source in teaching.items():
        where = config.data.place_of(name) if isinstance(config, Config) else "data"
        share = max(1, round(count * weights[name] / sum(weights.values())))
        shown += _of_source(source, share, settings=warm_start, where=where)
    if not shown and warm_start.steps > 0:
        raise ConfigError(
            "the warm start of model.path=builtin:arith learns from worked tasks, the recipe's sources bring none: set "
            "model.path to a model folder, give the rows of a function a column `demonstration` (docs/data.md), or set "
            "model.warm_start.steps=0 to begin with random weights"
        )
    return shown


def alphabet(config: Config | OfflineConfig) -> str:
    """Return the characters of the built-in model's vocabulary: all of ASCII where there is more than chained sums."""
    sources = _sources(config).values()
    texts = {source.template.replace("{prompt}", "") for source in sources}
    is_narrow = all(source.source == "arith" for source in sources) and set("".join(texts)) <= set(CHARACTERS)
    return CHARACTERS if is_narrow else PRINTABLE


def turns_of(task: Task) -> list[tuple[bool, str]]:
    """Return the texts after a worked task's prompt, each with True if the model writes it, False if others do."""
    given = task.demonstration or ""
    if isinstance(given, str):
        return [(True, given)]
    return [(turn["role"] == "assistant", turn["content"]) for turn in given]


def content_of(task: Task) -> dict[str, Any]:
    """Return all that makes a worked task another one than others, as JSON."""
    if isinstance(task.demonstration, str):
        return {"prompt": task.prompt, "solution": task.demonstration, "answer": task.answer}
    return {"prompt": task.prompt, "turns": turns_of(task)}


def turn_examples(shown: Sequence[Task], tokenizer: Tokenizer) -> list[Example]:
    """Make one example of each of the model's turns; all earlier turns are its prompt.

    So the model learns only its own words and the end-of-sequence token after them, where generation stops. A reply of
    the environment follows that token as plain text, as in an episode.
    """
    texts = [(text, task.origin) for task in shown for text in (task.prompt, *(text for _, text in turns_of(task)))]
    ids = iter(encode_texts([text for text, _ in texts], origins=[origin for _, origin in texts], tokenizer=tokenizer))
    examples = []
    for task in shown:
        context = next(ids)
        for is_own, _ in turns_of(task):
            turn = next(ids) + [tokenizer.eos_token_id] * is_own
            if is_own:
                examples.append(Example(context, (turn,)))
            context = context + turn
    return examples


def _sources(config: Config | OfflineConfig) -> Mapping[str, SourceConfig]:
    return config.data.sources if isinstance(config, Config) else {"arith": SourceConfig(arith=config.data.arith)}


def _of_source(source: SourceConfig, count: int, *, settings: WarmStartConfig, where: str) -> list[Task]:
    if source.source == "arith":
        tasks = worked_solutions(source.arith, count, seed=0, carelessness=settings.carelessness)
    else:
        tasks = [task for task in load_tasks(source, "train", where=where) if task.demonstration is not None]
    shown = [replace(task, prompt=source.template.replace("{prompt}", task.prompt)) for task in tasks]
    return list(itertools.islice(itertools.cycle(shown), count))
