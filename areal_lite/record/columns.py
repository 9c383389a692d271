"""Tables of the rows of `results.json`: `columns.yaml` has a title and a template for each column.

The terminal, the report and docs/tables.py share them. A cell is Markdown, and may have a second line.
"""

import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from areal_lite.config.reading import read_yaml

Row = Mapping[str, Any]
Columns = dict[str, str]
"""Title -> template, filled from a row."""

COLUMNS: dict[str, Columns] = read_yaml(Path(__file__).with_name("columns.yaml"), holding="columns by benchmark")
NOTHING = "-"


def spread(values: Iterable[float]) -> dict[str, float]:
    """Return median, lowest and highest of at least one value."""
    known = list(values)
    return {"median": statistics.median(known), "low": min(known), "high": max(known)}


class _Shown:
    """A value in a template. `{path:SCALE*.1f}` multiplies; a list shows its median, with `~` its spread below.

    >>> print("{a.b:.1f~} {a.c}".format_map(_Shown({"a": {"b": [1.0, 3.0, 2.0]}})))
    2.0
    1.0-3.0 -
    """

    def __init__(self, value: Any) -> None:
        self._value = value

    def __getitem__(self, key: str) -> "_Shown":
        return _Shown(self._value.get(key) if isinstance(self._value, Mapping) else None)

    __getattr__ = __getitem__

    def __format__(self, spec: str) -> str:
        value, (scale, _, spec) = self._value, spec.rpartition("*")
        if isinstance(value, Sequence) and not isinstance(value, str):
            value = spread(value) if value and None not in value else None
        if value is None:
            return NOTHING

        def text(value: Any) -> str:
            return format(float(scale) * value if scale else value, spec.removesuffix("~"))

        if not isinstance(value, Mapping):
            return text(value)
        median, low, high = (text(value[name]) for name in ("median", "low", "high"))
        return median + (f"\n{low}-{high}" if spec.endswith("~") and low != high else "")


def rows_of(benchmark: str, rows: Iterable[Row]) -> list[Row]:
    """Return the rows of a benchmark with the fields that only its table needs."""
    derive = _DERIVED.get(benchmark)
    return [{**row, **derive(row)} if derive else row for row in rows]


def _with_outcome(row: Row) -> Row:
    fault = f"{row['times']} x {row['fault']}" if row["times"] > 1 else row["fault"]
    return {"fault": fault, "outcome": "FAILED" if row["problems"] else "passed"}


def _with_rise(run: Row) -> Row:
    if run.get("end") is None:
        return {"rise": run["status"].partition(":")[0]}
    return {"rise": f"{run['end'] - run['start']:+.3f}"}


def _with_ages(line: Row) -> Row:
    """Add the trained tokens of age 0, 1, 2 ... in percent."""
    total, oldest = max(1, sum(line["ages"].values())), max(map(int, line["ages"]), default=-1)
    ages = (f"{100 * line['ages'].get(str(age), 0) / total:.0f}" for age in range(oldest + 1))
    return {"ages_percent": " ".join(ages)}


def _with_target(row: Row) -> Row:
    if row.get("at_least") is None:
        wanted, is_met = f"at most {row['at_most']:g}", row["median"] <= row["at_most"]
    else:
        wanted, is_met = f"at least {row['at_least']:g}", row["median"] >= row["at_least"]
    return {"target": wanted, "met": "yes" if is_met else "**no**"}


_DERIVED: dict[str, Callable[[Row], Row]] = {
    "drill": _with_outcome,
    "soak": _with_outcome,
    "gpu-check": lambda row: {"outcome": row["outcome"].partition(":")[0]},
    "plan": _with_rise,
    "shares of modes": _with_ages,
    "targets": _with_target,
}


def cells(columns: str | Columns, rows: Iterable[Row]) -> Iterator[list[str]]:
    """Yield the titles, then the cells of each row, in the columns of a benchmark or in others."""
    if isinstance(columns, str):
        rows = rows_of(columns, rows)
        columns = COLUMNS[columns]
    yield list(columns)
    for row in rows:
        yield [template.format_map(_Shown(row)) for template in columns.values()]


def markdown(columns: str | Columns, rows: Iterable[Row]) -> str:
    """Render `cells` as a Markdown table."""
    return as_markdown(cells(columns, rows))


def as_markdown(lines: Iterable[Sequence[str]]) -> str:
    """Render lines of cells, titles first, as a Markdown table; two lines of a cell stand side by side."""
    titles, *others = lines
    ruler = "|---" + "|---:" * (len(titles) - 1) + "|"
    head, *rows = ["| " + " | ".join(line).replace("\n", " · ") + " |" for line in (titles, *others)]
    return "\n".join([head, ruler, *rows])
