"""The sections of the page about `results.json` of `areal-lite bench`, whichever benchmark wrote it.

Known by its shape: figures by mode with their spread, runs with a curve, other rows of plain figures.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import Any

from areal_lite.record.report.charts import COLOURS, Chart, Line, bars, lines
from areal_lite.record.report.html import NOTHING, Section, figure_text, folded, rows_table, tiles
from areal_lite.record.report.read import Row, number, numbers, table

__all__ = ["bench_sections"]

_PLACE = ("benchmark", "plan", "recipe", "commit", "processor", "cores", "best_synchronous")


def bench_sections(results: Mapping[str, Any]) -> Iterator[Section]:
    """Yield what there is to show."""
    place = {key.replace("_", " "): figure_text(results[key]) for key in _PLACE if results.get(key) is not None}
    findings = "".join(f"<li>{escape(str(text))}</li>" for text in _list(results.get("findings")))
    yield Section(title="Overview", before=tiles(place) + (f"<ul>{findings}</ul>" if findings else ""))
    modes = _rows(results.get("modes"))
    yield Section(
        title="Modes", charts=list(_mode_charts(modes)), before=rows_table([_mode_row(mode) for mode in modes])
    )
    runs = _rows(results.get("runs"))
    yield Section(title="Runs", charts=[_curves(runs)], after=rows_table(_plain(runs)))
    for name, value in results.items():
        if name not in ("modes", "runs") and (rows := _plain(_rows(value))):
            yield Section(title=name.replace("_", " ").capitalize(), before=rows_table(rows))
    text = escape(json.dumps(results, indent=1, ensure_ascii=False))
    yield Section(title="All of it", before=folded("results.json", f"<pre>{text}</pre>"))


def _mode_row(mode: Row) -> Row:
    figures = {
        name.replace("_", " "): _spread_text(table(spread)) for name, spread in table(mode.get("figures")).items()
    }
    ratio = {"over the best synchronous": _spread_text(table(mode.get("ratio")))}
    return {"mode": mode.get("mode"), "threads": mode.get("threads"), "repeats": mode.get("repeats")} | ratio | figures


def _spread_text(spread: Row) -> str:
    median, low, high = (number(spread.get(key)) for key in ("median", "low", "high"))
    if median is None:
        return NOTHING
    same = low == high or low is None or high is None
    return figure_text(median) + ("" if same else f" ({figure_text(low)} to {figure_text(high)})")


def _mode_charts(modes: Sequence[Row]) -> Iterator[Chart | None]:
    names = [str(mode.get("mode")) for mode in modes]
    for key in dict.fromkeys(key for mode in modes for key in table(mode.get("figures"))):
        spreads = [numbers(table(table(mode.get("figures")).get(key))) for mode in modes]
        yield _spread_chart(key.replace("_", " "), names, spreads)
    for key, title, unit in (("ages", "ages of the trained tokens", "versions"),):
        histograms = {name: numbers(table(mode.get(key))) for name, mode in zip(names, modes, strict=True)}
        totals = {name: sum(values.values()) or 1.0 for name, values in histograms.items()}
        shares = {
            name: {age: tokens / totals[name] for age, tokens in values.items()} for name, values in histograms.items()
        }
        yield bars(title, shares, x=unit, y="share of tokens")


def _spread_chart(title: str, names: list[str], spreads: Sequence[Mapping[str, float]]) -> Chart | None:
    known = [(name, spread) for name, spread in zip(names, spreads, strict=True) if "median" in spread]
    if not known:
        return None
    medians = [spread["median"] for _, spread in known]
    error = {
        "type": "data", "symmetric": False,
        "array": [spread.get("high", spread["median"]) - spread["median"] for _, spread in known],
        "arrayminus": [spread["median"] - spread.get("low", spread["median"]) for _, spread in known],
    }  # fmt: skip
    trace = {
        "type": "bar",
        "x": [name for name, _ in known],
        "y": medians,
        "error_y": error,
        "marker": {"color": COLOURS[0]},
    }
    return Chart(title=title, data=[trace], layout={"showlegend": False}, note="median, and the spread of the repeats")


def _curves(runs: Sequence[Row]) -> Chart | None:
    curves = []
    for run in runs:
        curve = numbers(table(run.get("curve")))
        steps = [float(step) for step in curve]
        curves.append(Line(name=str(run.get("name")), x=steps, y=list(curve.values()), style={"mode": "lines+markers"}))
    return lines("held-out accuracy", curves, x="trainer step", y="accuracy")


def _plain(rows: Sequence[Row]) -> list[Row]:
    """Keep figures and words; what is nested stands in the whole."""
    keys = dict.fromkeys(key for row in rows for key, value in row.items() if isinstance(value, (str, int, float)))
    return [{key.replace("_", " "): row.get(key) for key in keys} for row in rows]


def _rows(value: Any) -> list[Row]:
    return [dict(row) for row in _list(value) if isinstance(row, Mapping)]


def _list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list) else []
