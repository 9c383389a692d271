"""Pieces of the page as HTML text; everything that comes from a run is escaped."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Any

from areal_lite.record.report.charts import Chart

NOTHING = "\u2013"
"""In place of a figure that does not exist."""

__all__ = [
    "NOTHING",
    "Section",
    "figure_text",
    "folded",
    "pairs_table",
    "render_section",
    "rows_table",
    "script_json",
    "sentence",
    "tiles",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """One part of the page."""

    title: str
    charts: Sequence[Chart | None] = ()
    """None is left out."""
    before: str = ""
    """HTML above the charts."""
    after: str = ""
    """HTML below them."""
    small: bool = False
    """Many small charts instead of a few large ones."""
    data: Mapping[str, Any] = field(default_factory=dict)
    """For the page's own scripts."""

    @property
    def drawn(self) -> list[Chart]:
        """The charts that have something to show."""
        return [chart for chart in self.charts if chart is not None]

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to show."""
        return not (self.drawn or self.before or self.after)

    @property
    def anchor(self) -> str:
        """Its name in links."""
        return self.title.lower().replace(" ", "-").replace(",", "")


def render_section(section: Section, first_chart: int) -> str:
    """Return a section; its charts are numbered from `first_chart`, as the page's script expects."""
    charts = "".join(
        f'<figure><h3>{escape(chart.title)}</h3><div class="chart" id="chart-{first_chart + index}"></div>'
        + (f"<figcaption>{escape(chart.note)}</figcaption>" if chart.note else "")
        + "</figure>"
        for index, chart in enumerate(section.drawn)
    )
    size = " small" if section.small else ""
    grid = f'<div class="grid{size}">{charts}</div>' if charts else ""
    body = f"<h2>{escape(section.title)}</h2>{section.before}{grid}{section.after}"
    return f'<section id="{section.anchor}">{body}</section>'


def tiles(figures: Mapping[str, str]) -> str:
    """Return large figures with their names."""
    items = "".join(f"<div><b>{escape(value)}</b><span>{escape(name)}</span></div>" for name, value in figures.items())
    return f'<div class="tiles">{items}</div>'


def rows_table(rows: Sequence[Mapping[str, Any]], *, caption: str = "") -> str:
    """Return rows as a table with the keys of the first as heads; nothing for no rows."""
    if not rows:
        return ""
    heads = list(rows[0])
    title = f"<caption>{escape(caption)}</caption>" if caption else ""
    head = "".join(f"<th>{escape(name)}</th>" for name in heads)
    body = "".join("<tr>" + "".join(_cell(row.get(name)) for name in heads) + "</tr>" for row in rows)
    return f'<div class="wide"><table>{title}<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def pairs_table(values: Mapping[str, Any], *, caption: str = "") -> str:
    """Return names and values as a table."""
    return rows_table([{"name": name, "value": value} for name, value in values.items()], caption=caption)


def sentence(lead: str, values: Mapping[str, Any]) -> str:
    """Return names and values as a line of text; nothing for none."""
    words = ", ".join(f"{name} {figure_text(value)}" for name, value in values.items())
    return f"<p>{escape(lead)}: {escape(words)}.</p>" if words else ""


def folded(title: str, content: str) -> str:
    """Return HTML that opens on a click."""
    return f"<details><summary>{escape(title)}</summary>{content}</details>"


def figure_text(value: Any) -> str:
    """Write a figure for people: four digits, or the word as it is."""
    if value is None:
        return NOTHING
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def script_json(content: Any) -> str:
    """Return JSON that can stand inside a script element, whatever its texts hold."""
    text = json.dumps(_finite(content), ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


def _finite(content: Any) -> Any:
    """JSON has no NaN and no infinity: null in their place."""
    if isinstance(content, float):
        return content if content - content == 0 else None
    if isinstance(content, Mapping):
        return {str(key): _finite(value) for key, value in content.items()}
    if isinstance(content, Iterable) and not isinstance(content, str):
        return [_finite(value) for value in content]
    return content


def _cell(value: Any) -> str:
    kind = ' class="figure"' if isinstance(value, (int, float)) and not isinstance(value, bool) else ""
    return f"<td{kind}>{escape(figure_text(value))}</td>"
