"""Makes docs/presets.json, docs/presets.md and docs/presets.svg from what `areal-lite bench presets` measured.

.venv/bin/areal-lite bench presets
.venv/bin/python docs/presets_table.py runs/bench-presets/results.json

Without an argument it makes the page anew from docs/presets.json.
"""

import json
import sys
from pathlib import Path
from typing import Any

import page

HEADER = ("preset", "lr", "steps", "start", "end", "rise", "seconds", "age: mean", "age: max",
          "generators idle", "trainer idle", "parity")  # fmt: skip


def parts(content: dict[str, Any]) -> dict[str, str]:
    """Return what goes into the template."""
    return {"where": page.where(content), "table": page.markdown_table(HEADER, map(row, content["runs"]))}


def row(run: dict[str, Any]) -> list[str]:
    """Render one preset."""
    if "steps" not in run:
        return [run["name"], f"{run['lr']:g}", *(["-"] * (len(HEADER) - 3)), run["status"]]
    start, end = run["start"], run["end"]
    return [
        run["name"],
        f"{run['lr']:g}",
        str(run["steps"]),
        f"{start:.3f}",
        "-" if end is None else f"{end:.3f}",
        run["status"] if end is None else f"{end - start:+.3f}",
        f"{run['seconds']:.0f}",
        f"{run['age_mean']:.2f}",
        f"{run['age_max']} of {run['max_staleness']}",
        f"{run['rollout_idle']:.0%}",
        f"{run['trainer_idle']:.0%}",
        "-" if run["parity"] is None else f"{run['parity']:.1e}",
    ]


def draw(content: dict[str, Any]) -> None:
    """Draw held-out accuracy over steps, a line per preset, named at its end."""
    figure, axes = page.new_axes(height=4.6)
    runs = [run for run in content["runs"] if run.get("curve")]
    ends = []
    for run in runs:
        steps = [int(step) for step in run["curve"]]
        (line,) = axes.plot(steps, list(run["curve"].values()), linewidth=1.6, marker="o", markersize=3)
        ends.append((run["curve"][str(steps[-1])], steps[-1], run["name"], line.get_color()))
    last = max((step for _, step, _, _ in ends), default=1)
    for (value, step, name, color), place in zip(sorted(ends), apart(sorted(ends), axes.get_ylim()), strict=True):
        axes.annotate(name, (step, value), (last * 1.03, place), color=color, va="center")
    axes.set_xlim(0, last * 1.2)
    axes.set_xlabel("trainer step")
    axes.set_ylabel("held-out accuracy, greedy")
    page.save_picture(figure, "presets")


def apart(ends: list[tuple[float, int, str, str]], limits: tuple[float, float]) -> list[float]:
    """Return where the names of lines go: at their ends, moved apart where these are close together."""
    gap = (limits[1] - limits[0]) * 0.045
    places = []
    for value, *_ in ends:
        places.append(max(value, places[-1] + gap) if places else value)
    shift = sum(place - end[0] for place, end in zip(places, ends, strict=True)) / max(len(ends), 1)
    return [place - shift for place in places]


def main() -> None:
    """Take over the results named on the command line, if any, and make the page."""
    if sys.argv[1:]:
        page.save("presets", json.loads(Path(sys.argv[1]).read_text()))
    content = page.load("presets")
    page.write_page("presets", parts(content))
    draw(content)


if __name__ == "__main__":
    main()
