"""`areal-lite bench`: benchmarks that train. `launch/bench` describes what each measures, and how."""

from pathlib import Path
from typing import Annotated

import typer

from areal_lite.launch.commands.options import Overrides, Recipe, argument, option

bench = typer.Typer(
    help="Run a benchmark: compare modes, run a plan of short runs, or check GPUs.\n\n"
    "Ctrl-C finishes the step, saves, and prints the command that resumes the benchmark. Benchmarks of single "
    "components are scripts in the folder benchmarks/ of the repository."
)

Only = Annotated[
    list[str],
    option(
        "NAME", "run only what matches this name or pattern; may be repeated", default_factory=list, show_default=False
    ),
]
RunsOut = Annotated[
    Path | None, option("DIR", "folder for the results (default: runs/modes-RECIPE or runs/bench-PLAN)")
]


@bench.command()
def modes(
    recipe: Recipe,
    overrides: Overrides,
    only: Only,
    repeats: Annotated[int, option("N", "measurements of each mode", min=1)] = 3,
    out: RunsOut = None,
) -> int:
    """Compare synchronous and asynchronous modes of a recipe.

    Find the fastest split of threads, then run every mode in turn, several times. Write results.json and report.html.
    The same command resumes a stopped benchmark; the run that was stopped restarts.
    """
    from areal_lite.launch.bench.modes import bench

    return bench(recipe, overrides, repeats=repeats, only=only, out=out)


@bench.command("plan")
def run_plan(
    plan: Annotated[str, argument("PLAN", "a YAML file, or a shipped plan: presets, staleness")],
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
    cpu: Annotated[bool, typer.Option("--cpu", help="run the same parts on the CPU")] = False,
    minutes: Annotated[float | None, option("N", "skip parts that would not end within N minutes", min=0.1)] = None,
    model: Annotated[
        str | None, option("DIR", "folder of a trained model; without it, the part real is left out")
    ] = None,
    out: Annotated[Path, option("DIR", "folder for the results")] = Path("runs/gpu-check"),
) -> int:
    """Test and measure GPUs in 15 minutes, the most valuable parts first.

    Measure a trainer step, log-probabilities and attention; compare engine and trainer in float32 and bfloat16; run the
    demo at three staleness bounds and a 1.7B model; kill an engine. With more GPUs, also test NCCL and tensor-parallel
    engines. Each part has a time limit; one that hangs is killed. Write results.json, gpu-check.md and logs.tar.gz. A
    second call repeats only what did not pass.
    """
    from areal_lite.launch.bench.gpu_check import bench

    return bench(overrides, cpu=cpu, only=only, minutes=minutes, model=model, out=out)
