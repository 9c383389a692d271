"""The runs of `bench modes`: the modes as changes of one recipe, their thread settings, and the order of the runs.

Every mode has the recipe's model, data, batch and objective, and the same machine.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

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


class Mode(NamedTuple):
    """One way to run a recipe."""

    eta: int
    """0 = generation and training take turns: asynchrony is compared with the best of these."""
    interrupt: str | None = None
    """None = the recipe's."""
    has_split: bool = True
    """Cores are split between generation and training; else each phase may have all of them."""


MODES: dict[str, Mode] = {
    "sync-colocated": Mode(0, has_split=False),
    "sync-split": Mode(0),
    # At eta 1 a trained batch makes room for exactly one batch, and by then `drain` has finished the one before: no
    # further rule is needed for a whole batch to be admitted at once.
    "one-step-off": Mode(1, "drain"),
    "async-eta1": Mode(1, "recompute"),
    "async-eta4": Mode(MAX_STALENESS, "recompute"),
    "keep_kv-eta4": Mode(MAX_STALENESS, "keep_kv"),
    "drain-eta4": Mode(MAX_STALENESS, "drain"),
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
    split = [Threads(half, max(1, cores - half)), *([Threads(half, cores)] if mode.eta else [])]
    return list(dict.fromkeys(split if mode.has_split else [Threads(cores, cores), Threads(half, cores)]))


def search_runs(recipe: str, modes: Iterable[str], *, cores: int, extra: Sequence[str]) -> list[ModeRun]:
    """Return one short run for each mode and thread setting, of a quarter of the steps and a seed of its own.

    Raises:
        ConfigError: Some recipe is wrong, or not for a CPU.
    """
    wanted = [(mode, threads) for mode in modes for threads in thread_settings(MODES[mode], cores=cores)]
    return _runs(recipe, wanted, repeat=None, extra=extra)


def measured_runs(recipe: str, chosen: Mapping[str, Threads], *, repeats: int, extra: Sequence[str]) -> list[ModeRun]:
    """Return the runs that are measured: rounds of every mode, each with a seed of its own.

    Every second round goes backwards, so that the machine's getting slower or faster favours nobody.

    Raises:
        ConfigError: Some recipe is wrong, or not for a CPU.
    """
    wanted = list(chosen.items())
    rounds = (
        _runs(recipe, wanted[:: -1 if repeat % 2 else 1], repeat=repeat, extra=extra) for repeat in range(repeats)
    )
    return [run for one_round in rounds for run in one_round]


def _runs(
    recipe: str, wanted: Sequence[tuple[str, Threads]], *, repeat: int | None, extra: Sequence[str]
) -> list[ModeRun]:
    overrides = dict(map(parse_override, extra))
    config = planned_run(recipe, "recipe", overrides).config
    if config.run.device != "cpu":
        raise ConfigError(f"bench modes compares threads of a CPU, got run.device={config.run.device}: set it to cpu")
    steps = config.run.steps if "run.steps" in overrides else min(config.run.steps, _STEPS)
    runs = []
    for mode, threads in wanted:
        changes: dict[str, object] = {
            "queue.max_staleness": MODES[mode].eta,
            "rollout.threads": max(1, threads.generation // config.rollout.workers),
            "trainer.threads": max(1, threads.training // config.trainer.ranks),
            "run.steps": max(_SEARCH_STEPS, steps // 4) if repeat is None else steps,
            "run.seed": config.run.seed + (0 if repeat is None else 1 + repeat),
            # Neither belongs to what is compared; both are done at the start and the end of a run all the same.
            "run.eval_every": 0,
            "run.checkpoint_every": 0,
        }
        if MODES[mode].interrupt is not None:
            changes["rollout.interrupt"] = MODES[mode].interrupt
        name = f"search_{mode}_{threads.generation}-{threads.training}" if repeat is None else f"{mode}_{repeat}"
        planned = planned_run(recipe, name, changes, before=overrides)
        runs.append(ModeRun(mode=mode, threads=threads, repeat=repeat, planned=planned))
    return runs
