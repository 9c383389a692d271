"""One self-contained page about a run, a comparison of runs, or the results of a bench."""

from collections.abc import Sequence
from pathlib import Path

from areal_lite.errors import DataError
from areal_lite.record.report.bench_contents import bench_sections
from areal_lite.record.report.page import write_page
from areal_lite.record.report.read import RunFiles
from areal_lite.record.report.run_contents import comparison_sections, run_sections
from areal_lite.record.run_files import read_json, table

__all__ = ["write_bench", "write_comparison", "write_report"]


def write_report(run_folder: Path, *, out: Path | None = None, refresh_s: float = 0.0) -> Path:
    """Write the page of a finished or active run to `out` or to `report.html` in its folder; return its path.

    With `refresh_s` a browser reloads the page every so many seconds.
    """
    run = RunFiles(run_folder)
    path, sections = out or run_folder / "report.html", run_sections(run)
    return write_page(
        path, title=run.name, subtitle=_subtitle(run), sections=sections, refresh_s=refresh_s, axes={run.name: run.axes}
    )


def write_comparison(run_folders: Sequence[Path], *, out: Path) -> Path:
    """Write a page that compares two runs or more."""
    names = [path.resolve().name for path in run_folders]
    distinct = names if len(set(names)) == len(names) else [str(path) for path in run_folders]
    runs = [RunFiles(path, name=name) for path, name in zip(run_folders, distinct, strict=True)]
    sections, axes = comparison_sections(runs), {run.name: run.axes for run in runs}
    return write_page(out, title=" · ".join(distinct), subtitle="runs compared", sections=sections, axes=axes)


def write_bench(folder: Path, *, out: Path | None = None) -> Path:
    """Write the page of a benchmark's `results.json`; a `DataError` if that cannot be read."""
    notes: list[str] = []
    results = read_json(folder / "results.json", notes)
    if notes:
        raise DataError(f"expected the results of a benchmark in {folder}, but {notes[0]}. Fix: run it again")
    path, title = out or folder / "report.html", folder.resolve().name
    return write_page(path, title=title, subtitle="benchmark", sections=bench_sections(results))


def _subtitle(run: RunFiles) -> str:
    data, objective, queue = (table(run.config.get(section)) for section in ("data", "objective", "queue"))
    words = [run.command.replace("_", "-"), table(run.config.get("model")).get("path")]
    if run.command == "train":
        sources = " + ".join(table(data.get("mix")) or [str(data.get("source", ""))])
        words += [sources, objective.get("preset"), f"eta {queue.get('max_staleness', '?')}"]
    return " · ".join(str(word) for word in words if word)
