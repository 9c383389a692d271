"""The sections of the page that compares runs: overlaid curves, and tables of what differs."""

from collections.abc import Iterator, Sequence
from typing import Any

from areal_lite.record.report.curves import age_charts, constants, diagnostics, learning, speed_charts
from areal_lite.record.report.html import Section, rows_table, sentence
from areal_lite.record.report.read import RunFiles, number
from areal_lite.record.report.settings import between_runs, different_settings
from areal_lite.record.report.times import length_charts

__all__ = ["comparison_sections"]

_UNIMPORTANT = ("run.dir", "run.resume")


def comparison_sections(runs: Sequence[RunFiles]) -> Iterator[Section]:
    """Yield what there is to compare."""
    settings = {key: row for key, row in different_settings(runs).items() if key not in _UNIMPORTANT}
    summaries = between_runs(runs, of="summary")
    tables = _table(runs, settings, caption="settings that differ") or "<p>All settings are the same.</p>"
    yield Section(title="Settings", before=tables)
    yield Section(title="Learning", charts=list(learning(runs)))
    yield Section(title="Age of the tokens", charts=list(age_charts(runs)))
    yield Section(title="Speed and lengths", charts=[*speed_charts(runs), *length_charts(runs)])
    same = sentence("The same in every step", constants(runs))
    yield Section(title="Loss diagnostics", charts=list(diagnostics(runs)), after=same, small=True)
    yield Section(title="Summary", before=_table(runs, summaries, caption="figures that differ", ratio=True))


def _table(runs: Sequence[RunFiles], rows: dict[str, list[Any]], *, caption: str, ratio: bool = False) -> str:
    """A row per name; the ratio is of the last run to the first."""
    lines = []
    for name, values in rows.items():
        line = {"name": name} | {run.name: value for run, value in zip(runs, values, strict=True)}
        if ratio:
            first, last = number(values[0]), number(values[-1])
            line[f"{runs[-1].name} / {runs[0].name}"] = last / first if first and last is not None else None
        lines.append(line)
    return rows_table(lines, caption=caption)
