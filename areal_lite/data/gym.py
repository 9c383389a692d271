"""Tasks of the families that the package reasoning-gym generates, with what their own scorers need as two columns.

A family makes item `i` from `seed + i`, so that seeds close to each other give the same items: the seeds here are
hashes. A question held out is never among the training ones, whatever the seeds give.
"""

import hashlib
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

from areal_lite.config.data import Split
from areal_lite.config.suggestion import suggestion
from areal_lite.errors import ConfigError

_ROUNDS = 20
"""Sets drawn until there are enough questions; families of few different ones must end in an error."""


def rows(
    split: Split, *, dataset: str, train_size: int = 2048, eval_size: int = 128, seed: int = 0, **settings: Any
) -> list[dict[str, Any]]:
    """Generate the rows of a split.

    Held-out questions differ from each other; training questions may repeat where a family has only few. A row's
    demonstration is the answer alone.

    Args:
        dataset: Name of a family, e.g. `chain_sum`.
        train_size: Training problems.
        eval_size: Held-out problems.
        seed: Of both splits.
        settings: Of the family, e.g. `max_terms=3`.

    Raises:
        ConfigError: The package or the family is missing, its settings are wrong, or it has too few questions.
    """
    held_out: dict[str, Mapping[str, Any]] = {}
    for entry in _entries(dataset, settings, stream=f"{seed}/eval", size=eval_size):
        held_out.setdefault(entry["question"], entry)
        if len(held_out) == eval_size:
            break
    drawn = _entries(dataset, settings, stream=f"{seed}/train", size=train_size)
    others = (entry for entry in drawn if entry["question"] not in held_out)
    chosen = list(held_out.values() if split == "eval" else islice(others, train_size))
    if len(chosen) < (eval_size if split == "eval" else train_size):
        raise ConfigError(
            f"source=reasoning_gym must give {eval_size} different held-out questions and {train_size} others, got "
            f"{len(chosen)} for {split} of the family {dataset} after {_ROUNDS} sets. Fix: lower train_size or "
            "eval_size in its arguments, or set arguments that allow more"
        )
    return [
        {
            "question": entry["question"],
            "answer": "" if entry["answer"] is None else str(entry["answer"]),
            "demonstration": None if entry["answer"] is None else str(entry["answer"]),
            "reasoning_gym_dataset": dataset,
            "reasoning_gym_entry": _with_text_keys(entry),
        }
        for entry in chosen
    ]


def _entries(dataset: str, settings: Mapping[str, Any], *, stream: str, size: int) -> Iterator[Mapping[str, Any]]:
    """Yield the items of several sets: a set's size must be known before, and how many repeat is not."""
    for number in range(_ROUNDS):
        digest = hashlib.sha256(f"{dataset}/{stream}/{number}".encode()).digest()
        made = _create(dataset, settings, seed=int.from_bytes(digest[:4]) >> 2, size=size)
        yield from (made[index] for index in range(size))


def _create(dataset: str, settings: Mapping[str, Any], **own: int) -> Any:
    try:
        from reasoning_gym.factory import DATASETS, create_dataset
    except ImportError as error:
        raise ConfigError(
            f"source=reasoning_gym needs the package reasoning-gym, it cannot be imported ({error}). Fix: pip install "
            "reasoning-gym"
        ) from error
    if dataset not in DATASETS:
        raise ConfigError(
            f"source=reasoning_gym needs arguments.dataset, one of reasoning-gym's {len(DATASETS)} families, got "
            f"{dataset!r}{suggestion(dataset, DATASETS)}"
        )
    try:
        return create_dataset(dataset, **settings, **own)
    except Exception as error:  # families check their settings by assertions and by exceptions of many kinds
        raise ConfigError(
            f"source=reasoning_gym needs arguments that are settings of {dataset}, got {dict(settings)}: "
            f"{type(error).__name__}: {error}"
        ) from error


def _with_text_keys(value: Any) -> Any:
    """Messages have text keys alone; scorers look at no others."""
    if isinstance(value, Mapping):
        return {str(key): _with_text_keys(item) for key, item in value.items()}
    return [_with_text_keys(item) for item in value] if isinstance(value, list | tuple) else value
