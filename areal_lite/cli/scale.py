"""`areal-lite scale`: more or fewer workers, while a run goes on."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from areal_lite.cli.options import word_list


def scale(
    folder: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="folder of an active run")],
    workers: Annotated[list[str], word_list("rollout=N verifier=N", "how many there shall be from now on")],
    timeout_s: Annotated[float, typer.Option("--timeout", help="seconds the run may take to hear of it")] = 60.0,
) -> int:
    """Add workers to an active run, or remove some.

    New ones start beside the steps, on any node that has room, one that joined the Ray cluster since included; a
    rollout worker joins at the next publication of weights. Those with the highest numbers leave at the next step; what
    they had in hand is lent to others. A resume has as many as the recipe says.
    """
    from areal_lite.launch.run.scaling import parse_counts, request

    request(folder.resolve(), parse_counts(workers), timeout_s=timeout_s)
    Console().print("the run has taken it up: its terminal says who joins and leaves", highlight=False)
    return 0
