"""What the pages made from measurements share: a template, a JSON file, and the page itself.

A page `docs/<name>.md` is `docs/<name>.template.md` with its comments `<!-- part -->` filled in from
`docs/<name>.json`. `demo_table.py`, `presets_table.py` and `ablation_table.py` say what the parts are.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

__all__ = ["HERE", "load", "markdown_table", "new_axes", "save", "save_picture", "where", "write_page"]

HERE = Path(__file__).parent


def load(name: str) -> dict[str, Any]:
    """Read the measurements of a page."""
    content: dict[str, Any] = json.loads((HERE / f"{name}.json").read_text())
    return content


def save(name: str, content: Mapping[str, Any]) -> None:
    """Write the measurements of a page."""
    (HERE / f"{name}.json").write_text(json.dumps(content, indent=1) + "\n")


def fill(name: str, parts: Mapping[str, str]) -> str:
    """Return a page: its template with every part in its place."""
    text = (HERE / f"{name}.template.md").read_text()
    for part, value in parts.items():
        text = text.replace(f"<!-- {part} -->", value)
    return text


def write_page(name: str, parts: Mapping[str, str]) -> None:
    """Write a page."""
    (HERE / f"{name}.md").write_text(fill(name, parts))


def where(content: Mapping[str, Any]) -> str:
    """Say on what, and with which code, something was measured."""
    processor = f", {content['processor']}" if content.get("processor") else ""
    return f"Commit {content['commit']}, {content['cores']} cores ({content['machine']}{processor}), no GPU."


def markdown_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Render a table; the first column to the left, figures to the right."""
    lines = ["| " + " | ".join(header) + " |", "|---" + "|---:" * (len(header) - 1) + "|"]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)])


def new_axes(*, height: float = 4.0) -> tuple[Any, Any]:
    """Return a figure and its axes, on a light ground so that it can be read in a dark page as well."""
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    # The same figures give the same file.
    plt.rcParams.update({"svg.hashsalt": "areal-lite", "font.size": 10, "svg.fonttype": "none"})
    figure, axes = plt.subplots(figsize=(7.5, height), layout="constrained", facecolor="#fafafa")
    axes.set_facecolor("#fafafa")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#dddddd", linewidth=0.8)
    return figure, axes


def save_picture(figure: Any, name: str) -> None:
    """Write `docs/<name>.svg`."""
    figure.savefig(HERE / f"{name}.svg", metadata={"Date": None})
