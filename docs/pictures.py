"""Pictures of the pages as SVG files, drawn by `docs/tables.py`."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib import pyplot as plt

from areal_lite.launch.bench.modes import title_of
from areal_lite.record.columns import Row
from areal_lite.record.report.charts import as_shares

matplotlib.use("svg")


@contextmanager
def picture(path: Path, *, size: tuple[float, float], font: int = 9, **options: Any) -> Iterator[tuple[Any, Any]]:
    """Yield a figure and its axes, and write them as SVG; the background is light, for dark pages too."""
    # The same figures give the same file.
    with plt.rc_context({"svg.hashsalt": "areal-lite", "svg.fonttype": "none", "font.size": font}):
        figure, axes = plt.subplots(figsize=size, layout="constrained", facecolor="#fafafa", **options)
        for one in figure.axes:
            one.set_facecolor("#fafafa")
            one.spines[["top", "right"]].set_visible(False)
        yield figure, axes
        figure.savefig(path, metadata={"Date": None})
        plt.close(figure)


def draw_modes(content: Row, path: Path) -> None:
    """Draw rates, shares of time and ages of the modes into one SVG file."""
    lines = content["modes"]

    def medians(name: str) -> list[float]:
        return [line["figures"][name]["median"] for line in lines]

    with picture(path, size=(11, 1.6 + 0.36 * len(lines)), ncols=3, sharey=True) as (
        figure,
        (rates, shares, ages),
    ):
        rates.set_yticks(range(len(lines)), [f"{line['mode']} ({line['threads']})" for line in lines])
        rates.invert_yaxis()
        spreads, color = [line["figures"]["samples_per_s"] for line in lines], plt.get_cmap("viridis")
        errors = [[one["median"] - one["low"] for one in spreads], [one["high"] - one["median"] for one in spreads]]
        rates.barh(range(len(lines)), medians("samples_per_s"), xerr=errors, color="#1f5fa8", height=0.6,
                   error_kw={"capsize": 3})  # fmt: skip
        parts = {"idle": "#d9a441", "draining": "#c25a00", "paused": "#7a3b8f"}
        stacked = [(f"generator {part}", medians(f"generator_{part}"), color) for part, color in parts.items()]
        _stack(shares, stacked, shift=-0.17, height=0.3)
        _stack(shares, [("trainer idle", medians("trainer_idle"), "#8a8a8a")], shift=0.17, height=0.3)
        of_age = [as_shares(line["ages"]) for line in lines]
        oldest = max((int(age) for share in of_age for age in share), default=0)
        _stack(ages, [
            (f"age {age}", [share.get(str(age), 0.0) for share in of_age], color(1 - age / max(1, oldest)))
            for age in range(oldest + 1)
        ])  # fmt: skip
        labels = ("samples/s (median, lowest to highest)", "share of the time", "share of the trained tokens")
        for axes, label in zip((rates, shares, ages), labels, strict=True):
            axes.set_xlabel(label)
        for axes, columns in ((shares, 2), (ages, 5)):
            axes.legend(frameon=False, fontsize=8, ncols=columns, loc="lower center", bbox_to_anchor=(0.5, 1.0),
                        handlelength=1.0, columnspacing=1.0)  # fmt: skip
        figure.suptitle(title_of(content), fontsize=10)


def _stack(axes: Any, parts: Iterable[tuple[str, list[float], Any]], shift: float = 0.0, height: float = 0.6) -> None:
    lefts: Any = 0.0
    for label, widths, color in parts:
        axes.barh(np.arange(len(widths)) + shift, widths, left=lefts, height=height, color=color, label=label)
        lefts = lefts + np.array(widths)
