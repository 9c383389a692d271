"""Tables for the terminal."""

from collections.abc import Iterable

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from areal_lite.record.columns import Columns, Row, cells


def table(columns: str | Columns, rows: Iterable[Row], *, title: str = "", caption: str | None = None) -> Table:
    """Render a table for the terminal; the first column to the left, figures to the right."""
    shown = Table(title=title or None, caption=caption, title_justify="left", caption_justify="left", box=SIMPLE_HEAD,
                  show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))  # fmt: skip
    titles, *lines = cells(columns, rows)
    for place, texts in enumerate(zip(titles, *lines, strict=True)):
        # In a narrow terminal lines are broken between words, never inside one.
        longest = max(map(len, " ".join(texts).split()))
        is_words = longest == max(map(len, "\n".join(texts).split("\n")))
        shown.add_column(texts[0], justify="right" if place else "left", min_width=longest, no_wrap=is_words)
    for line in lines:
        shown.add_row(*(text.replace("**", "") for text in line))
    return shown


def show(*tables: Table) -> None:
    """Print tables in full, even where the terminal, or a pipe's 80 columns, are narrower."""
    for one in tables:
        needed = Console(width=1000).measure(one).minimum
        Console(width=max(Console().width, needed)).print(one, crop=False)
