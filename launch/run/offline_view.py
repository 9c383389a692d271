"""What a person sees of an offline run: a progress bar on a terminal, plain lines elsewhere."""

import time
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.text import Text

__all__ = ["OfflineView"]


class OfflineView:
    """Shows steps and evaluations; everything it knows it is told."""

    def __init__(self, title: str, *, console: Console, plain_every_s: float = 5.0) -> None:
        """Show nothing yet.

        Args:
            title: Name of the command.
            console: Where to.
            plain_every_s: Seconds between lines where there is no terminal.
        """
        self._title, self._console, self._plain_every_s = title, console, plain_every_s
        self._progress: Progress | None = None
        self._total, self._first, self._began, self._shown_at = 0, 0, 0.0, 0.0

    def say(self, text: str, *, style: str = "") -> None:
        """Print a line, above the bar if there is one; brackets in the text are only brackets."""
        self._console.print(Text(text, style=style), soft_wrap=True)

    def begin(self, *, done: int, total: int) -> None:
        """Start showing steps."""
        self._total, self._first, self._began = total, done, time.monotonic()
        if self._console.is_terminal:
            columns = (
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.fields[figures]}"),
            )
            self._progress = Progress(
                *columns, TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn(), console=self._console
            )
            self._task = self._progress.add_task(self._title, total=total, completed=done, figures="")
            self._progress.start()

    def step(self, row: Mapping[str, Any], evaluation: Mapping[str, float]) -> None:
        """Show one more completed step, with the newest figures over the held-out rows."""
        figures = f"loss {_show(row['loss'])}"
        if evaluation:
            figures += f", {describe_figures(evaluation)}"
        if self._progress is not None:
            self._progress.update(self._task, completed=row["step"], figures=figures)
        elif time.monotonic() - self._shown_at > self._plain_every_s or row["step"] == self._total:
            self._shown_at = time.monotonic()
            self.say(f"{self._title} step {row['step']}/{self._total}  {figures}  left {self._time_left(row['step'])}")

    def end(self) -> None:
        """Stop the bar; what it showed last stays."""
        if self._progress is not None:
            self._progress.stop()
            self._progress = None

    def _time_left(self, step: int) -> str:
        per_step = (time.monotonic() - self._began) / max(step - self._first, 1)
        return f"{per_step * (self._total - step):.0f} s"


def describe_figures(figures: Mapping[str, float]) -> str:
    """Return figures over the held-out rows in one line."""
    return "held out: " + ", ".join(f"{name} {_show(value)}" for name, value in figures.items())


def _show(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
