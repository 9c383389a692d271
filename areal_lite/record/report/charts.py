"""Charts as plain Plotly figures (`data`, `layout`); the page sets the colours of text and background."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Any

MAX_POINTS = 400
"""Of a curve: as many as a screen shows."""
COLOURS = ("#3f87c9", "#e07b39", "#35a06f", "#b065c6", "#c79a1e", "#d5505f", "#3da7ab", "#8d8072")
"""Distinguishable on white, on black, and by most colour-blind readers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """One picture of the page."""

    title: str
    data: list[dict[str, Any]]
    layout: dict[str, Any]
    note: str = ""
    """Shown below it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One curve; a None in `y` is a gap."""

    name: str
    x: Sequence[float | None]
    y: Sequence[float | None]
    style: dict[str, Any] = field(default_factory=dict)
    """Further fields of the Plotly trace."""
    run: str = ""
    """Its run, where several are compared."""
    note: str = ""
    """What to add below the chart."""

    @property
    def num_points(self) -> int:
        """Points to draw."""
        return sum(x is not None and y is not None for x, y in zip(self.x, self.y, strict=True))


def lines(
    title: str, curves: Sequence[Line], *, x: str, y: str = "", legend: bool = False, note: str = "", **axis: Any
) -> Chart | None:
    """Draw curves, coloured by their order; several have a legend. None if all are empty."""
    data = []
    for index, curve in enumerate(map(thinned, curves)):
        # A curve of one point is invisible without a marker.
        mode = "lines" if curve.num_points > 30 else "lines+markers"
        trace = {"type": "scatter", "mode": mode, "name": curve.name, "x": list(curve.x), "y": list(curve.y)}
        trace |= {"meta": curve.run} if curve.run else {}
        if curve.num_points:
            data.append(trace | {"line": _stroke(index, 2), "marker": _colour(index)} | curve.style)
    note = note or next((curve.note for curve in curves if curve.note), "")
    is_named = legend or sum(trace.get("showlegend") is not False for trace in data) > 1
    layout = {"xaxis": _axis(x), "yaxis": _axis(y, **axis), "showlegend": is_named}
    return Chart(title=title, data=data, layout=layout, note=note) if data else None


def thinned(curve: Line) -> Line:
    """Return a long curve with means of consecutive points, each at its last place; a short one as it is."""
    size = -(-len(curve.x) // MAX_POINTS)
    if size <= 1:
        return curve
    style = {name: value for name, value in curve.style.items() if name != "error_y"}
    places = range(0, len(curve.x), size)
    parts = ([y for y in curve.y[at : at + size] if y is not None] for at in places)
    means = [float(f"{fmean(part):.6g}") if part else None for part in parts]
    return replace(curve, x=[curve.x[at : at + size][-1] for at in places], y=means, style=style)


def smoothed(curves: Sequence[Line], *, window: int = 10) -> list[Line]:
    """Return each curve faint, and on top its moving average over the last points; short curves as they are."""
    found = []
    for index, curve in enumerate(curves):
        if curve.num_points < 3 * window:
            found.append(replace(curve, style={"line": _stroke(index, 2), "marker": _colour(index)}))
            continue
        known = [y for y in curve.y if y is not None]
        averages = (fmean(known[max(0, place - window) : place]) for place in range(1, len(known) + 1))
        means = [None if y is None else next(averages) for y in curve.y]
        faint = {"line": _stroke(index, 1), "opacity": 0.4, "showlegend": False}
        found += [replace(curve, style=faint), replace(curve, y=means, style={"line": _stroke(index, 2.5)})]
    return found


def stacked(title: str, curves: Sequence[Line], *, x: str, y: str, note: str = "", **axis: Any) -> Chart | None:
    """Draw curves on top of each other, filled."""
    filled = [replace(curve, style={"stackgroup": "all", "mode": "lines"}) for curve in curves]
    return lines(title, filled, x=x, y=y, note=note, rangemode="tozero", **axis)


def bars(title: str, groups: Mapping[str, Mapping[Any, float]], *, x: str, y: str, note: str = "") -> Chart | None:
    """Draw a group of bars per name, its values by category."""
    data = [
        {"type": "bar", "name": name, "x": list(values), "y": list(values.values()), "marker": _colour(index)}
        for index, (name, values) in enumerate(groups.items())
        if values
    ]
    axes = {"xaxis": _axis(x, type="category", nticks=10, tickangle=0), "yaxis": _axis(y)}
    layout = axes | {"barmode": "group", "bargap": 0.15, "showlegend": len(data) > 1}
    return Chart(title=title, data=data, layout=layout, note=note) if data else None


def as_shares(counts: Mapping[str, float]) -> dict[str, float]:
    """Return the share of each count in the total; empty if the total is 0."""
    total = sum(counts.values())
    return {name: count / total for name, count in counts.items()} if total else {}


def _axis(title: str, **further: Any) -> dict[str, Any]:
    return {"title": {"text": title}, **further}


def _colour(index: int) -> dict[str, str]:
    return {"color": COLOURS[index % len(COLOURS)]}


def _stroke(index: int, width: float) -> dict[str, Any]:
    """Return a line's style; dashed once all colours are in use."""
    return {"width": width, **_colour(index), **({"dash": "dash"} if index >= len(COLOURS) else {})}
