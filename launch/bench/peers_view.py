"""Draws what `bench peers` found: the held-out accuracy over the seconds of training, a line per run."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from areal_lite.launch.bench.peers import LABELS

__all__ = ["draw_peers"]

_COLORS = {"async": "#1f5fa8", "sync": "#7fa6d6", "trl": "#c25a00"}


def draw_peers(rows: Sequence[Mapping[str, Any]], *, accuracy: float, path: Path) -> None:
    """Draw one SVG file.

    Args:
        rows: Of `results.json`.
        accuracy: The one whose time is taken.
        path: Of the file.
    """
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    # The same figures give the same file.
    with plt.rc_context({"svg.hashsalt": "areal-lite", "svg.fonttype": "none", "font.size": 9}):
        figure, axes = plt.subplots(figsize=(6.5, 3.6), layout="constrained", facecolor="#fafafa")
        axes.set_facecolor("#fafafa")
        axes.spines[["top", "right"]].set_visible(False)
        axes.axhline(accuracy, color="#8a8a8a", linewidth=0.8, linestyle="--")
        for row in rows:
            for place, curve in enumerate(row["curves"]):
                _, seconds, values = zip(*curve, strict=True)
                label = None if place else LABELS[row["side"]]
                axes.plot(seconds, values, color=_COLORS[row["side"]], marker=".", linewidth=1.2, label=label)
        axes.set_xlabel("seconds of training (without start-up and evaluation)")
        axes.set_ylabel("held-out accuracy, greedy")
        axes.legend(frameon=False, loc="lower right")
        figure.savefig(path, metadata={"Date": None})
        plt.close(figure)
