"""`areal-lite bench plan`: many short runs of one recipe.

A plan is a YAML file. `runs` lists runs by name, `grid` crosses axes, `seeds` repeats everything; together they run
every combination. Settings are written as on the command line, `section.field: value`.
"""

import itertools
import re
from collections.abc import Iterable, Iterator, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from pydantic import Field

from areal_lite.config.reading import parse_override, parse_section, read_recipe, read_yaml, set_value
from areal_lite.config.recipe import Config, parse_config
from areal_lite.config.section import Section
from areal_lite.config.suggestion import suggestion
from areal_lite.errors import ConfigError
from areal_lite.launch.bench.harness import PlannedRun, entry_of, run_to_the_end, say, show_table, write_results

Settings = dict[str, Any]
"""`section.field` -> value."""

PLANS = Path(__file__).parent / "plans"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._=-]*")
_FROM_SUMMARY = {
    "seconds": "wall_s", "samples_per_s": "samples_per_s", "age_max": "age_max_trained",
    "rollout_idle": "rollout_idle_fraction", "trainer_idle": "trainer_idle_fraction", "paused": "paused_fraction",
    "reward_first": "reward_first", "reward_last": "reward_last", "parity": "parity_max_abs_logprob_diff",
}  # fmt: skip


class Plan(Section):
    """The runs of a benchmark.

    Example: `runs: {a: {}, b: {trainer.lr: 1e-3}}`, `seeds: [0, 1]` are the runs `a_seed-0`, `b_seed-0`, `a_seed-1`,
    `b_seed-1`; `grid: {queue.max_staleness: {eta-0: 0, eta-4: 4}}` alone are the runs `eta-0` and `eta-4`.
    """

    recipe: str
    """path of a recipe, or the name of a shipped one"""
    settings: Settings = Field({})
    """settings of all runs"""
    runs: dict[str, Settings] = Field({})
    """name -> settings of this run"""
    grid: dict[str, dict[str, Any] | list[Any]] = Field({})
    """setting -> its values, or a table of label -> value"""
    seeds: list[int] = Field([])
    """values of run.seed; the whole plan runs for each in turn"""


def bench(plan_name: str, overrides: Sequence[str], *, only: Sequence[str], out: Path | None) -> int:
    """Run a plan and show a table of its runs."""
    plan, name = load_plan(plan_name), Path(plan_name).stem
    runs = planned_runs(plan, extra=overrides)
    names = choose([run.name for run in runs], only, what="run of the plan")
    chosen = [run for run in runs if run.name in names]
    out = (out or Path("runs") / f"bench-{name}").resolve()

    def show(content: dict[str, Any]) -> None:
        show_table("plan", content["runs"], title="results")
        say(f"results: {out / 'results.json'}")

    return run_to_the_end([chosen], out=out, collect=lambda: collect_results(name, plan, runs, out=out), show=show)


def shipped_plans() -> list[str]:
    """Names of the shipped plans."""
    return sorted(path.stem for path in PLANS.glob("*.yaml"))


def load_plan(plan: str) -> Plan:
    """Read a plan; a `ConfigError` if it is missing, unreadable or invalid."""
    path = Path(plan) if Path(plan).is_file() else PLANS / f"{plan}.yaml"
    if not path.is_file():
        raise ConfigError(
            f"a plan must be a YAML file or one of {', '.join(shipped_plans())}, got {plan!r}"
            + suggestion(plan, shipped_plans())
        )
    raw = read_yaml(path, holding=f"a plan ({', '.join(Plan.model_fields)})")
    try:
        return parse_section(raw, Plan)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None


def planned_runs(plan: Plan, *, extra: Iterable[str] = ()) -> list[PlannedRun]:
    """Return the runs of a plan in order; `extra` overrides win. A `ConfigError` for a wrong recipe or name."""
    extras = dict(map(parse_override, extra))
    runs: dict[str, PlannedRun] = {}
    for name, overrides in _combinations(plan):
        if not _NAME.fullmatch(name) or name in runs:
            raise ConfigError(f"a run must have a unique name of letters, digits and . _ = -, got {name!r}")
        config = planned_config(plan.recipe, name, [plan.settings, overrides, extras])
        runs[name] = PlannedRun(name=name, config=config, facts={"overrides": overrides})
    return list(runs.values())


def planned_config(recipe: str, name: str, changes: Iterable[Settings]) -> Config:
    """Return the checked recipe of a run; the last change of a setting wins. A `ConfigError` if it is wrong."""
    raw = read_recipe(recipe, command="train")
    try:
        for key, value in itertools.chain.from_iterable(settings.items() for settings in changes):
            set_value(raw, key, value)
        config = parse_config(raw)
    except ConfigError as error:
        raise ConfigError(f"run {name}: {error}") from None
    if config.run.dir is not None or config.run.resume is not None:
        raise ConfigError(f"run {name}: run.dir and run.resume are set by the benchmark. Fix: leave them out")
    return config


def choose(names: Sequence[str], only: Sequence[str], *, what: str) -> list[str]:
    """Return the names that match a pattern (`*_naive_*`), all without one; a `ConfigError` if one matches nothing."""
    for pattern in only:
        if not any(fnmatch(name, pattern) for name in names):
            raise ConfigError(
                f"no {what} matches {pattern!r}: there are {', '.join(names)}" + suggestion(pattern, list(names))
            )
    return [name for name in names if not only or any(fnmatch(name, pattern) for pattern in only)]


def _combinations(plan: Plan) -> Iterator[tuple[str, Settings]]:
    """Yield name and settings of every run; seeds change last, so that each seed in turn completes a table."""
    axes: list[list[tuple[str, Settings]]] = []
    if plan.seeds:
        axes.append([(f"seed-{seed}", {"run.seed": seed}) for seed in plan.seeds])
    if plan.runs:
        axes.append(list(plan.runs.items()))
    for key, values in plan.grid.items():
        if not values:
            raise ConfigError(f"grid.{key} must have values, got none. Fix: list some, or leave it out")
        field = key.rpartition(".")[2]
        labelled = values.items() if isinstance(values, dict) else [(f"{field}-{value}", value) for value in values]
        axes.append([(label, {key: value}) for label, value in labelled])
    if not axes:
        raise ConfigError("a plan needs runs, a grid or seeds, got none of them")
    for chosen in itertools.product(*axes):
        labels = [label for label, _ in chosen]
        name = "_".join([*labels[1:], labels[0]] if plan.seeds else labels)
        yield name, {key: value for _, settings in chosen for key, value in settings.items()}


def collect_results(plan_name: str, plan: Plan, runs: Sequence[PlannedRun], *, out: Path) -> dict[str, Any]:
    """Read all run folders, write `results.json`, and return its content: an entry per run, in the plan's order."""
    entries = [_entry(run, out) for run in runs]
    content = {
        "plan": plan_name,
        "versions": next((versions for _, versions in entries if versions), {}),
        "recipe": plan.recipe,
        "settings": plan.settings,
        "runs": [entry for entry, _ in entries],
    }
    return write_results(content, out=out)


def _entry(run: PlannedRun, out: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a run's entry (without a summary, only its plan), and the versions of its packages."""
    (entry, found), config = entry_of(run, out), run.config
    entry |= {"lr": config.trainer.lr, "max_staleness": config.queue.max_staleness}
    if found:
        curve = dict(sorted(found["eval"].items(), key=lambda pair: int(pair[0])))
        ages, tokens = found["age_histogram"], sum(found["age_histogram"].values())
        entry |= {"steps": found["steps"], "curve": curve, "start": curve.get("0")}
        entry |= {"end": curve.get(str(config.run.steps)), **{name: found[key] for name, key in _FROM_SUMMARY.items()}}
        entry |= {"age_mean": sum(int(age) * count for age, count in ages.items()) / tokens if tokens else None}
    return entry, found.get("versions", {})
