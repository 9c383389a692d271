"""Settings of the section `data` that make no sense together: one sentence each, with field, value and remedy.

Called by `combinations.py`, whenever a recipe is read; it loads nothing.
"""

import difflib
import re
from collections.abc import Collection, Iterable, Mapping, Sequence

from areal_lite.config.plugins import split_name
from areal_lite.config.sections import DataConfig, Section, SourceConfig
from areal_lite.errors import PluginError

__all__ = ["RESERVED_COLUMNS", "data_problems"]

RESERVED_COLUMNS = ("prompt", "completion", "answer", "messages")
"""What a verify function is called with beside a row's columns."""

_PATHS = {
    "jsonl": "the path of a JSONL file",
    "parquet": "the path of a Parquet file, or of a folder of them",
    "dataset": "the path of a datasets folder, or a hub id",
}
"""What `path` is, of the kinds that have one."""
_PATH_KEYS = ("path", "eval_path")
_ROW_KEYS = ("prompt_column", "answer_column", "columns", "max_bad_fraction")
_OWN_SECTIONS = ("arith", "reasoning_gym")
_MADE_FROM = {"seed": "seed", "size": "train_size and eval_size"}
"""Arguments that every family of reasoning-gym has, and the settings that take their place."""


def data_problems(data: DataConfig, *, verifiers: Collection[str], workflows: Collection[str]) -> Iterable[str]:
    """Yield one sentence (field, value, remedy) per impossible combination.

    Args:
        data: The section.
        verifiers: Names that need no module, the recipe's own and those of packages.
        workflows: The same of workflows.
    """
    known = {"verifier": sorted(verifiers), "workflow": sorted(workflows)}
    if not data.mix:
        yield from _source_problems(data, "data", known)
    for key in _changed(data, SourceConfig.model_fields) if data.mix else ():
        yield f"data.{key} is not read with data.mix: set it in each source of data.mix, or leave it out"
    for name, source in data.mix.items():
        if not re.fullmatch(r"[A-Za-z0-9_.-]+", name):
            yield f"a name in data.mix must be of letters, digits and _ . -, got {name!r}: it begins its prompts' ids"
        yield from _source_problems(source, f"data.mix.{name}", known)
    if data.curriculum.strength == 0:
        for key in _changed(data.curriculum, ("candidates", "memory")):
            yield (
                f"data.curriculum.{key}={getattr(data.curriculum, key)} is not read without data.curriculum.strength: "
                "set that too, or leave it out"
            )


def _source_problems(source: SourceConfig, where: str, known: Mapping[str, Sequence[str]]) -> Iterable[str]:
    kind = source.source
    if kind in _PATHS and source.path is None:
        yield f"{where}.source={kind} needs {where}.path, got none: give {_PATHS[kind]}"
    is_plugin = kind not in (*_PATHS, *_OWN_SECTIONS)
    if is_plugin:
        try:
            split_name(kind, kind="source")
        except PluginError as error:
            yield f"{where}.source: {error}"
    elif source.arguments:
        yield (
            f"{where}.arguments are not read with {where}.source={kind}, only with a plug-in's function: leave them out"
        )
    unread = () if kind in _PATHS else _PATH_KEYS if is_plugin else _PATH_KEYS + _ROW_KEYS
    for key in _changed(source, unread):
        yield (
            f"{where}.{key}={getattr(source, key)} is not read with {where}.source={kind}: set {where}.source=jsonl "
            "(or parquet, or dataset), or leave it out"
        )
    # The recipe of the demo has settings of its sums: who names another source on the command line need not undo them.
    for key in _changed(source, [name for name in _OWN_SECTIONS if name not in (kind, "arith")]):
        yield f"{where}.{key} is not read with {where}.source={kind}: leave it out, or set {where}.source={key}"
    if kind == "arith" and source.arith.min_terms > source.arith.max_terms:
        yield (
            f"{where}.arith.min_terms must be at most {where}.arith.max_terms, got {source.arith.min_terms} and "
            f"{source.arith.max_terms}: lower the one or raise the other"
        )
    if kind == "reasoning_gym":
        yield from _gym_problems(source, where)
    if "{prompt}" not in source.template:
        yield f"{where}.template must contain {{prompt}}, got {source.template!r}: put {{prompt}} where the prompt goes"
    for column, (low, high) in source.filter.ranges.items():
        if low > high:
            yield f"{where}.filter.ranges.{column} must be [lowest, highest], got [{low:g}, {high:g}]: turn it round"
    yield from _column_problems(source, where)
    yield from _name_problems(source, where, known)


def _gym_problems(source: SourceConfig, where: str) -> Iterable[str]:
    if source.reasoning_gym.dataset is None:
        yield (
            f"{where}.source=reasoning_gym needs {where}.reasoning_gym.dataset, got none: name a family, e.g. chain_sum"
        )
    for key, instead in _MADE_FROM.items():
        if key in source.reasoning_gym.arguments:
            yield (
                f"{where}.reasoning_gym.arguments must leave out {key}, got {source.reasoning_gym.arguments[key]}: set "
                f"{where}.reasoning_gym.{instead}"
            )


def _column_problems(source: SourceConfig, where: str) -> Iterable[str]:
    first = {old: new for new, old in reversed(source.columns.items())}
    for new, old in source.columns.items():
        if new in RESERVED_COLUMNS:
            yield f"{where}.columns.{new} has the name of a verifier argument: choose another name for {old!r}"
        if old in (source.prompt_column, source.answer_column):
            yield f"{where}.columns.{new}={old} is the prompt or the answer, which keep their names: leave it out"
        if first[old] != new:
            yield f"{where}.columns.{new}={old} is a second name of one column, beside {first[old]!r}: leave one out"


def _name_problems(source: SourceConfig, where: str, known: Mapping[str, Sequence[str]]) -> Iterable[str]:
    """The column of a row takes the same names: data must not choose code."""
    for kind, option in (("verifier", "verifier.named"), ("workflow", "rollout.workflows")):
        name = getattr(source, kind)
        if name is None or name in known[kind]:
            continue
        if ":" in name:
            yield f"{where}.{kind} must be a known name, got {name!r}: give the function a name in {option}"
            continue
        near = difflib.get_close_matches(name, known[kind], n=1, cutoff=0.4)
        yield (
            f"{where}.{kind} must be one of {', '.join(known[kind])}, got {name!r}"
            + (f": did you mean {near[0]}?" if near else f": add it to {option}")
        )


def _changed(section: Section, keys: Iterable[str]) -> list[str]:
    """Return the keys whose value is not the default one; a saved recipe names all of them."""
    defaults = {key: type(section).model_fields[key].get_default() for key in keys}
    return [key for key, default in defaults.items() if getattr(section, key) != default]
