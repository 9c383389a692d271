"""What the small benchmarks (`bench queue` and its like) write and show: one `results.json`, one table.

Each has a module of its name here with `COLUMNS` and `cells(row)`, which this page, docs/performance_table.py
and whoever else shows its rows use.
"""

import argparse
import statistics
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module, metadata
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from areal_lite.launch.bench.results import measured_where, write_results

__all__ = ["add_out", "finish", "middle", "target", "versions", "with_spread"]


def add_out(parser: argparse.ArgumentParser, benchmark: str) -> None:
    """Add the option `--out DIR`."""
    default = Path("runs") / f"bench-{benchmark}"
    parser.add_argument("--out", metavar="DIR", type=Path, default=default, help=f"folder; default {default}")


def target(
    measure: str, *, at_least: float | None = None, at_most: float | None = None, values: Sequence[float]
) -> Any:
    """Return an entry for `targets`: what was aimed at, and the median, lowest and highest of what was measured."""
    return {
        "measure": measure,
        "at_least": at_least,
        "at_most": at_most,
        "median": statistics.median(values),
        "low": min(values),
        "high": max(values),
    }


def with_spread(values: Sequence[float], spec: str) -> str:
    """Write the median, and below it the lowest and highest; nothing of nothing.

    >>> print(with_spread([1.0, 3.0, 2.0], ".1f"))
    2.0
    1.0-3.0
    """
    below = f"\n{format(min(values), spec)}-{format(max(values), spec)}" if len(values) > 1 else ""
    return middle(values, spec) + below


def middle(values: Sequence[float], spec: str) -> str:
    """Write the median; nothing of nothing."""
    return format(statistics.median(values), spec) if values else ""


def versions(*packages: str) -> dict[str, str]:
    """Return the versions of packages."""
    return {name: metadata.version(name) for name in packages}


def finish(
    benchmark: str,
    *,
    title: str,
    settings: Mapping[str, Any],
    rows: Sequence[Mapping[str, Any]],
    targets: Sequence[Any],
    packages: Sequence[str],
    out: Path,
    console: Console,
) -> None:
    """Write `results.json` and show its rows as a table.

    Args:
        benchmark: Its name, as typed.
        title: Of the table.
        settings: What was run.
        rows: What was measured, as `cells` of the benchmark's module takes them.
        targets: Entries from `target`.
        packages: Whose versions matter.
        out: Folder of the file.
        console: Gets the table.
    """
    content = {
        "benchmark": benchmark,
        **measured_where(),
        "versions": versions("areal-lite", *packages),
        "settings": dict(settings),
        "rows": list(rows),
        "targets": list(targets),
    }
    write_results(content, out=out)
    console.print(_table(benchmark, content["rows"], title=title))
    console.print(f"results: {out / 'results.json'}", highlight=False, soft_wrap=True)


def _table(benchmark: str, rows: Sequence[Mapping[str, Any]], *, title: str) -> Table:
    module = import_module(f"areal_lite.launch.bench.{benchmark}")
    columns: Sequence[str] = module.COLUMNS
    cells: Callable[[Mapping[str, Any]], list[str]] = module.cells
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0))
    for place, name in enumerate(columns):
        table.add_column(name, justify="right" if place else "left")
    for row in rows:
        table.add_row(*cells(row))
    return table
