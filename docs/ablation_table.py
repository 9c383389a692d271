"""Makes docs/staleness-ablation.json, .md and .svg from what `areal-lite bench staleness` measured.

.venv/bin/areal-lite bench staleness
.venv/bin/python docs/ablation_table.py runs/bench-staleness/results.json

Without an argument it makes the page anew from docs/staleness-ablation.json.
"""

import json
import statistics
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import page

NAME = "staleness-ablation"
KINDS = {"behaviour": "naive", "recompute": "decoupled"}
"""`objective.proximal` -> what the page calls it."""
COLORS = {"naive": "#c25a00", "decoupled": "#1f5fa8"}

Cells = dict[tuple[int, str], list[dict[str, Any]]]


def by_cell(content: dict[str, Any]) -> Cells:
    """Group the finished runs by eta and kind; a cell holds one run per seed."""
    cells: Cells = defaultdict(list)
    for run in content["runs"]:
        if run.get("end") is not None:
            cells[run["max_staleness"], KINDS[run["overrides"]["objective.proximal"]]].append(run)
    return cells


def parts(content: dict[str, Any]) -> dict[str, str]:
    """Return what goes into the template."""
    cells = by_cell(content)
    accuracy, age, seconds = ([f"{kind}: {what}" for kind in COLORS] for what in ("accuracy", "mean age", "seconds"))
    header = ("eta", *accuracy, "decoupled - naive", *age, "oldest", *seconds)
    rows = [row(eta, cells) for eta in sorted({eta for eta, _ in cells})]
    seeds = sorted({run["seed"] for runs in cells.values() for run in runs})
    starts = [run["start"] for runs in cells.values() for run in runs]
    return {
        "where": page.where(content),
        "seeds": ", ".join(map(str, seeds)),
        "start": f"{statistics.mean(starts):.3f}" if starts else "-",
        "steps": ", ".join(sorted({str(run["steps"]) for runs in cells.values() for run in runs})),
        "table": page.markdown_table(header, rows),
    }


def row(eta: int, cells: Cells) -> list[str]:
    """Render one eta: mean and, in brackets, the lowest and highest of the seeds."""
    runs = {kind: cells[eta, kind] for kind in COLORS}
    ends = {kind: [run["end"] for run in runs[kind]] for kind in COLORS}
    both = all(ends.values())
    return [
        str(eta),
        *(spread(ends[kind]) for kind in COLORS),
        f"{statistics.mean(ends['decoupled']) - statistics.mean(ends['naive']):+.3f}" if both else "-",
        *(mean([run["age_mean"] for run in runs[kind]], ".2f") for kind in COLORS),
        str(max(run["age_max"] for kind in COLORS for run in runs[kind])),
        *(mean([run["seconds"] for run in runs[kind]], ".0f") for kind in COLORS),
    ]


def spread(values: list[float]) -> str:
    """Render mean, lowest and highest."""
    return f"{statistics.mean(values):.3f} ({min(values):.3f} to {max(values):.3f})" if values else "-"


def mean(values: list[float], spec: str) -> str:
    """Render a mean."""
    return format(statistics.mean(values), spec) if values else "-"


def draw(content: dict[str, Any]) -> None:
    """Draw final accuracy over eta: a dot per run, a line through the means."""
    cells = by_cell(content)
    etas = sorted({eta for eta, _ in cells})
    figure, axes = page.new_axes()
    for shift, (kind, color) in zip((-0.07, 0.07), COLORS.items(), strict=True):
        places = [place for place, eta in enumerate(etas) if cells[eta, kind]]
        means = [statistics.mean(run["end"] for run in cells[etas[place], kind]) for place in places]
        axes.plot([place + shift for place in places], means, color=color, linewidth=2, label=kind)
        for place in places:
            ends = [run["end"] for run in cells[etas[place], kind]]
            axes.scatter([place + shift] * len(ends), ends, color=color, s=18, alpha=0.75, zorder=3)
    axes.set_xticks(range(len(etas)), [str(eta) for eta in etas])
    axes.set_xlabel("eta, the largest age a trained token may have")
    axes.set_ylabel("held-out accuracy at the last step")
    axes.legend(frameon=False)
    page.save_picture(figure, NAME)


def main() -> None:
    """Take over the results named on the command line, if any, and make the page."""
    if sys.argv[1:]:
        page.save(NAME, json.loads(Path(sys.argv[1]).read_text()))
    content = page.load(NAME)
    page.write_page(NAME, parts(content))
    draw(content)


if __name__ == "__main__":
    main()
