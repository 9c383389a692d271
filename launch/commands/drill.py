"""The command `areal-lite drill`: inject faults into real runs on this machine."""

import time
from pathlib import Path
from typing import Annotated

from areal_lite.launch.commands.options import Overrides, Recipe, option


def drill(
    recipe: Recipe,
    overrides: Overrides,
    faults: Annotated[str | None, option("NAME,...", "names or patterns of faults (default: all)")] = None,
    out: Annotated[Path | None, option("DIR", "new folder for the results (default: runs/drill-TIME)")] = None,
    minutes: Annotated[float | None, option("N", "inject faults at random into one run for N minutes", min=0.1)] = None,
    seed: Annotated[int, option("N", "seed of the random faults", min=0)] = 0,
) -> int:
    """Inject faults into runs of a recipe on this machine, and show what is lost.

    Each fault gets a short real run. The faults engine, rollout, verifier, queue, trainer, raylet, gcs and controller
    kill that process; the others are hang-engine, hang-trainer, sigterm, sighup, two-writers, torn-save and bit-flip. A
    run that ends is resumed. The table shows when a fault was noticed, when the run recovered, how many steps were
    trained again, and whether every group was accounted for; at queue.max_staleness=0, also whether losses equal those
    of an undisturbed run. With --minutes, one run gets random faults, by default kills of its own processes.

    Ctrl-C shows the results so far.
    """
    from areal_lite.launch.bench.plan import choose
    from areal_lite.launch.drill import drill
    from areal_lite.launch.drilled_run import FAULTS, KILLS

    names = KILLS if minutes else list(FAULTS)
    if faults is not None:
        names = choose(list(FAULTS), faults.split(","), what="fault of a drill")
    out = out or Path("runs") / f"drill-{time.strftime('%Y%m%d-%H%M%S')}"
    return drill(recipe, overrides, names=names, out=out, minutes=minutes, seed=seed)
