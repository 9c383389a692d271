"""The commands `areal-lite report` and `watch`."""

import time
from pathlib import Path
from typing import Annotated

from rich.console import Console

from areal_lite.launch.commands.options import argument, option, out_file

_SILENT_S = 60.0
"""A writer sends a heartbeat every few seconds; a killed one leaves `writer.json` without further heartbeats."""


def report(
    folders: Annotated[list[Path], argument("RUN_DIR...", "folder of a run or a benchmark; several runs are compared")],
    out: Annotated[
        Path | None, out_file("FILE", "file to write (default: report.html in the folder; comparison.html for several)")
    ] = None,
) -> int:
    """Write an HTML report of a run, or a comparison of several runs.

    The page is one self-contained file. The run may still be active. For the folder of a benchmark, the page shows its
    results.
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
    folder: Annotated[Path, argument("RUN_DIR", "folder of an active run")],
    every_s: Annotated[float, option("S", "seconds between updates", "--every", min=1.0)] = 20.0,
) -> int:
    """Keep the report of a run up to date until it ends.

    Rewrite report.html in the folder; an open page reloads itself. Only the folder is needed: run this on any machine
    that shares the run's disk.
    """
    from areal_lite.record.report import write_report
    from areal_lite.record.writer import read_lease

    lease, beat, since = folder / "writer.json", 0, time.monotonic()
    while now := read_lease(lease)[0]:  # the writer of the folder holds it
        if now != beat:
            beat, since = now, time.monotonic()
        elif time.monotonic() - since > max(_SILENT_S, 2 * every_s):
            break
        if (folder / "config.json").exists():  # model and data are loaded
            path = write_report(folder, refresh_s=every_s)
            Console().print(f"{time.strftime('%H:%M:%S')} {path}", highlight=False, markup=False, soft_wrap=True)
        time.sleep(every_s)
    return report([folder])
