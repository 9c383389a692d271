"""How results are shown: columns that read a row, tables for the terminal and for pages, pictures.

Light, as docs/tables.py uses it too. Rows are those of `results.json`.
"""

import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

Row = Mapping[str, Any]
Columns = dict[str, Callable[[Row], str]]
"""Header -> what it shows of a row; a cell may have a second line."""

NOTHING = "-"
ROLLOUT_CASES = {
    "vllm": "vLLM alone",
    "worker": "rollout worker, queue, verifier",
    "drain": "the same, publications that drain",
    "recompute": "the same, publications that interrupt",
}
PEERS = {"async": "areal-lite, eta 4", "sync": "areal-lite, eta 0", "trl": "TRL"}


def spread(values: Iterable[float]) -> dict[str, float]:
    """Return median, lowest and highest of at least one value."""
    known = list(values)
    return {"median": statistics.median(known), "low": min(known), "high": max(known)}


def cell(path: str, spec: str = "", *, ranged: bool = False, scale: float | None = None) -> Callable[[Row], str]:
    """Return a column that shows one value, or of a list or a spread the median.

    Args:
        path: `a.b` of the row.
        spec: Of `format`.
        ranged: Whether lowest and highest stand below the median, where they differ.
        scale: What figures are multiplied with.

    >>> print(cell("a.b", ".1f", ranged=True)({"a": {"b": [1.0, 3.0, 2.0]}}))
    2.0
    1.0-3.0
    """

    def text(value: Any) -> str:
        return format(value if scale is None else scale * value, spec)

    def show(row: Row) -> str:
        value: Any = row
        for key in path.split("."):
            value = value.get(key) if isinstance(value, Mapping) else None
        if isinstance(value, Sequence) and not isinstance(value, str):
            value = spread(value) if value and None not in value else None
        if value is None:
            return NOTHING
        if not isinstance(value, Mapping):
            return text(value)
        median, low, high = (text(value[name]) for name in ("median", "low", "high"))
        return median + (f"\n{low}-{high}" if ranged and low != high else "")

    return show


def beside(*shown: Callable[[Row], str]) -> Callable[[Row], str]:
    """Return a column that shows several in one."""
    return lambda row: ", ".join(filter(None, (show(row) for show in shown))) or NOTHING


COLUMNS: dict[str, Columns] = {
    "queue": {
        "carrier": cell("contender"),
        "samples, clients": lambda row: f"8 x {row['tokens']}, {row['clients']}",
        "groups/s": cell("groups_per_s", ".0f", ranged=True),
        "MB/s": cell("mb_per_s", ".1f"),
        "over ray": cell("over.ray", ".2f"),
        "over zeromq": cell("over.zeromq", ".2f"),
        "over clear": cell("over.in the clear", ".2f"),
    },
    "rollout": {
        "generating": lambda row: ROLLOUT_CASES[row["case"]],
        "tokens/s": cell("tokens_per_s", ".0f", ranged=True),
        "weight sync s": cell("handovers_s", ".3f"),
        "over line above": cell("over", ".2f"),
    },
    "train": {
        "side and pass, lengths, work": lambda row: (
            f"{row['side']}, {row['micro_batch']}\n{row['recipe'].removesuffix('_cpu')}, {row['work']}"
        ),
        "tokens/s": cell("tokens_per_s", ".0f", ranged=True),
        "places": cell("positions_per_token", ".2f"),
        "MB": cell("peak_mb", ".0f"),
        "gradient": cell("grad_norm", ".5g"),
        "over padded": cell("over.padded", ".2f"),
        "over fastest": cell("over.fastest", ".2f"),
    },
    "handover": {
        "model, parameters, MB": lambda row: (
            f"{row['width']}x{row['layers']}, {row['parameters'] / 1e6:.2f} M, {row['size_bytes'] / 1e6:.1f}"
        ),
        "stage": cell("staging_s", ".1f", scale=1e3),
        "pause": cell("pausing_s", ".1f", scale=1e3),
        "load": cell("loading_s", ".1f", scale=1e3),
        "resume": cell("resuming_s", ".1f", scale=1e3),
        "paused": cell("paused_s", ".1f", scale=1e3, ranged=True),
        "copy, over copy": beside(cell("copy_s", ".1f", scale=1e3), cell("over_copy", ".2f")),
    },
    "peers": {
        "side": lambda row: PEERS[row["side"]],
        "samples/s": cell("samples_per_s", ".0f", ranged=True),
        "x TRL": cell("speed_over_trl", ".2f"),
        "s to it, steps to it": beside(cell("seconds_to", ".1f"), cell("steps_to", ".0f")),
        "x sooner": cell("sooner_than_trl", ".2f"),
        "accuracy": cell("last_accuracy", ".3f"),
        "tokens": cell("tokens", ".1f"),
    },
    "peers speed": {
        "lengths": cell("lengths"),
        "M parameters": cell("parameters", ".1f", scale=1e-6),
        "side": lambda row: PEERS[row["side"]],
        "setting": cell("setting"),
        "samples/s": cell("samples_per_s", ".2f", ranged=True),
        "tokens/s": cell("tokens_per_s", ".0f", ranged=True),
        "x TRL": cell("speed_over_trl", ".2f", ranged=True),
    },
    "agents": {
        "dialogue": cell("side"),
        "environment s": cell("latency_s", "g"),
        "tokens/s": cell("tokens_per_s", ".0f", ranged=True),
        "slots full": cell("full", ".0%", ranged=True),
        "over workflow": cell("over", ".2f", ranged=True),
    },
    "drill": {
        "fault": lambda row: (f"{row['times']} x " if row["times"] > 1 else "") + row["fault"],
        "noticed, s": cell("noticed_s", ".1f", ranged=True),
        "back, s": cell("back_s", ".1f", ranged=True),
        "lost": cell("steps_lost"),
        "healed by": cell("healed_by"),
        "losses": cell("losses"),
        "outcome": lambda row: (
            "FAILED" if row["problems"] else "left out: needs root" if row.get("left_out") else "passed"
        ),
    },
}
COLUMNS["soak"] = COLUMNS["drill"]
"""By benchmark; those of `modes` and `plan` are with them. All times of a hand-over are in milliseconds."""


def table(columns: Columns, rows: Iterable[Row], *, title: str = "", caption: str | None = None) -> Table:
    """Render a table for the terminal; the first column to the left, figures to the right."""
    shown = Table(title=title or None, caption=caption, title_justify="left", caption_justify="left", box=SIMPLE_HEAD,
                  show_edge=False, padding=(0, 1, 0, 0))  # fmt: skip
    for place, name in enumerate(columns):
        shown.add_column(name, justify="right" if place else "left", no_wrap=True)
    for row in rows:
        shown.add_row(*(show(row) for show in columns.values()))
    return shown


def markdown(columns: Columns, rows: Iterable[Row]) -> str:
    """Render the same in Markdown, with the lines of a cell side by side."""
    lines = ["| " + " | ".join(columns) + " |", "|---" + "|---:" * (len(columns) - 1) + "|"]
    for row in rows:
        lines.append("| " + " | ".join(show(row).replace("\n", " · ") for show in columns.values()) + " |")
    return "\n".join(lines)


@contextmanager
def picture(path: Path, *, size: tuple[float, float], font: int = 9, **options: Any) -> Iterator[tuple[Any, Any]]:
    """Yield a figure and its axes, on a light ground that can be read in a dark page; written as SVG at the end."""
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    # The same figures give the same file.
    with plt.rc_context({"svg.hashsalt": "areal-lite", "svg.fonttype": "none", "font.size": font}):
        figure, axes = plt.subplots(figsize=size, layout="constrained", facecolor="#fafafa", **options)
        for one in figure.axes:
            one.set_facecolor("#fafafa")
            one.spines[["top", "right"]].set_visible(False)
        yield figure, axes
        figure.savefig(path, metadata={"Date": None})
        plt.close(figure)
