"""What `bench modes` runs: the modes as changes of one recipe, their thread settings, and the order of the runs.

Every mode has the recipe's model, data, batch and objective, and the same machine. `modes_command.py` runs them.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from areal_lite.config.reading import parse_override
from areal_lite.config.recipe import Config
from areal_lite.errors import ConfigError
from areal_lite.launch.bench.plan import Plan, PlannedRun, planned_runs

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


MODES: dict[str, Mode] = {
    "sync-colocated": Mode(settings={"queue.max_staleness": 0}, is_synchronous=True, has_split=False),
    "sync-split": Mode(settings={"queue.max_staleness": 0}, is_synchronous=True),
    # At eta 1 a trained batch makes room for exactly one batch, and by then `drain` has finished the one before: no
    # further rule is needed for a whole batch to be admitted at once.
    "one-step-off": Mode(settings={"queue.max_staleness": 1, "rollout.interrupt": "drain"}),
    "async-eta1": Mode(settings={"queue.max_staleness": 1, "rollout.interrupt": "recompute"}),
    "async-eta4": Mode(settings={"queue.max_staleness": MAX_STALENESS, "rollout.interrupt": "recompute"}),
    "keep_kv-eta4": Mode(settings={"queue.max_staleness": MAX_STALENESS, "rollout.interrupt": "keep_kv"}),
    "drain-eta4": Mode(settings={"queue.max_staleness": MAX_STALENESS, "rollout.interrupt": "drain"}),
}
"""In the order in which tables show them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Threads:
    """How many threads generation and training have."""

    generation: int
    """Of all engines together."""
    training: int
    """Of all trainer ranks together."""

    def __str__(self) -> str:
        """Return `1+2`: generation, training."""
        return f"{self.generation}+{self.training}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModeRun:
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

    Args:
        mode: The mode.
        cores: Of the machine.

    >>> [str(threads) for threads in thread_settings(MODES["async-eta1"], cores=2)]
    ['1+1', '1+2']
    """
    half = max(1, cores // 2)
    if not mode.has_split:
        pairs = [(cores, cores), (half, cores)]
    else:
        pairs = [(half, max(1, cores - half))] + ([] if mode.is_synchronous else [(half, cores)])
    return [Threads(generation=left, training=right) for left, right in dict.fromkeys(pairs)]


def search_runs(recipe: str, modes: Iterable[str], *, cores: int, extra: Sequence[str]) -> list[ModeRun]:
    """Return one short run for each mode and thread setting, of a quarter of the steps and a seed of its own.

    Raises:
        ConfigError: Some recipe is wrong, or not for a CPU.
    """
    base = _Base.read(recipe, extra)
    wanted = [(mode, threads) for mode in modes for threads in thread_settings(MODES[mode], cores=cores)]
    return _in_order(base.run(mode, threads, repeat=None) for mode, threads in wanted)


def measured_runs(recipe: str, chosen: Mapping[str, Threads], *, repeats: int, extra: Sequence[str]) -> list[ModeRun]:
    """Return the runs that are measured: every mode once, then every mode again, so that all see the same drift.

    Args:
        recipe: Path or name.
        chosen: Threads of each mode.
        repeats: Rounds; each has a seed of its own. Every second one goes backwards, so that the machine's getting
            slower or faster favours nobody, and engines are started anew less often.
        extra: Words of the command line.

    Raises:
        ConfigError: Some recipe is wrong, or not for a CPU.
    """
    base, runs = _Base.read(recipe, extra), list[ModeRun]()
    for repeat in range(repeats):
        one_round = _in_order(base.run(mode, threads, repeat=repeat) for mode, threads in chosen.items())
        # The search went forwards, so the first round begins with the engine that the search ended with.
        runs += one_round if repeat % 2 else reversed(one_round)
    return runs


def _in_order(runs: Iterable[ModeRun]) -> list[ModeRun]:
    """Put runs with the same processes side by side."""

    def processes(run: ModeRun) -> tuple[int, bool, int]:
        # Without a prefix cache, which keep_kv needs, it is another engine.
        has_no_prefixes = run.planned.config.rollout.interrupt == "keep_kv"
        return run.threads.generation, has_no_prefixes, run.threads.training

    return sorted(runs, key=processes)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Base:
    """The recipe that all modes change."""

    recipe: str
    words: dict[str, Any]
    config: Config

    @classmethod
    def read(cls, recipe: str, extra: Sequence[str]) -> Self:
        words = dict(map(parse_override, extra))
        (run,) = planned_runs(Plan(recipe=recipe, settings=words, runs={"recipe": {}}))
        if (device := run.config.run.device) != "cpu":
            raise ConfigError(f"bench modes compares threads of a CPU, got run.device={device}: set it to cpu")
        return cls(recipe=recipe, words=words, config=run.config)

    def run(self, mode: str, threads: Threads, *, repeat: int | None) -> ModeRun:
        config = self.config
        steps = config.run.steps if "run.steps" in self.words else min(config.run.steps, _STEPS)
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
        (planned,) = planned_runs(Plan(recipe=self.recipe, settings=self.words, runs={name: changes}))
        return ModeRun(mode=mode, threads=threads, repeat=repeat, planned=planned)
