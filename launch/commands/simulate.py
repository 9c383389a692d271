"""`areal-lite simulate`: a run's speed, ages and cost on a virtual clock, before anyone rents the machines."""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import track

from areal_lite.config.reading import parse_override, parse_section
from areal_lite.config.recipe import Config, load_config
from areal_lite.errors import ConfigError
from areal_lite.launch.bench.harness import show_table, write_results
from areal_lite.launch.bench.simulation import Inputs, simulate
from areal_lite.launch.bench.simulation_inputs import ASSUMED, gpus_of, inputs_of_recipe, inputs_of_run, with_split
from areal_lite.launch.commands.options import Gpu, Overrides, ProfileFile, Recipe, option
from areal_lite.record.columns import Row
from areal_lite.record.report import write_bench
from areal_lite.sample_queue.ledger import LedgerSettings

ETAS = (0, 1, 2, 4, 8)
GRID_STEPS = 60
"""Trainer steps of each simulation of a grid, which measures those in the middle."""
_SPLITS = 8
"""A grid gives the trainer 1/8, 2/8, ... of the GPUs."""
_BUSY = 0.05
"""A side that is idle for a smaller share of its time is the bottleneck."""


def simulate_run(
    recipe: Recipe,
    overrides: Overrides,
    run: Annotated[Path | None, option("RUN_DIR", "use the lengths and times of this finished run", "--from")] = None,
    assume: Annotated[list[str] | None, option("NAME=VALUE", "replace one of the printed inputs", "--assume")] = None,
    gpu: Gpu = "H100",
    profile: ProfileFile = None,
    grid: Annotated[bool, typer.Option("--grid", help="compare splits of the GPUs at max_staleness 0 to 8")] = False,
    out: Annotated[Path | None, option("DIR", "write results.json and report.html here")] = None,
) -> int:
    """Simulate a run: its speed, idle time, token ages and cost.

    Drive the real sample queue with a virtual clock, and print every input. Without --from, speeds are a GPU's peaks
    times assumed efficiencies: compare settings, but do not trust absolute times.
    """
    config = load_config(recipe, overrides)
    inputs = read_inputs(config, run=run, gpu=gpu, profile=profile)
    assumed = dict(map(parse_override, assume or ()))
    unused = {"engines"} | ({"median", "sigma", "longest"} if inputs.lengths else set())
    if wrong := ", ".join(sorted(unused & assumed.keys())):
        raise ConfigError(
            f"--assume {wrong} changes nothing: rollout.workers or --grid sets engines, and --from sets the lengths. "
            "Fix: leave it out"
        )
    inputs = parse_section(inputs.model_dump() | assumed, Inputs)
    console, numbers = Console(highlight=False, soft_wrap=True), inputs.model_dump(exclude={"lengths", *unused})
    console.print(", ".join(f"{name}={value:.4g}" for name, value in numbers.items()), style="dim")
    if run is None:
        shares = ", ".join(f"{name} {value:g}" for name, value in ASSUMED.items())
        console.print(f"assumed shares of {gpu}'s peak, and more: {shares}", style="dim")
    cases = list(splits(config, inputs.gpus) if grid else [(config.trainer.ranks, config.rollout.workers, None)])
    steps = GRID_STEPS if grid else config.run.steps
    if steps < 2:
        raise ConfigError(f"simulate measures from one step to a later one, got run.steps={steps}. Fix: set 2 or more")
    rows = [
        one_row(inputs, config, ranks=ranks, engines=engines, eta=eta, steps=steps)
        for ranks, engines, eta in track(cases, "simulating", console=console, disable=not grid, transient=True)
    ]
    best = sorted(rows, key=lambda row: -float(row["trained_tokens_per_s"]))[:3] if grid else rows
    show_table("simulate", best, title="the three fastest" if grid else f"{steps} steps")
    for row in best:
        console.print(limit(row))
    if out is not None:
        settings = {"inputs": inputs.model_dump(), "queue": config.queue.model_dump(), "steps": steps}
        write_results({"benchmark": "simulate", "recipe": recipe, "settings": settings, "rows": rows}, out=out)
        console.print(f"report: {write_bench(out)}", markup=False)
    return 0


def read_inputs(config: Config, *, run: Path | None, gpu: str, profile: str | None) -> Inputs:
    """Return the inputs of a recipe, with a run's seconds and a profile's GPUs if there are any."""
    if run is None:
        inputs = inputs_of_recipe(config, gpu=gpu)
    else:
        inputs, of_run = inputs_of_run(run)
        gpus = gpus_of(config) if config.run.device == "cuda" else 0
        inputs = with_split(
            inputs.model_copy(update={"slots": config.rollout.slots, "gpus": gpus}),
            ranks=config.trainer.ranks, engines=config.rollout.workers, of_ranks=of_run.trainer.ranks,
        )  # fmt: skip
    if profile is None:
        return inputs
    from areal_lite.launch.clusters.job import load_profile

    found = load_profile(profile)
    return inputs.model_copy(update={"gpus": found.nodes * found.gpus_per_node or inputs.gpus})


def splits(config: Config, gpus: int) -> Iterator[tuple[int, int, int]]:
    """Yield ranks, engines and eta of a grid.

    Raises:
        ConfigError: There are not enough GPUs for a rank and an engine.
    """
    tensor = config.rollout.tensor_parallel
    ranks = sorted({max(1, round(gpus * part / _SPLITS)) for part in range(1, _SPLITS)})
    found = [(one, (gpus - one) // tensor) for one in ranks if gpus - one >= tensor and (gpus - one) % tensor == 0]
    if not found:
        raise ConfigError(
            f"a grid needs GPUs for a rank and an engine of {tensor}, got {gpus}. Fix: --profile with more GPUs"
        )
    yield from ((one, engines, eta) for one, engines in found for eta in ETAS)


def one_row(inputs: Inputs, config: Config, *, ranks: int, engines: int, eta: int | None, steps: int) -> dict[str, Any]:
    """Simulate one setting; `eta` None is the recipe's."""
    queue = config.queue.model_dump()
    if eta is not None:
        queue |= {"max_staleness": eta, "max_ahead": None}
    settings = LedgerSettings(**queue, total_steps=steps)
    split = with_split(inputs, ranks=ranks, engines=engines, of_ranks=config.trainer.ranks)
    figures = simulate(split, settings)
    price = (inputs.price_per_gpu_hour or None) if figures["gpu_hours_per_step"] else None
    return {
        "ranks": ranks,
        "engines": engines,
        "eta": settings.max_staleness,
        **figures,
        "masked_quarters": "/".join(f"{100 * share:.0f}" for share in figures["masked_by_quarter"]),
        "cost_per_step": price and price * figures["gpu_hours_per_step"],
        "cost_per_million_tokens": price and price * figures["gpu_hours_per_million_tokens"],
    }


def limit(row: Row) -> str:
    """Return a sentence on what limits a setting."""
    setting = f"ranks {row['ranks']}, engines {row['engines']}, eta {row['eta']}"
    if row["trainer_idle"] < _BUSY:
        return f"{setting}: the trainer limits."
    if row["generator_idle"] < _BUSY:
        return f"{setting}: the engines limit; the trainer waits {row['trainer_idle']:.0%} of the time."
    return (
        f"{setting}: the bound limits: engines idle {row['generator_idle']:.0%}, trainer {row['trainer_idle']:.0%} of "
        "the time. A larger eta, or more groups per step, would fill both."
    )
