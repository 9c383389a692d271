"""What stands on the page about `results.json` of `areal-lite bench`, whichever benchmark wrote it."""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from areal_lite.record.report.charts import COLOURS, Chart, Line, as_shares, bars, lines
from areal_lite.record.report.page import MOST_COLUMNS, Block, Section, charts_block, figure_text
from areal_lite.record.report.read import Row, number, numbers, table

_PLACE = ("benchmark", "plan", "recipe", "commit", "processor", "cores", "best_synchronous")
_DECIDE = {
    "name", "mode", "over_the_best_synchronous", "status", "start", "end", "samples_per_s", "tokens_per_s", "seconds",
    "trainer_idle", "reward_equal_time", "paused_s", "over_copy",
}  # fmt: skip
"""What a table shows before other figures, of whichever benchmark."""


def bench_sections(results: Row) -> Iterator[Section]:
    """Yield what is known by its shape: figures by mode with their spread, runs with a curve, rows of plain figures."""
    place = {key: figure_text(results[key]) for key in _PLACE if results.get(key) is not None}
    place |= {"recipe": Path(place["recipe"]).stem} if "recipe" in place else {}
    yield Section("Overview", [Block("tiles", _spaced(place)), Block("list", results.get("findings"))])
    modes, runs = _rows(results.get("modes")), _rows(results.get("runs"))
    yield Section("Modes", [_table(list(map(_mode_row, modes))), charts_block(_mode_charts(modes))])
    curve = lines("held out", list(map(_curve, runs)), x="trainer step", y="mean score")
    yield Section("Runs", [charts_block([curve]), _table(_plain(runs))])
    for name, value in results.items():
        if name not in ("modes", "runs"):
            yield Section(name.replace("_", " ").capitalize(), [_table(_plain(_rows(value)))])
    yield Section("All of it", [Block("folded", json.dumps(results, indent=1, ensure_ascii=False), "results.json")])


def _mode_row(mode: Row) -> Row:
    figures = {"over_the_best_synchronous": mode.get("ratio")} | table(mode.get("figures"))
    known = {key: mode.get(key) for key in ("mode", "threads", "repeats")}
    return known | {name: _spread_text(numbers(spread)) for name, spread in figures.items()}


def _spread_text(spread: Mapping[str, float]) -> str:
    middle, ends = spread.get("median"), {spread.get("low"), spread.get("high")}
    if len(ends) == 1 or None in ends:
        return figure_text(middle)
    return f"{figure_text(middle)} ({figure_text(spread['low'])}\u00a0to\u00a0{figure_text(spread['high'])})"


def _mode_charts(modes: Sequence[Row]) -> Iterator[Chart | None]:
    for key in dict.fromkeys(key for mode in modes for key in table(mode.get("figures"))):
        spreads = {str(mode.get("mode")): numbers(table(mode.get("figures")).get(key)) for mode in modes}
        yield _spread_chart(key.replace("_", " "), spreads)
    shares = {str(mode.get("mode")): as_shares(numbers(mode.get("ages"))) for mode in modes}
    yield bars("ages of the trained tokens", shares, x="versions", y="share of tokens")


def _spread_chart(title: str, spreads: Mapping[str, Mapping[str, float]]) -> Chart | None:
    known = {name: spread for name, spread in spreads.items() if "median" in spread}
    medians = [spread["median"] for spread in known.values()]
    error = {
        "type": "data", "symmetric": False, "color": COLOURS[-1],
        "array": [spread.get("high", spread["median"]) - spread["median"] for spread in known.values()],
        "arrayminus": [spread["median"] - spread.get("low", spread["median"]) for spread in known.values()],
    }  # fmt: skip
    trace = {"type": "bar", "x": list(known), "y": medians, "error_y": error, "marker": {"color": COLOURS[0]}}
    note = "median, and the spread of the repeats"
    return Chart(title=title, data=[trace], layout={"showlegend": False}, note=note) if known else None


def _curve(run: Row) -> Line:
    curve, style = numbers(run.get("curve")), {"mode": "lines+markers"}
    return Line(name=str(run.get("name")), x=list(map(float, curve)), y=list(curve.values()), style=style)


def _plain(rows: Sequence[Row]) -> list[Row]:
    """Keep figures and words, and the spread of repeats; what else is nested stands in the whole."""
    shown = [
        {key: _repeats_text(value) if isinstance(value, list) else value for key, value in row.items()} for row in rows
    ]
    keys = dict.fromkeys(key for row in shown for key, value in row.items() if isinstance(value, (str, int, float)))
    return [{key: row.get(key) for key in keys} for row in shown]


def _repeats_text(values: Sequence[Any]) -> str | None:
    known = [value for value in values if number(value) is not None]
    return _spread_text({"median": median(known), "low": min(known), "high": max(known)}) if known else None


def _table(rows: Sequence[Row]) -> Block:
    """Show the figures that decide, and of the others as many as there is room for."""
    names = dict.fromkeys(name for row in rows for name in row)
    few = sorted(names, key=lambda name: name not in _DECIDE)[:MOST_COLUMNS]
    caption = f"figures in results.json alone, below: {len(names) - len(few)}"
    content = [_spaced({name: row.get(name) for name in names if name in few}) for row in rows]
    return Block("table", content, caption if len(names) > len(few) else "")


def _spaced(row: Mapping[str, Any]) -> Row:
    return {key.replace("_", " "): value for key, value in row.items()}


def _rows(value: Any) -> list[Row]:
    return [dict(row) for row in value if isinstance(row, Mapping)] if isinstance(value, list) else []
