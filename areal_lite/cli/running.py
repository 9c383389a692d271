"""What every training command does around its run: a summary at the end, or how to go on after Ctrl-C."""

import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

__all__ = ["run_and_sum_up", "summary_rows"]


def run_and_sum_up(
    command: Sequence[str],
    overrides: Sequence[str],
    *,
    run: Callable[[Console], Mapping[str, Any]],
    rows: Callable[[Mapping[str, Any]], Iterable[tuple[str, str]]],
) -> int:
    """Run, and show what came of it.

    Args:
        command: The command and its recipe, as typed.
        overrides: The settings, as typed.
        run: Runs, and returns the summary.
        rows: Turns a summary into the rows that are shown of it.

    Returns:
        Exit code: 0 done, 130 stopped by Ctrl-C and saved.
    """
    from areal_lite.launch.run.controller import Interrupted

    console = Console()
    try:
        summary = run(console)
    except Interrupted as stop:
        kept = [word for word in overrides if not word.startswith(("run.resume=", "run.dir="))]
        line = shlex.join(["areal-lite", *command, *kept, f"run.resume={stop}"])
        console.print("stopped and saved. To go on:", highlight=False)
        console.print(f"  {line}", highlight=False, markup=False, soft_wrap=True)
        return 130
    table = Table(title="summary", show_header=False, title_justify="left")
    for row in rows(summary):
        table.add_row(*row)
    console.print(table)
    if path := summary.get("report"):
        console.print(f"report: {path}", highlight=False, markup=False, soft_wrap=True)
    return 0


def summary_rows(summary: Mapping[str, Any], keys: Iterable[str]) -> Iterable[tuple[str, str]]:
    """Yield name and text of some of a summary's figures."""
    for key in keys:
        value = summary[key]
        yield key, f"{value:.4g}" if isinstance(value, float) else str(value)
