"""Shows what `bench modes` found: tables for the terminal and for pages, and a picture. All from `results.json`."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from areal_lite.launch.bench.view import Columns, Row, cell, markdown, picture, table

__all__ = ["ages", "draw_modes", "modes_markdown", "modes_tables"]


def ages(line: Row) -> str:
    """Return the trained tokens of age 0, 1, 2 ... in percent."""
    total, oldest = max(1, sum(line["ages"].values())), max(map(int, line["ages"]), default=-1)
    return " ".join(f"{100 * line['ages'].get(str(age), 0) / total:.0f}" for age in range(oldest + 1))


_MODE: Columns = {"mode": lambda line: f"{line['mode']}\n{line['threads']}"}
_SPEED: Columns = _MODE | {
    "x best sync": cell("ratio", ".2f", ranged=True),
    "samples/s": cell("figures.samples_per_s", ".1f", ranged=True),
    "s/step": cell("figures.seconds_per_step", ".2f", ranged=True),
    "gen tok/s": cell("figures.generated_tokens_per_s", ".0f", ranged=True),
    "train tok/s": cell("figures.trained_tokens_per_s", ".0f", ranged=True),
}
_TIME: Columns = _MODE | {
    "slots full": cell("figures.occupancy", ".0%", ranged=True),
    "gen idle": cell("figures.generator_idle", ".0%", ranged=True),
    "paused": cell("figures.generator_paused", ".1%", ranged=True),
    "train idle": cell("figures.trainer_idle", ".0%", ranged=True),
}
_SAMPLES: Columns = _MODE | {
    "reward": cell("figures.reward_equal_steps", ".3f", ranged=True),
    "in time": cell("figures.reward_equal_time", ".3f", ranged=True),
    "ages 0 1 2 ..., %": ages,
    "p50 p90 max": lambda line: " ".join(str(line["lengths"][key]) for key in ("p50", "p90", "p100")),
}
_TIME_PARTS = {"idle": "#d9a441", "draining": "#c25a00", "paused": "#7a3b8f"}


def modes_tables(content: Row) -> list[Any]:
    """Render a line per mode in three tables, each within 80 columns; with several repeats the spread is below."""
    lines, best = content["modes"], content["best_synchronous"]
    return [
        table(_SPEED, lines, title=_title(content), caption="Median, lowest-highest. Below a mode: threads of "
              f"generation + training. x best sync: over samples/s of {best} in the same repeat."),
        table(_TIME, lines, caption="Shares of the time. slots full: running samples over slots."),
        table(_SAMPLES, lines, caption=f"reward: of the last steps; in time: after {content['equal_time_s']:.0f} s. "
              "Ages: of the trained tokens. p50 p90 max: tokens of a sample."),
    ]  # fmt: skip


def modes_markdown(content: Row) -> str:
    """Render the three tables in Markdown, with the findings below them."""
    shown = [text for columns in (_SPEED, _TIME, _SAMPLES) for text in (markdown(columns, content["modes"]), "")]
    return "\n".join([f"{_title(content)}.", "", *shown, *(f"- {text}" for text in content["findings"]), ""])


def draw_modes(content: Row, path: Path) -> None:
    """Draw rates, shares of the time and ages of the modes into one SVG file."""
    lines = content["modes"]
    with picture(path, size=(11, 1.6 + 0.36 * len(lines)), ncols=3, sharey=True) as (figure, (rates, shares, ages)):
        rates.set_yticks(range(len(lines)), [f"{line['mode']} ({line['threads']})" for line in lines])
        rates.invert_yaxis()
        _draw_rates(rates, [line["figures"]["samples_per_s"] for line in lines])
        _draw_shares(shares, lines)
        _draw_ages(ages, lines)
        for axes, columns in ((shares, 2), (ages, 5)):
            axes.legend(frameon=False, fontsize=8, ncols=columns, loc="lower center", bbox_to_anchor=(0.5, 1.0),
                        handlelength=1.0, columnspacing=1.0)  # fmt: skip
        figure.suptitle(_title(content), fontsize=10)


def _draw_rates(axes: Any, rates: Sequence[Row]) -> None:
    medians = [rate["median"] for rate in rates]
    errors = [[rate["median"] - rate["low"] for rate in rates], [rate["high"] - rate["median"] for rate in rates]]
    axes.barh(range(len(rates)), medians, xerr=errors, color="#1f5fa8", height=0.6, error_kw={"capsize": 3})
    axes.set_xlabel("samples/s (median, lowest to highest)")


def _draw_shares(axes: Any, lines: Sequence[Row]) -> None:
    for place, line in enumerate(lines):
        left = 0.0
        for part, color in _TIME_PARTS.items():
            share, label = line["figures"][f"generator_{part}"]["median"], None if place else f"generator {part}"
            axes.barh(place - 0.17, share, left=left, height=0.3, color=color, label=label)
            left += share
        waiting = line["figures"]["trainer_idle"]["median"]
        axes.barh(place + 0.17, waiting, height=0.3, color="#8a8a8a", label=None if place else "trainer idle")
    axes.set_xlabel("share of the time")


def _draw_ages(axes: Any, lines: Sequence[Row]) -> None:
    import matplotlib.pyplot as plt

    oldest = max((int(age) for line in lines for age in line["ages"]), default=0)
    lefts = [0.0] * len(lines)
    for age in range(oldest + 1):
        shares = [line["ages"].get(str(age), 0) / max(1, sum(line["ages"].values())) for line in lines]
        color = plt.get_cmap("viridis")(1 - age / max(1, oldest))
        axes.barh(range(len(lines)), shares, left=lefts, height=0.6, color=color, label=f"age {age}")
        lefts = [left + share for left, share in zip(lefts, shares, strict=True)]
    axes.set_xlabel("share of the trained tokens")


def _title(content: Row) -> str:
    steps = content["measured_steps"]
    window = f", steps {steps[0] + 1} to {steps[1]}" if steps else ""
    return f"{Path(content['recipe']).stem}: modes on {content['cores']} cores, commit {content['commit']}{window}"
