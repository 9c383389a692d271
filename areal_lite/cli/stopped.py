"""What a command says when its run has ended or was stopped. Called by `cli.py` and `offline_command.py`."""

import argparse
import shlex
from collections.abc import Mapping
from typing import Any

from rich.console import Console

__all__ = ["say_how_to_go_on", "say_where_the_report_is"]


def say_how_to_go_on(command: str, words: argparse.Namespace, *, folder: str, console: Console) -> None:
    """Print the command that continues a run, to be pasted.

    Args:
        command: As one types it.
        words: What was typed: `recipe` and `overrides`.
        folder: The run's.
        console: Where to.
    """
    given = [word for word in words.overrides if not word.startswith(("run.resume=", "run.dir="))]
    line = shlex.join(["areal-lite", command, words.recipe, *given, f"run.resume={folder}"])
    console.print("stopped and saved. To go on:", highlight=False)
    console.print(f"  {line}", highlight=False, markup=False, soft_wrap=True)


def say_where_the_report_is(summary: Mapping[str, Any], *, console: Console) -> None:
    """Print the path of the page with pictures, if one was written."""
    if path := summary.get("report"):
        console.print(f"report: {path}", highlight=False, markup=False, soft_wrap=True)
