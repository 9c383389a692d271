"""The command `areal-lite report`. Called by `cli.py`; heavy imports happen inside."""

import argparse
from pathlib import Path
from typing import Any

from rich.console import Console

__all__ = ["add_report"]


def add_report(commands: Any) -> None:
    """Add the command; `commands` is what `add_subparsers` returned."""
    parser = commands.add_parser(
        "report",
        help="make a page with pictures of a run, or compare runs",
        description="Write one self-contained page: of a run, also one that is still going; of several runs, compared; "
        "or of the results of areal-lite bench.",
    )
    parser.add_argument(
        "folders",
        nargs="+",
        metavar="RUN_DIR",
        type=Path,
        help="run folder, or the folder of a bench; several: compared",
    )
    parser.add_argument(
        "--out", metavar="FILE", type=Path, help="default: report.html in the folder; of several, ./comparison.html"
    )
    parser.set_defaults(command=_report)


def _report(words: argparse.Namespace) -> int:
    from areal_lite.record.report import write_bench, write_comparison, write_report

    first = words.folders[0]
    if len(words.folders) > 1:
        path = write_comparison(words.folders, out=words.out or Path("comparison.html"))
    elif (first / "results.json").is_file():
        path = write_bench(first, out=words.out)
    else:
        path = write_report(first, out=words.out)
    Console().print(f"report: {path}", highlight=False, markup=False, soft_wrap=True)
    return 0
