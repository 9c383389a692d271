"""Writes `report.html`: one file that opens from disk, with the chart library in it.

Called at the end of a run and by the command `report`. Never asks the network for anything.
"""

import os
from collections.abc import Sequence
from html import escape
from pathlib import Path
from string import Template
from typing import Any

from areal_lite.errors import DataError
from areal_lite.record.report.bench_page import bench_sections
from areal_lite.record.report.compare_page import comparison_sections
from areal_lite.record.report.html import Section, render_section, script_json
from areal_lite.record.report.read import RunFiles, read_json, read_run
from areal_lite.record.report.run_page import run_sections

__all__ = ["render_page", "write_bench", "write_comparison", "write_report"]

_HERE = Path(__file__).parent
_SCRIPTS = ("page.js", "timeline.js", "samples.js")


def write_report(run_folder: Path, *, out: Path | None = None) -> Path:
    """Write the page of a run that has ended or is still going.

    Args:
        run_folder: Of `areal-lite train`, `sft`, `reward-model` or `dpo`.
        out: The file; `report.html` in the folder where None.

    Returns:
        Its path.

    Raises:
        DataError: It is no run folder.
    """
    run = read_run(run_folder)
    return write_page(
        out or run_folder / "report.html", title=run.name, subtitle=_subtitle(run), sections=list(run_sections(run))
    )


def write_comparison(run_folders: Sequence[Path], *, out: Path) -> Path:
    """Write a page that compares runs.

    Args:
        run_folders: At least two; the first is what the others are compared with.
        out: The file.

    Raises:
        DataError: One is no run folder.
    """
    names = [path.resolve().name for path in run_folders]
    distinct = names if len(set(names)) == len(names) else [str(path) for path in run_folders]
    runs = [read_run(path, name=name) for path, name in zip(run_folders, distinct, strict=True)]
    return write_page(
        out, title=" · ".join(distinct), subtitle="runs compared", sections=list(comparison_sections(runs))
    )


def write_bench(folder: Path, *, out: Path | None = None) -> Path:
    """Write the page of a benchmark's `results.json`.

    Raises:
        DataError: It cannot be read.
    """
    notes: list[str] = []
    results = read_json(folder / "results.json", notes)
    if notes:
        raise DataError(f"expected the results of areal-lite bench in {folder}, but {notes[0]}: run it again")
    name = folder.resolve().name
    return write_page(
        out or folder / "report.html", title=name, subtitle="benchmark", sections=list(bench_sections(results))
    )


def write_page(path: Path, *, title: str, subtitle: str, sections: Sequence[Section]) -> Path:
    """Write a page whole or not at all, and return its path."""
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(render_page(title, subtitle=subtitle, sections=sections), encoding="utf-8")
    os.replace(temporary, path)
    return path


def render_page(title: str, *, subtitle: str, sections: Sequence[Section]) -> str:
    """Return the page; sections without content are left out."""
    from plotly.offline import get_plotlyjs

    shown = [section for section in sections if not section.is_empty]
    bodies: list[str] = []
    charts: list[dict[str, Any]] = []
    for section in shown:
        bodies.append(render_section(section, len(charts)))
        charts += [{"data": chart.data, "layout": chart.layout} for chart in section.drawn]
    data: dict[str, Any] = {"charts": charts} | {
        name: value for section in shown for name, value in section.data.items()
    }
    return Template((_HERE / "page.html").read_text(encoding="utf-8")).substitute(
        title=escape(title),
        subtitle=escape(subtitle),
        style=(_HERE / "page.css").read_text(encoding="utf-8"),
        links="".join(f'<a href="#{section.anchor}">{escape(section.title)}</a>' for section in shown),
        body="".join(bodies),
        data=script_json(data),
        plotly=get_plotlyjs(),
        script="\n".join((_HERE / name).read_text(encoding="utf-8") for name in _SCRIPTS),
    )


def _subtitle(run: RunFiles) -> str:
    settings = run.config
    words = [run.command.replace("_", "-"), str(settings.get("model", {}).get("path", ""))]
    if run.command == "train":
        data = settings.get("data", {})
        words.append(" + ".join(data.get("mix") or [str(data.get("source", ""))]))
        words.append(str(settings.get("objective", {}).get("preset", "")))
        words.append(f"eta {settings.get('queue', {}).get('max_staleness', '?')}")
    return " · ".join(word for word in words if word)
