"""The page: sections of blocks, rendered by `page.html` into one file with everything in it, the chart library too:
`plotly-cartesian.min.js` of npm's plotly.js-cartesian-dist-min, packed by `gzip -9n`, as the page holds it.

The template escapes everything that comes from a run; the page never uses the network.
"""

import base64
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader
from markupsafe import Markup

from areal_lite.record.run_files import write_whole

_HERE = Path(__file__).parent
_SCRIPTS = ("page.js", "timeline.js", "samples.js", "start.js")
_PLOTLY = _HERE / "plotly-cartesian-4.1.1.min.js.gz"

MOST_COLUMNS = 7
"""Of a table; the JSON below it has the others."""


@dataclass(frozen=True, slots=True)
class Block:
    """One piece of a section; left out if it has no content."""

    kind: str
    """answers, tiles, charts, small (charts), table, sortable (table), sentence, list, notes, folded, timeline or
    samples."""
    content: Any
    """Figures by name; charts; rows; texts; or data for the page's scripts."""
    caption: str = ""


@dataclass(frozen=True, slots=True)
class Section:
    """One part of the page; left out if it has no blocks."""

    title: str
    all_blocks: Sequence[Block]
    is_folded: bool = False
    """Whether it is shown by a click."""

    @property
    def blocks(self) -> list[Block]:
        """The blocks that have something to show."""
        return [block for block in self.all_blocks if block.content]


def write_page(
    path: Path,
    *,
    title: str,
    subtitle: str,
    sections: Iterable[Section],
    refresh_s: float = 0.0,
    axes: Mapping[str, Any] | None = None,
) -> Path:
    """Write a page whole or not at all, and return its path.

    Args:
        refresh_s: As in `write_report`.
        axes: What axes of steps can be switched to, by run.
    """
    shown = [section for section in sections if section.blocks]
    blocks = [block for section in shown for block in section.blocks]
    charts = [chart for block in blocks if block.kind in ("charts", "small") for chart in block.content]
    data: dict[str, Any] = {"axes": axes or {}}
    data |= {"charts": [{"data": chart.data, "layout": chart.layout} for chart in charts]}
    data |= {block.kind: block.content for block in blocks if block.kind in ("timeline", "samples")}
    environment = Environment(loader=FileSystemLoader(_HERE), autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.filters["figure"] = figure_text
    environment.policies["json.dumps_kwargs"] = {"separators": (",", ":"), "allow_nan": False}
    style, script = _file("page.css"), Markup("\n").join(map(_file, _SCRIPTS))
    files = {"style": style, "script": script, "plotly": base64.b64encode(_PLOTLY.read_bytes()).decode()}
    values = {"title": title, "subtitle": subtitle, "sections": shown, "data": data, "refresh_s": refresh_s}
    write_whole(path, environment.get_template("page.html").render(values | files))
    return path


def figure_text(value: Any) -> str:
    """Return a figure as text: four digits, a word as it is, a dash for a missing one."""
    if value is None:
        return "\u2013"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def charts_block(charts: Any, *, small: bool = False) -> Block:
    """Return a grid of charts, without those that are None."""
    return Block("small" if small else "charts", [chart for chart in charts if chart is not None])


def pairs_block(values: Mapping[str, Any], *, caption: str) -> Block:
    """Return names and values as a table."""
    return Block("table", [{"name": name, "value": value} for name, value in values.items()], caption)


def _file(name: str) -> Markup:
    return Markup((_HERE / name).read_text(encoding="utf-8"))
