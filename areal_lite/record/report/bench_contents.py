"""The sections of a page about the `results.json` of any benchmark."""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from areal_lite.record.columns import cells
from areal_lite.record.report.charts import COLOURS, Chart, Line, as_shares, bars, lines
from areal_lite.record.report.page import Block, Section, charts_block, figure_text
from areal_lite.record.run_files import Row, number, numbers, table

_PLACE = ("benchmark", "plan", "recipe", "commit", "processor", "cores", "best_synchronous")


def bench_sections(results: Row) -> Iterator[Section]:
    """Yield the tables that the terminal shows, figures by mode with their spread, and runs with a curve."""
    place = {key: figure_text(results[key]) for key in _PLACE if results.get(key) is not None}
    place |= {"recipe": Path(place["recipe"]).stem} if "recipe" in place else {}
    tiles = {key.replace("_", " "): value for key, value in place.items()}
    yield Section("Overview", [Block("tiles", tiles), Block("list", results.get("findings"))])
    modes, runs = _rows(results.get("modes")), _rows(results.get("runs"))
    tables = [_table(name, modes) for name in ("modes", "shares of modes")]
    yield Section("Modes", [*tables, charts_block(_mode_charts(modes))])
    curve = lines("held out", list(map(_curve, runs)), x="trainer step", y="mean score")
    yield Section("Runs", [charts_block([curve]), _table("plan", runs if "plan" in results else [])])
    columns = results.get("columns") or str(results.get("benchmark"))
    rows = _rows(results.get("rows"))
    yield Section("Figures", [charts_block([_split_chart(rows)]), _table(columns, rows)])
    yield Section("Targets", [_table("targets", _rows(results.get("targets")))])
    yield Section("All results", [Block("folded", json.dumps(results, indent=1, ensure_ascii=False), "results.json")])


def _table(columns: Any, rows: Sequence[Row]) -> Block:
    """Show rows as the terminal does; rows of another version, in another form, appear in the JSON alone."""
    try:
        titles, *shown = cells(columns, rows)
    except (LookupError, TypeError, ValueError, AttributeError):
        return Block("table", [])
    texts = ((text.replace("\n", " · ").replace("**", "") for text in line) for line in shown)
    return Block("table", [dict(zip(titles, line, strict=True)) for line in texts])


def _split_chart(rows: Sequence[Row]) -> Chart | None:
    """Draw the speed of a simulated grid over the trainer's share of the GPUs, a line per eta."""
    found: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        x, y = (number(row.get(name)) for name in ("ranks", "trained_tokens_per_s"))
        if "eta" in row and x is not None and y is not None:
            found.setdefault(f"eta {row['eta']}", []).append((x, y))
    curves = [Line(name=name, x=[x for x, _ in points], y=[y for _, y in points]) for name, points in found.items()]
    axis = "trainer ranks; engines have the other GPUs"
    return lines("trained tokens/s", curves, x=axis, legend=True, rangemode="tozero") if len(rows) > 1 else None


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
    note = "median, with the lowest and the highest of the repeats"
    return Chart(title=title, data=[trace], layout={"showlegend": False}, note=note) if known else None


def _curve(run: Row) -> Line:
    curve, style = numbers(run.get("curve")), {"mode": "lines+markers"}
    return Line(name=str(run.get("name")), x=list(map(float, curve)), y=list(curve.values()), style=style)


def _rows(value: Any) -> list[Row]:
    return [dict(row) for row in value if isinstance(row, Mapping)] if isinstance(value, list) else []
