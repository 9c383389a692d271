"""Tasks of the families that the package reasoning-gym generates, with what their own scorers need as two columns.

A family makes item `i` from `seed + i`, so that seeds close to each other give the same items: the seeds here are
hashes. A question held out is never among the training ones, whatever the seeds give.
"""

import hashlib
import itertools
from collections.abc import Iterator, Mapping
from typing import Any

from areal_lite.config.data import GymConfig, Split
from areal_lite.config.suggestion import suggestion
from areal_lite.errors import ConfigError

_ROUNDS = 20
"""Sets drawn until there are enough questions; families of few different ones must end in an error."""


def gym_rows(settings: GymConfig, split: Split, *, where: str) -> list[dict[str, Any]]:
    """Generate the rows of a split.

    Held-out questions differ from each other; training questions may repeat where a family has only few. A row's
    demonstration is the answer alone.

    Raises:
        ConfigError: The package or the family is missing, its arguments are wrong, or it has too few questions.
    """
    held_out: dict[str, Mapping[str, Any]] = {}
    for entry in _entries(settings, "eval", where=where):
        held_out.setdefault(entry["question"], entry)
        if len(held_out) == settings.eval_size:
            break
    others = (entry for entry in _entries(settings, "train", where=where) if entry["question"] not in held_out)
    chosen = list(held_out.values() if split == "eval" else itertools.islice(others, settings.train_size))
    if len(held_out) < settings.eval_size or (split == "train" and len(chosen) < settings.train_size):
        raise ConfigError(
            f"{where}.reasoning_gym must give {settings.eval_size} different held-out questions and others to train "
            f"on, got {len(held_out)} and {len(chosen)} of the family {settings.dataset} after {_ROUNDS} sets: lower "
            "train_size or eval_size, or set arguments that allow more"
        )
    return [
        {
            "question": entry["question"],
            "answer": "" if entry["answer"] is None else str(entry["answer"]),
            "demonstration": None if entry["answer"] is None else str(entry["answer"]),
            "reasoning_gym_dataset": settings.dataset,
            "reasoning_gym_entry": _with_text_keys(entry),
        }
        for entry in chosen
    ]


def _entries(settings: GymConfig, split: str, *, where: str) -> Iterator[Mapping[str, Any]]:
    """Yield the items of several sets: a set's size must be known before, and how many repeat is not."""
    size = settings.eval_size if split == "eval" else settings.train_size
    for number in range(_ROUNDS):
        digest = hashlib.sha256(f"{settings.dataset}/{settings.seed}/{split}/{number}".encode()).digest()
        dataset = _create(settings, seed=int.from_bytes(digest[:4]) >> 2, size=size, where=where)
        yield from (dataset[index] for index in range(size))


def _create(settings: GymConfig, *, seed: int, size: int, where: str) -> Any:
    try:
        from reasoning_gym.factory import DATASETS, create_dataset
    except ImportError as error:
        raise ConfigError(
            f"{where}.source=reasoning_gym needs the package reasoning-gym, it cannot be imported ({error}): "
            "pip install reasoning-gym"
        ) from error
    if settings.dataset not in DATASETS:
        raise ConfigError(
            f"{where}.reasoning_gym.dataset must be one of reasoning-gym's {len(DATASETS)} families, got "
            f"{settings.dataset!r}{suggestion(str(settings.dataset), DATASETS)}"
        )
    try:
        return create_dataset(settings.dataset, seed=seed, size=size, **settings.arguments)
    except Exception as error:  # families check their settings by assertions and by exceptions of many kinds
        raise ConfigError(
            f"{where}.reasoning_gym.arguments must be settings of {settings.dataset}, got {settings.arguments}: "
            f"{type(error).__name__}: {error}"
        ) from error


def _with_text_keys(value: Any) -> Any:
    """Messages have text keys alone; scorers look at no others."""
    if isinstance(value, Mapping):
        return {str(key): _with_text_keys(item) for key, item in value.items()}
    return [_with_text_keys(item) for item in value] if isinstance(value, list | tuple) else value
