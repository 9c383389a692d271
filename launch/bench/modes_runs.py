"""The runs of `bench modes`: the modes as changes of one recipe, their thread settings, and the order of the runs.

Every mode has the recipe's model, data, batch and objective, and the same machine.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from areal_lite.config.reading import parse_override
from areal_lite.errors import ConfigError
from areal_lite.launch.bench.harness import PlannedRun
from areal_lite.launch.bench.plan import planned_run

__all__ = ["MAX_STALENESS", "MODES", "Mode", "ModeRun", "Threads", "measured_runs", "search_runs", "thread_settings"]

MAX_STALENESS = 4
"""The largest of the modes."""
_STEPS = 30
"""A run's steps at most, unless the command line says otherwise: a recipe is made for learning, not for a benchmark."""
_SEARCH_STEPS = 4
"""Of a search run at least; else it has a quarter of the steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mode:
    """One way to run a recipe."""

    settings: Mapping[str, Any]
    """What it changes."""
    is_synchronous: bool = False
    """Generation and training take turns: asynchrony is compared with the best of these."""
    has_split: bool = True
    """Cores are split between generation and training; else each phase may have all of them."""


def _mode(eta: int, interrupt: str = "recompute", **kind: bool) -> Mode:
    return Mode(settings={"queue.max_staleness": eta, "rollout.interrupt": interrupt} if eta else
                {"queue.max_staleness": 0}, **kind)  # fmt: skip


MODES: dict[str, Mode] = {
    "sync-colocated": _mode(0, is_synchronous=True, has_split=False),
    "sync-split": _mode(0, is_synchronous=True),
    # At eta 1 a trained batch makes room for exactly one batch, and by then `drain` has finished the one before: no
    # further rule is needed for a whole batch to be admitted at once.
    "one-step-off": _mode(1, "drain"),
    "async-eta1": _mode(1),
    "async-eta4": _mode(MAX_STALENESS),
    "keep_kv-eta4": _mode(MAX_STALENESS, "keep_kv"),
    "drain-eta4": _mode(MAX_STALENESS, "drain"),
}
"""In the order in which tables show them."""


class Threads(NamedTuple):
    """How many threads generation (all engines together) and training (all ranks) have."""

    generation: int
    training: int

    def __str__(self) -> str:
        """Return `1+2`: generation, training."""
        return f"{self.generation}+{self.training}"


class ModeRun(NamedTuple):
    """One run of a mode."""

    mode: str
    threads: Threads
    repeat: int | None
    """From 0; None = a run of the search, which no figure is taken from."""
    planned: PlannedRun


def thread_settings(mode: Mode, *, cores: int) -> list[Threads]:
    """Return the thread settings that are tried in a mode, two at most.

    A split halves the cores, or halves them and lets training use all when generation leaves some free. Without a
    split both phases get all cores, or generation half of them, as decoding few sequences gains little from threads.
    In turns the second setting of a split is that of no split, so it is tried once: the best synchronous mode is the
    best of three settings, the others are the best of two.

    >>> [str(threads) for threads in thread_settings(MODES["async-eta1"], cores=2)]
    ['1+1', '1+2']
    """
    half = max(1, cores // 2)
    split = [Threads(half, max(1, cores - half)), *([] if mode.is_synchronous else [Threads(half, cores)])]
    return list(dict.fromkeys(split if mode.has_split else [Threads(cores, cores), Threads(half, cores)]))


def search_runs(recipe: str, modes: Iterable[str], *, cores: int, extra: Sequence[str]) -> list[ModeRun]:
    """Return one short run for each mode and thread setting, of a quarter of the steps and a seed of its own.

    Raises:
        ConfigError: Some recipe is wrong, or not for a CPU.
    """
    wanted = [(mode, threads) for mode in modes for threads in thread_settings(MODES[mode], cores=cores)]
    return _runs(recipe, wanted, repeat=None, extra=extra)


def measured_runs(recipe: str, chosen: Mapping[str, Threads], *, repeats: int, extra: Sequence[str]) -> list[ModeRun]:
    """Return the runs that are measured: every mode once, then every mode again, so that all see the same drift.

    Args:
        recipe: Path or name.
        chosen: Threads of each mode.
        repeats: Rounds; each has a seed of its own. Every second one goes backwards, so that the machine's getting
            slower or faster favours nobody, and engines are started anew less often.
        extra: Overrides of all runs.

    Raises:
        ConfigError: Some recipe is wrong, or not for a CPU.
    """
    runs: list[ModeRun] = []
    for repeat in range(repeats):
        one_round = _runs(recipe, list(chosen.items()), repeat=repeat, extra=extra)
        # The search went forwards, so the first round begins with the engine that the search ended with.
        runs += one_round if repeat % 2 else reversed(one_round)
    return runs


def _runs(
    recipe: str, wanted: Sequence[tuple[str, Threads]], *, repeat: int | None, extra: Sequence[str]
) -> list[ModeRun]:
    """Plan one run each; those with the same processes are side by side, as others have to be started anew."""
    overrides = dict(map(parse_override, extra))
    config = planned_run(recipe, "recipe", overrides).config
    if config.run.device != "cpu":
        raise ConfigError(f"bench modes compares threads of a CPU, got run.device={config.run.device}: set it to cpu")
    steps = config.run.steps if "run.steps" in overrides else min(config.run.steps, _STEPS)
    runs = []
    for mode, threads in wanted:
        changes = {
            **MODES[mode].settings,
            "rollout.threads": max(1, threads.generation // config.rollout.workers),
            "trainer.threads": max(1, threads.training // config.trainer.ranks),
            "run.steps": max(_SEARCH_STEPS, steps // 4) if repeat is None else steps,
            "run.seed": config.run.seed + (0 if repeat is None else 1 + repeat),
            # Neither belongs to what is compared; both are done at the start and the end of a run all the same.
            "run.eval_every": 0,
            "run.checkpoint_every": 0,
        }
        name = f"search_{mode}_{threads.generation}-{threads.training}" if repeat is None else f"{mode}_{repeat}"
        planned = planned_run(recipe, name, changes, before=overrides)
        runs.append(ModeRun(mode=mode, threads=threads, repeat=repeat, planned=planned))
    # Without a prefix cache, which keep_kv needs, it is another engine.
    return sorted(runs, key=lambda run: (
        run.threads.generation, run.planned.config.rollout.interrupt == "keep_kv", run.threads.training
    ))  # fmt: skip
