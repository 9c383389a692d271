"""`areal-lite bench`: benchmarks that train. `launch/bench` describes what each measures, and how."""

from pathlib import Path
from typing import Annotated

import typer

from areal_lite.launch.commands.options import Overrides, Recipe

bench = typer.Typer(
    help="Run a benchmark: compare modes, or run a plan of many short runs.\n\n"
    "Ctrl-C finishes the step, saves, and shows the command that resumes the benchmark. Benchmarks of single "
    "components are scripts in the folder benchmarks/ of the repository."
)

Only = Annotated[
    list[str],
    typer.Option(default_factory=list, show_default=False, metavar="NAME", help="a name or a pattern; may be repeated"),
]
RunsOut = Annotated[
    Path | None, typer.Option(metavar="DIR", help="folder of the results; default runs/modes-RECIPE or runs/bench-PLAN")
]


@bench.command()
def modes(
    recipe: Recipe,
    overrides: Overrides,
    only: Only,
    repeats: Annotated[int, typer.Option(min=1, metavar="N", help="measurements of each mode")] = 3,
    out: RunsOut = None,
) -> int:
    """Compare synchronous and asynchronous modes of a recipe.

    Searches for the fastest split of threads, then runs every mode in turn, several times. Writes results.json and
    report.html. The same command resumes a stopped benchmark.
    """
    from areal_lite.launch.bench.modes import bench

    return bench(recipe, overrides, repeats=repeats, only=only, out=out)


@bench.command("plan")
def run_plan(
    plan: Annotated[str, typer.Argument(metavar="PLAN", help="a YAML file, or a shipped plan: presets, staleness")],
    overrides: Overrides,
    only: Only,
    out: RunsOut = None,
) -> int:
    """Run a plan: many short runs of a recipe, one after another."""
    from areal_lite.launch.bench.plan import bench

    return bench(plan, overrides, only=only, out=out)


@bench.command("gpu-check")
def gpu_check(
    overrides: Overrides,
    only: Only,
    cpu: Annotated[bool, typer.Option("--cpu", help="rehearse on this machine without a GPU")] = False,
    minutes: Annotated[float | None, typer.Option(min=0.1, metavar="N", help="skip parts that do not fit")] = None,
    model: Annotated[
        str | None, typer.Option(metavar="DIR", help="folder of a trained model, for one more part")
    ] = None,
    out: Annotated[Path, typer.Option(metavar="DIR", help="folder of the results")] = Path("runs/gpu-check"),
) -> int:
    """Check what GPUs can show in a quarter of an hour, the most valuable parts first.

    Measure a trainer step, log-probabilities and attention; compare engine and trainer in float32 and bfloat16; run the
    demo at three bounds, a 1.7B model and an engine that dies; with more GPUs NCCL and wide engines. Each part has a
    limit, and one that hangs is killed. Writes results.json, gpu-check.md and logs.tar.gz. Called again, keeps what
    passed.
    """
    from areal_lite.launch.bench.gpu_check import bench

    return bench(overrides, cpu=cpu, only=only, minutes=minutes, model=model, out=out)
