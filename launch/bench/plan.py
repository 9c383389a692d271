"""A plan: many short runs of one recipe, in the order in which they are run.

A plan is a YAML file. `runs` names runs one by one, `grid` crosses axes, `seeds` repeats everything; with several of
them every combination is run. Settings are written as on the command line, `section.field: value`. Read by
`command.py`; nothing is started here.
"""

import itertools
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError

from areal_lite.config.reading import parse_override, read_recipe, read_yaml, set_value
from areal_lite.config.recipe import Config, parse_config
from areal_lite.config.section import Section
from areal_lite.config.suggestion import suggestion
from areal_lite.errors import ConfigError

__all__ = ["Plan", "PlannedRun", "choose_runs", "load_plan", "planned_runs", "shipped_plans"]

Settings = dict[str, Any]
"""`section.field` -> value."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._=-]*")


class Plan(Section):
    """Which runs there are.

    Example: `runs: {a: {}, b: {trainer.lr: 1e-3}}`, `seeds: [0, 1]` are the runs `a_seed-0`, `b_seed-0`, `a_seed-1`,
    `b_seed-1`; `grid: {queue.max_staleness: {eta-0: 0, eta-4: 4}}` alone are the runs `eta-0` and `eta-4`.
    """

    recipe: str = Field(description="path of a recipe, or the name of a shipped one")
    settings: Settings = Field({}, description="what all runs change in it")
    runs: dict[str, Settings] = Field({}, description="name -> what this run changes")
    grid: dict[str, dict[str, Any] | list[Any]] = Field(
        {}, description="setting -> its values, or label -> value where labels say more"
    )
    seeds: list[int] = Field([], description="values of run.seed; the whole plan is run for one after the other")


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedRun:
    """One run of a plan."""

    name: str
    """Its folder's name too."""
    overrides: Settings
    """What sets it apart from the other runs."""
    config: Config
    """The whole recipe."""


def load_plan(plan: str) -> Plan:
    """Read a plan.

    Args:
        plan: Path of a YAML file, or the name of a shipped plan.

    Raises:
        ConfigError: It is missing, unreadable, or no plan.
    """
    path = Path(plan)
    if not path.is_file():
        path = _plan_folder() / f"{plan}.yaml"
    if not path.is_file():
        raise ConfigError(
            f"a plan is a YAML file or one of {', '.join(shipped_plans())}; there is no {plan!r}"
            + suggestion(plan, shipped_plans())
        )
    raw = read_yaml(path, holding=f"a plan ({', '.join(Plan.model_fields)})")
    try:
        return Plan.model_validate(raw)
    except ValidationError as error:
        lines = (f"{'.'.join(map(str, item['loc']))}: {item['msg']}, got {item['input']!r}" for item in error.errors())
        raise ConfigError(f"{path}: " + "; ".join(lines)) from None


def planned_runs(plan: Plan, *, extra: Iterable[str] = ()) -> list[PlannedRun]:
    """Return the runs of a plan in order, every recipe checked.

    Args:
        plan: The plan.
        extra: `section.field=value` words, which come last and win.

    Raises:
        ConfigError: Some recipe is wrong, or a name cannot be a folder's.
    """
    extras = [parse_override(word) for word in extra]
    runs: dict[str, PlannedRun] = {}
    for name, overrides in _combinations(plan):
        if not _NAME.fullmatch(name) or name in runs:
            raise ConfigError(f"a run needs a name of its own, of letters, digits and . _ = -, got {name!r}")
        config = _config(plan, name, [*plan.settings.items(), *overrides.items(), *extras])
        runs[name] = PlannedRun(name=name, overrides=overrides, config=config)
    return list(runs.values())


def choose_runs(runs: Iterable[PlannedRun], only: Iterable[str]) -> list[PlannedRun]:
    """Return the runs whose names fit one of some names or patterns (`*_naive_*`); all when there are none.

    Raises:
        ConfigError: A pattern fits no run.
    """
    runs, wanted = list(runs), list(only)
    names = [run.name for run in runs]
    for pattern in wanted:
        if not any(fnmatch(name, pattern) for name in names):
            raise ConfigError(
                f"no run of the plan is called {pattern!r}: there are {', '.join(names)}" + suggestion(pattern, names)
            )
    return [run for run in runs if not wanted or any(fnmatch(run.name, pattern) for pattern in wanted)]


def shipped_plans() -> list[str]:
    """Names of the shipped plans."""
    return sorted(path.stem for path in _plan_folder().glob("*.yaml"))


def _plan_folder() -> Path:
    return Path(__file__).parent / "plans"


def _combinations(plan: Plan) -> Iterator[tuple[str, Settings]]:
    """Yield name and settings of every run; seeds change last, so that a third of the time gives a whole table."""
    axes: list[list[tuple[str, Settings]]] = []
    if plan.seeds:
        axes.append([(f"seed-{seed}", {"run.seed": seed}) for seed in plan.seeds])
    if plan.runs:
        axes.append(list(plan.runs.items()))
    axes += [list(_axis(setting, values)) for setting, values in plan.grid.items()]
    if not axes:
        raise ConfigError("a plan needs runs, a grid or seeds, got none of them")
    for chosen in itertools.product(*axes):
        labels = [label for label, _ in chosen]
        name = "_".join([*labels[1:], labels[0]] if plan.seeds else labels)
        yield name, {key: value for _, settings in chosen for key, value in settings.items()}


def _axis(setting: str, values: Mapping[str, Any] | list[Any]) -> Iterator[tuple[str, Settings]]:
    field = setting.rpartition(".")[2]
    labelled = values.items() if isinstance(values, Mapping) else [(f"{field}-{value}", value) for value in values]
    for label, value in labelled:
        yield label, {setting: value}


def _config(plan: Plan, name: str, settings: Iterable[tuple[str, Any]]) -> Config:
    raw = read_recipe(plan.recipe, command="train")
    try:
        for key, value in settings:
            set_value(raw, key, value)
        config = parse_config(raw)
    except ConfigError as error:
        raise ConfigError(f"run {name}: {error}") from None
    if config.run.dir is not None or config.run.resume is not None:
        raise ConfigError(f"run {name}: run.dir and run.resume are set by the bench itself: leave them out")
    return config
