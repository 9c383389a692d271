"""Shows what `bench modes` found: a table for the terminal, one for a page, and a picture. All from `results.json`."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

__all__ = ["draw_modes", "modes_markdown", "modes_tables", "short_markdown"]

_Cell = Callable[[Mapping[str, Any]], str]


def _figure(name: str, spec: str) -> _Cell:
    return lambda line: _spread(line["figures"].get(name), spec)


_SPEED: dict[str, _Cell] = {
    "x best sync": lambda line: _spread(line["ratio"], ".2f"),
    "samples/s": _figure("samples_per_s", ".1f"),
    "s/step": _figure("seconds_per_step", ".2f"),
    "gen tok/s": _figure("generated_tokens_per_s", ".0f"),
    "train tok/s": _figure("trained_tokens_per_s", ".0f"),
}
_TIME: dict[str, _Cell] = {
    "slots full": _figure("occupancy", ".0%"),
    "gen idle": _figure("generator_idle", ".0%"),
    "paused": _figure("generator_paused", ".1%"),
    "train idle": _figure("trainer_idle", ".0%"),
}
_SAMPLES: dict[str, _Cell] = {
    "reward": _figure("reward_equal_steps", ".3f"),
    "in time": _figure("reward_equal_time", ".3f"),
    "ages 0 1 2 ..., %": lambda line: _ages(line["ages"]),
    "p50 p90 max": lambda line: " ".join(str(line["lengths"][key]) for key in ("p50", "p90", "p100")),
}
_SHORT: dict[str, _Cell] = {
    "x best sync": _SPEED["x best sync"],
    **{
        name: lambda line, cell=cell: cell(line).partition("\n")[0]  # type: ignore[misc]
        for name, cell in (_SPEED | _TIME | _SAMPLES).items()
        if name in ("samples/s", "gen tok/s", "gen idle", "paused", "train idle", "reward")
    },
}
"""Of these the spread is shown for the ratio only."""
_TIME_PARTS = {"idle": "#d9a441", "draining": "#c25a00", "paused": "#7a3b8f"}


def modes_tables(content: Mapping[str, Any]) -> list[Table]:
    """Render a line per mode in three tables, each within 80 columns; with several repeats the spread is below."""
    speed, time, samples = (_table(content, columns) for columns in (_SPEED, _TIME, _SAMPLES))
    speed.title = _title(content)
    speed.caption = (
        "Median, lowest-highest. Below a mode: threads of generation + training. x best sync: over samples/s of "
        f"{content['best_synchronous']} in the same repeat."
    )
    time.caption = "Shares of the time. slots full: running samples over slots."
    samples.caption = (
        f"reward: of the last steps; in time: after {content['equal_time_s']:.0f} s. Ages: of the trained tokens. p50 "
        "p90 max: tokens of a sample."
    )
    return [speed, time, samples]


def modes_markdown(content: Mapping[str, Any]) -> str:
    """Render everything in one table in Markdown, with the findings below it."""
    table = _markdown_table(content, _SPEED | _TIME | _SAMPLES)
    return "\n".join([f"{_title(content)}.", "", table, "", *(f"- {text}" for text in content["findings"]), ""])


def short_markdown(content: Mapping[str, Any]) -> str:
    """Render speed, shares of the time and rewards in one narrow table, without the spread of most figures."""
    return f"{_title(content)}.\n\n{_markdown_table(content, _SHORT)}"


def _markdown_table(content: Mapping[str, Any], columns: Mapping[str, _Cell]) -> str:
    header, rule = ["mode", *columns], ["---", *["---:"] * len(columns)]
    rows = [[cell.replace("\n", " · ") for cell in _row(line, columns)] for line in content["modes"]]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in [header, rule, *rows])


def draw_modes(content: Mapping[str, Any], path: Path) -> None:
    """Draw rates, shares of the time and ages of the modes into one SVG file."""
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    lines = content["modes"]
    # The same figures give the same file.
    with plt.rc_context({"svg.hashsalt": "areal-lite", "svg.fonttype": "none", "font.size": 9}):
        height = 1.6 + 0.36 * len(lines)
        figure, axes = plt.subplots(1, 3, figsize=(11, height), sharey=True, layout="constrained", facecolor="#fafafa")
        for one in axes:
            one.set_facecolor("#fafafa")
            one.spines[["top", "right"]].set_visible(False)
        axes[0].set_yticks(range(len(lines)), [f"{line['mode']} ({line['threads']})" for line in lines])
        axes[0].invert_yaxis()
        _draw_rates(axes[0], lines)
        _draw_shares(axes[1], lines)
        _draw_ages(axes[2], lines)
        figure.suptitle(_title(content), fontsize=10)
        figure.savefig(path, metadata={"Date": None})
        plt.close(figure)


def _draw_rates(axes: Any, lines: Sequence[Mapping[str, Any]]) -> None:
    rates = [line["figures"]["samples_per_s"] for line in lines]
    medians = [rate["median"] for rate in rates]
    errors = [[rate["median"] - rate["low"] for rate in rates], [rate["high"] - rate["median"] for rate in rates]]
    axes.barh(range(len(lines)), medians, xerr=errors, color="#1f5fa8", height=0.6, error_kw={"capsize": 3})
    axes.set_xlabel("samples/s (median, lowest to highest)")


def _draw_shares(axes: Any, lines: Sequence[Mapping[str, Any]]) -> None:
    for place, line in enumerate(lines):
        left = 0.0
        for part, color in _TIME_PARTS.items():
            share = line["figures"][f"generator_{part}"]["median"]
            axes.barh(
                place - 0.17, share, left=left, height=0.3, color=color, label=None if place else f"generator {part}"
            )
            left += share
        waiting = line["figures"]["trainer_idle"]["median"]
        axes.barh(place + 0.17, waiting, height=0.3, color="#8a8a8a", label=None if place else "trainer idle")
    axes.set_xlabel("share of the time")
    _add_legend(axes, columns=2)


def _draw_ages(axes: Any, lines: Sequence[Mapping[str, Any]]) -> None:
    import matplotlib.pyplot as plt

    oldest = max((int(age) for line in lines for age in line["ages"]), default=0)
    lefts = [0.0] * len(lines)
    for age in range(oldest + 1):
        shares = [line["ages"].get(str(age), 0) / max(1, sum(line["ages"].values())) for line in lines]
        color = plt.get_cmap("viridis")(1 - age / max(1, oldest))
        axes.barh(range(len(lines)), shares, left=lefts, height=0.6, color=color, label=f"age {age}")
        lefts = [left + share for left, share in zip(lefts, shares, strict=True)]
    axes.set_xlabel("share of the trained tokens")
    _add_legend(axes, columns=5)


def _add_legend(axes: Any, *, columns: int) -> None:
    axes.legend(
        frameon=False, fontsize=8, ncols=columns, loc="lower center", bbox_to_anchor=(0.5, 1.0), handlelength=1.0,
        columnspacing=1.0,
    )  # fmt: skip


def _title(content: Mapping[str, Any]) -> str:
    steps = content["measured_steps"]
    window = f", steps {steps[0] + 1} to {steps[1]}" if steps else ""
    return f"{Path(content['recipe']).stem}: modes on {content['cores']} cores, commit {content['commit']}{window}"


def _table(content: Mapping[str, Any], columns: Mapping[str, _Cell]) -> Table:
    table = Table(title_justify="left", caption_justify="left", box=SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0))
    table.add_column("mode", no_wrap=True)
    for name in columns:
        table.add_column(name, justify="right", no_wrap=True)
    for line in content["modes"]:
        table.add_row(*_row(line, columns))
    return table


def _row(line: Mapping[str, Any], columns: Mapping[str, _Cell]) -> list[str]:
    return [f"{line['mode']}\n{line['threads']}", *(cell(line) for cell in columns.values())]


def _spread(value: Mapping[str, float] | None, spec: str) -> str:
    if value is None:
        return "-"
    low, high = format(value["low"], spec), format(value["high"], spec)
    return format(value["median"], spec) + (f"\n{low}-{high}" if low != high else "")


def _ages(histogram: Mapping[str, int]) -> str:
    total = max(1, sum(histogram.values()))
    oldest = max(map(int, histogram), default=-1)
    return " ".join(f"{100 * histogram.get(str(age), 0) / total:.0f}" for age in range(oldest + 1))
