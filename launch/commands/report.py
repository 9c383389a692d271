"""The commands `areal-lite report` and `watch`."""

import time
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from areal_lite.launch.commands.options import out_file

_SILENT_S = 60.0
"""A writer beats every few seconds: one that was killed leaves `writer.json`, and beats no more."""


def report(
    folders: Annotated[
        list[Path], typer.Argument(metavar="RUN_DIR...", help="run folder, or the folder of a bench; several: compared")
    ],
    out: Annotated[
        Path | None, out_file(metavar="FILE", help="default: report.html in the folder; of several, comparison.html")
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


def watch(
    folder: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="folder of an active run")],
    every_s: Annotated[float, typer.Option("--every", min=1.0, metavar="S", help="seconds between two pages")] = 20.0,
) -> int:
    """Keep the report of a run up to date until it ends.

    Writes report.html into the folder again and again; the page loads itself anew in a browser that shows it. Sees the
    folder alone, so that it works beside the run, or on any machine that shares its disk.
    """
    from areal_lite.record.report import write_report

    lease, beat, since = folder / "writer.json", 0, time.monotonic()
    while now := _beat(lease):  # whoever writes there holds it
        if now != beat:
            beat, since = now, time.monotonic()
        elif time.monotonic() - since > max(_SILENT_S, 2 * every_s):
            break
        if (folder / "config.json").exists():  # model and data are loaded
            path = write_report(folder, refresh_s=every_s)
            Console().print(f"{time.strftime('%H:%M:%S')} {path}", highlight=False, markup=False, soft_wrap=True)
        time.sleep(every_s)
    return report([folder])


def _beat(lease: Path) -> int:
    """Return when a writer was last seen at work, 0 where there is none."""
    try:
        return lease.stat().st_mtime_ns
    except FileNotFoundError:
        return 0
