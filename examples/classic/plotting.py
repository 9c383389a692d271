"""The pictures of the classic scripts: value maps with arrows, learning curves, and the command line that saves them.

Called by every script of this folder. Pictures are drawn on a bare `Figure` (Agg), so no window and no global state.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

ARROWS = ((-1, 0), (0, 1), (1, 0), (0, -1))  # row and column steps of the actions up, right, down, left
COLOURS = ("#1f6f8b", "#d1495b", "#8f9a3a", "#6b4e9b")


def new_figure(columns: int = 2, *, width: float = 8.0, height: float = 3.0) -> tuple[Figure, list[Axes]]:
    """Return a figure with `columns` plots in a row; sizes in inches."""
    figure = Figure(figsize=(width, height), dpi=90, layout="constrained")
    return figure, list(figure.subplots(1, columns, squeeze=False)[0])


def value_map(axes: Axes, values: Any, *, title: str, policy: Any = None, text: str | None = "{:.2f}") -> None:
    """Draw one number per cell, NaN as a wall, and the arrow of the policy's action in it.

    Args:
        axes: Where to draw.
        values: [rows, columns] numbers.
        title: Above the map.
        policy: [rows, columns] actions in the order of `ARROWS`; below 0 = no arrow.
        text: Format of the number written into each cell; None writes none.
    """
    low, high = float(np.nanmin(values)), float(np.nanmax(values))
    axes.imshow(np.ma.masked_invalid(values), cmap="YlGnBu", vmin=low, vmax=high + 0.6 * (high - low))
    axes.set_facecolor("#444444")
    axes.set(title=title, xticks=[], yticks=[])
    for (row, column), value in np.ndenumerate(values):
        if not np.isnan(value) and text:
            axes.text(column, row - 0.24, text.format(value + 0.0), ha="center", va="center", fontsize=6.5)
        if not np.isnan(value) and policy is not None and policy[row, column] >= 0:
            down, right = ARROWS[int(policy[row, column])]
            place = (column - 0.2 * right, row + (0.18 if text else 0.0) - 0.2 * down)
            axes.arrow(*place, 0.25 * right, 0.25 * down, head_width=0.16, head_length=0.14, color="#222222", lw=0.8)


def curves(
    axes: Axes,
    lines: dict[str, Any],
    *,
    x: Sequence[float] | None = None,
    goal: float | None = None,
    goal_label: str = "known answer",
    **labels: Any,
) -> None:
    """Draw one line per name over `x` (default: 0, 1, ...), and the known answer as a dashed line."""
    for colour, (name, line) in zip(COLOURS, lines.items(), strict=False):
        axes.plot(np.arange(len(line)) if x is None else x, line, color=colour, lw=1.3, label=name)
    if goal is not None:
        axes.axhline(goal, color="black", ls="--", lw=1, label=goal_label)
    axes.set(**labels)
    axes.grid(alpha=0.25)
    axes.legend(fontsize=8, frameon=False)


def command_line(main: Callable[[], Figure]) -> None:
    """Run a script's `main` and save its picture as `--out`/NAME.png."""
    parser = argparse.ArgumentParser(description=sys.modules[main.__module__].__doc__)
    parser.add_argument("--out", type=Path, default=Path(), help="folder for the picture (default: here)")
    out = parser.parse_args().out
    save(main(), out / f"{Path(sys.argv[0]).stem}.png")


def save(figure: Figure, path: Path) -> None:
    """Write the picture, the same bytes for the same figure."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Software": None})
    print(f"picture: {path}")
