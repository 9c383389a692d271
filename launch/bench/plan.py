"""`areal-lite bench plan`: many short runs of one recipe, in the order in which they are run.

A plan is a YAML file. `runs` names runs one by one, `grid` crosses axes, `seeds` repeats everything; with several of
them every combination is run. Settings are written as on the command line, `section.field: value`.
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
from areal_lite.launch.bench import view
from areal_lite.launch.bench.harness import PlannedRun, entry_of, run_to_the_end, say, write_results

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


def bench(plan_name: str, overrides: Sequence[str], *, only: Sequence[str], out: Path | None) -> int:
    """Run a plan and sum it up."""
    plan, name = load_plan(plan_name), Path(plan_name).stem
    runs = planned_runs(plan, extra=overrides)
    names = choose([run.name for run in runs], only, what="run of the plan")
    chosen = [run for run in runs if run.name in names]
    out = (out or Path("runs") / f"bench-{name}").resolve()

    def show(content: dict[str, Any]) -> None:
        view.show(view.table("plan", content["runs"], title="results"))
        say(f"results: {out / 'results.json'}")

    return run_to_the_end([chosen], out=out, collect=lambda: collect_results(name, plan, runs, out=out), show=show)


def shipped_plans() -> list[str]:
    """Names of the shipped plans."""
    return sorted(path.stem for path in PLANS.glob("*.yaml"))


def load_plan(plan: str) -> Plan:
    """Read a plan; a `ConfigError` where it is missing, unreadable, or no plan."""
    path = Path(plan) if Path(plan).is_file() else PLANS / f"{plan}.yaml"
    if not path.is_file():
        raise ConfigError(
            f"a plan is a YAML file or one of {', '.join(shipped_plans())}; there is no {plan!r}"
            + suggestion(plan, shipped_plans())
        )
    raw = read_yaml(path, holding=f"a plan ({', '.join(Plan.model_fields)})")
    try:
        return parse_section(raw, Plan)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None


def planned_runs(plan: Plan, *, extra: Iterable[str] = ()) -> list[PlannedRun]:
    """Return the runs of a plan in order, the overrides in `extra` win; a `ConfigError` for a wrong recipe or name."""
    extras = dict(map(parse_override, extra))
    runs: dict[str, PlannedRun] = {}
    for name, overrides in _combinations(plan):
        if not _NAME.fullmatch(name) or name in runs:
            raise ConfigError(f"a run needs a name of its own, of letters, digits and . _ = -, got {name!r}")
        config = planned_config(plan.recipe, name, [plan.settings, overrides, extras])
        runs[name] = PlannedRun(name=name, config=config, facts={"overrides": overrides})
    return list(runs.values())


def planned_config(recipe: str, name: str, changes: Iterable[Settings]) -> Config:
    """Return the checked recipe of a run, where the last change of a setting counts; a `ConfigError` if it is wrong."""
    raw = read_recipe(recipe, command="train")
    try:
        for key, value in itertools.chain.from_iterable(settings.items() for settings in changes):
            set_value(raw, key, value)
        config = parse_config(raw)
    except ConfigError as error:
        raise ConfigError(f"run {name}: {error}") from None
    if config.run.dir is not None or config.run.resume is not None:
        raise ConfigError(f"run {name}: run.dir and run.resume are set by the bench itself: leave them out")
    return config


def choose(names: Sequence[str], only: Sequence[str], *, what: str) -> list[str]:
    """Return the names that fit a pattern (`*_naive_*`), all without one; a `ConfigError` where one fits nothing."""
    for pattern in only:
        if not any(fnmatch(name, pattern) for name in names):
            raise ConfigError(
                f"no {what} is called {pattern!r}: there are {', '.join(names)}" + suggestion(pattern, list(names))
            )
    return [name for name in names if not only or any(fnmatch(name, pattern) for pattern in only)]


def _combinations(plan: Plan) -> Iterator[tuple[str, Settings]]:
    """Yield name and settings of every run; seeds change last, so that a third of the time gives a whole table."""
    axes: list[list[tuple[str, Settings]]] = []
    if plan.seeds:
        axes.append([(f"seed-{seed}", {"run.seed": seed}) for seed in plan.seeds])
    if plan.runs:
        axes.append(list(plan.runs.items()))
    for key, values in plan.grid.items():
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
    """Return one run's entry, without a summary only what was planned; and the versions of what it ran with."""
    (entry, found), config = entry_of(run, out), run.config
    entry |= {"lr": config.trainer.lr, "max_staleness": config.queue.max_staleness}
    if found:
        curve = dict(sorted(found["eval"].items(), key=lambda pair: int(pair[0])))
        ages, tokens = found["age_histogram"], sum(found["age_histogram"].values())
        entry |= {"steps": found["steps"], "curve": curve, "start": curve.get("0")}
        entry |= {"end": curve.get(str(config.run.steps)), **{name: found[key] for name, key in _FROM_SUMMARY.items()}}
        entry |= {"age_mean": sum(int(age) * count for age, count in ages.items()) / tokens if tokens else None}
    return entry, found.get("versions", {})
