"""The command `areal-lite report`."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console


def report(
    folders: Annotated[
        list[Path], typer.Argument(metavar="RUN_DIR...", help="run folder, or the folder of a bench; several: compared")
    ],
    out: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="default: report.html in the folder; of several, comparison.html"),
    ] = None,
) -> int:
    """Make a page with pictures of a run, or compare runs.

    Writes one self-contained page: of a run, also one that is still going; of several runs, compared; or of the results
    of areal-lite bench.
    """
    from areal_lite.record.report import write_bench, write_comparison, write_report

    if len(folders) > 1:
        path = write_comparison(folders, out=out or Path("comparison.html"))
    elif (folders[0] / "results.json").is_file():
        path = write_bench(folders[0], out=out)
    else:
        path = write_report(folders[0], out=out)
    Console().print(f"report: {path}", highlight=False, markup=False, soft_wrap=True)
    return 0
