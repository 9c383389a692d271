"""`areal-lite bench modes`: one recipe, synchronous and asynchronous, on the same machine.

A short search chooses the threads of each mode. Then all modes take turns, several times. Tables and the report's page
are made from `results.json`.
"""

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from areal_lite.config.reading import parse_override
from areal_lite.config.sections import without_env_values
from areal_lite.errors import ConfigError
from areal_lite.launch.bench import modes_figures as figures
from areal_lite.launch.bench.harness import PlannedRun, entry_of, run_to_the_end, say, show_table, turns, write_results
from areal_lite.launch.bench.modes_figures import MAX_STALENESS, MODES, Mode
from areal_lite.launch.bench.plan import choose, planned_config
from areal_lite.record.columns import Row
from areal_lite.record.report import write_bench
from areal_lite.record.run_folder import RunFolder

_STEPS = 30
"""Most steps of a run, unless overridden: recipes are made for learning, and train longer than a benchmark needs."""
_SEARCH_STEPS = 4
"""Fewest steps of a search run, which otherwise has a quarter of a run's steps."""


def bench(recipe: str, overrides: Sequence[str], *, repeats: int, only: Sequence[str], out: Path | None) -> int:
    """Search for the fastest threads, then measure."""
    cores = len(os.sched_getaffinity(0))
    search = search_runs(recipe, choose(list(MODES), only, what="mode"), cores=cores, extra=overrides)
    out = (out or Path("runs") / f"modes-{Path(recipe).stem}").resolve()
    measured: list[PlannedRun] = []

    def parts() -> Iterator[list[PlannedRun]]:
        tried = ", ".join("{mode} {threads}".format(**one.facts) for one in search)
        say(f"searching {len(search)} splits of {cores} cores, threads of generation + training: {tried}")
        yield search
        chosen = fastest_threads(search, [_entry(one, out) for one in search])
        listed = ", ".join(f"{mode} {threads}" for mode, threads in chosen.items())
        say(f"measuring with the fastest threads: {listed}")
        measured.extend(measured_runs(recipe, chosen, repeats=repeats, extra=overrides))
        yield measured

    def show(content: dict[str, Any]) -> None:
        if content["modes"]:
            show_modes(content)
            write_bench(out)
        for text in content["findings"]:
            say(f"- {text}", style="")
        say(f"results.json and report.html are in {out}")

    collect = partial(collect_modes, recipe, search=search, measured=measured, overrides=overrides, out=out)
    return run_to_the_end(parts(), out=out, collect=collect, show=show)


class Threads(NamedTuple):
    """Threads of generation (all engines together) and of training (all ranks)."""

    generation: int
    training: int

    def __str__(self) -> str:
        """Return `1+2`: generation, training."""
        return f"{self.generation}+{self.training}"


def thread_settings(mode: Mode, *, cores: int) -> list[Threads]:
    """Return the thread settings to try in a mode, at most two.

    With a split: half of the cores for each; or half for generation and all for training, which use what generation
    leaves idle. Without a split both phases get all cores; or generation half, as decoding few sequences gains little
    from threads. At eta 0 the second setting of a split equals one without a split, and is left out: the best
    synchronous mode is the best of three settings, the others are the best of two.

    >>> [str(threads) for threads in thread_settings(MODES["async-eta1"], cores=2)]
    ['1+1', '1+2']
    """
    half = max(1, cores // 2)
    split = [Threads(half, max(1, cores - half)), *([Threads(half, cores)] if mode.eta else [])]
    return list(dict.fromkeys(split if mode.has_split else [Threads(cores, cores), Threads(half, cores)]))


def search_runs(recipe: str, modes: Iterable[str], *, cores: int, extra: Sequence[str]) -> list[PlannedRun]:
    """Return a short run for each mode and thread setting; a `ConfigError` if the recipe is not for a CPU."""
    tried = [(mode, threads) for mode in modes for threads in thread_settings(MODES[mode], cores=cores)]
    return _runs(recipe, [(None, setting) for setting in tried], extra=extra)


def measured_runs(
    recipe: str, chosen: Mapping[str, Threads], *, repeats: int, extra: Sequence[str]
) -> list[PlannedRun]:
    """Return the runs to measure: modes in turns, each repeat with its own seed."""
    return _runs(recipe, turns(chosen.items(), repeats), extra=extra)


def _runs(
    recipe: str, wanted: Iterable[tuple[int | None, tuple[str, Threads]]], *, extra: Sequence[str]
) -> list[PlannedRun]:
    overrides = dict(map(parse_override, extra))
    config = planned_config(recipe, "recipe", [overrides])
    if config.run.device != "cpu":
        raise ConfigError(f"bench modes needs run.device=cpu, got {config.run.device}. Fix: set it")
    steps = config.run.steps if "run.steps" in overrides else min(config.run.steps, _STEPS)
    runs = []
    for repeat, (mode, threads) in wanted:
        changes: dict[str, object] = {
            "queue.max_staleness": MODES[mode].eta,
            "rollout.interrupt": MODES[mode].interrupt or config.rollout.interrupt,
            "rollout.threads": max(1, threads.generation // config.rollout.workers),
            "trainer.threads": max(1, threads.training // config.trainer.ranks),
            "run.steps": max(_SEARCH_STEPS, steps // 4) if repeat is None else steps,
            "run.seed": config.run.seed + (0 if repeat is None else 1 + repeat),
            # Not part of the comparison; all of these still happen at the start and the end of a run.
            "run.eval_every": 0,
            "run.checkpoint_every": 0,
            "run.checkpoint_every_minutes": 0,
        }
        name = f"search_{mode}_{threads.generation}-{threads.training}" if repeat is None else f"{mode}_{repeat}"
        changed = planned_config(recipe, name, [overrides, changes])
        facts = {"mode": mode, "threads": threads, "repeat": repeat}
        runs.append(PlannedRun(name=name, config=changed, facts=facts, is_timed=True))
    return runs


def fastest_threads(search: Sequence[PlannedRun], entries: Sequence[Row]) -> dict[str, Threads]:
    """Return each mode's fastest thread setting; the first one if no search run is done."""
    rates = {entry["name"]: entry.get("samples_per_s", 0.0) for entry in entries}
    tried: dict[str, list[PlannedRun]] = {}
    for run in search:
        tried.setdefault(run.facts["mode"], []).append(run)
    return {mode: max(runs, key=lambda run: rates[run.name]).facts["threads"] for mode, runs in tried.items()}


def collect_modes(
    recipe: str, *, search: Sequence[PlannedRun], measured: Sequence[PlannedRun], overrides: Sequence[str], out: Path
) -> dict[str, Any]:
    """Read all run folders, write `results.json`, and return its content."""
    entries = [_entry(run, out) for run in measured]
    done = [entry for entry in entries if "seconds" in entry]
    shortest = min((entry["seconds"] for entry in done), default=0.0)
    for entry in done:
        entry["reward_equal_time"] = figures.reward_at(*_log(out / entry["name"]), seconds=shortest)
    best, lines = figures.best_synchronous(entries), figures.compare(entries)
    content = {
        "benchmark": "modes",
        "recipe": recipe,
        "overrides": list(overrides),
        "versions": done[0]["versions"] if done else {},
        "seeds": sorted({entry["seed"] for entry in entries}),
        "measured_steps": done[0]["measured_steps"] if done else None,
        "equal_time_s": shortest,
        "best_synchronous": best,
        "modes": lines,
        "findings": figures.findings(lines, best=best),
        "search": [_entry(run, out) for run in search],
        "runs": entries,
        "config": {
            run.facts["mode"]: without_env_values(run.config.model_dump())
            for run in measured
            if run.facts["repeat"] == 0
        },
    }
    return write_results(content, out=out)


def _entry(run: PlannedRun, out: Path) -> dict[str, Any]:
    """Return the entry of one run; its figures only if it is done."""
    (entry, found), config = entry_of(run, out), run.config
    entry["threads"] = str(entry["threads"])
    if entry["status"] != "done":
        return entry
    rows, events = _log(out / run.name)
    first, last = figures.measured_steps(config.run.steps, max_staleness=MAX_STALENESS)
    slots, samples = config.rollout.slots, config.samples_per_step
    return {
        **entry,
        "commit": found.get("commit"),
        "versions": found["versions"],
        "measured_steps": [first, last],
        **figures.measure(rows, events, first=first, last=last, samples_per_step=samples, slots=slots),
        "reward_equal_steps": figures.reward_at(rows, events),
        "held_out_end": found["eval"].get(str(config.run.steps)),
    }


def _log(folder: Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    return RunFolder(folder).read("metrics.jsonl"), RunFolder(folder).read("events.jsonl")


def show_modes(content: Row) -> None:
    """Print two tables of at most 80 columns, a row per mode, with the spread of several repeats below each value."""
    lines, best = content["modes"], content["best_synchronous"]
    of_figures = (
        f"Median, lowest-highest. x best sync: over samples/s of {best} in the same repeat. reward: of the last steps; "
        f"in time: after {content['equal_time_s']:.0f} s."
    )
    of_shares = (
        "threads: of generation + training. slots full: running samples over slots. Ages: of the trained tokens."
    )
    show_table("modes", lines, title=title_of(content), caption=of_figures)
    show_table("shares of modes", lines, caption=of_shares)


def title_of(content: Row) -> str:
    """Return the recipe, the machine and the steps that were measured."""
    steps = content["measured_steps"]
    window = f", steps {steps[0] + 1} to {steps[1]}" if steps else ""
    return f"{Path(content['recipe']).stem}: modes on {content['cores']} cores, commit {content['commit']}{window}"
