"""The command `areal-lite drill`: faults in real runs on this machine."""

import time
from pathlib import Path
from typing import Annotated

import typer

from areal_lite.launch.commands.options import Overrides, Recipe


def drill(
    recipe: Recipe,
    overrides: Overrides,
    faults: Annotated[str | None, typer.Option(metavar="NAME,...", help="names or patterns; default all")] = None,
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="new folder; default runs/drill-<time>")] = None,
    minutes: Annotated[float | None, typer.Option(min=0.1, metavar="N", help="a soak instead of single faults")] = None,
    seed: Annotated[int, typer.Option(min=0, metavar="N", help="of what is drawn at random")] = 0,
) -> int:
    """Break runs of a recipe on this machine, and see what is lost.

    Each fault is provoked in a short real run: engine, rollout, verifier, queue, trainer, raylet, gcs, controller (each
    killed), hang-engine, hang-trainer, sigterm, sighup, two-writers, torn-save, bit-flip. A run that ends is resumed.
    The table shows when a fault was noticed, when the run was back, how many steps were trained again, and
    whether every group was accounted for; at queue.max_staleness=0, whether losses are those of an undisturbed run.
    With --minutes, faults are drawn at random in one run, by default the six kills of the run's own processes.

    Ctrl-C shows the results so far.
    """
    from areal_lite.launch.bench.plan import choose
    from areal_lite.launch.drill import FAULTS, KILLS, drill

    default = KILLS if minutes else FAULTS
    names = default if faults is None else choose(FAULTS, faults.split(","), what="fault of a drill")
    out = out or Path("runs") / f"drill-{time.strftime('%Y%m%d-%H%M%S')}"
    return drill(recipe, overrides, names=names, out=out, minutes=minutes, seed=seed)
