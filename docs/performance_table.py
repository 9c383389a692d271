"""Makes docs/performance.json and docs/performance.md from what the benchmarks measured.

.venv/bin/areal-lite bench queue
.venv/bin/python docs/performance_table.py queue runs/bench-queue/results.json

Without arguments it makes the page anew from docs/performance.json, which has the results of every benchmark by name.
"""

import json
import sys
from pathlib import Path
from typing import Any

import page

from areal_lite.bench.queue import COLUMNS, cells


def parts(content: dict[str, Any]) -> dict[str, str]:
    """Return what goes into the template."""
    queue = content["queue"]
    versions = ", ".join(f"{name} {version}" for name, version in queue["versions"].items())
    settings = queue["settings"]
    return {
        "queue: where": f"{page.where(queue)} {versions}.",
        "queue: repeats": f"{settings['repeats']} repeats of {settings['measured_s']:g} s",
        "queue": page.markdown_table(COLUMNS, map(cells, queue["rows"])),
    }


def main() -> None:
    """Take over the results of the benchmark named on the command line, if any, and make the page."""
    if sys.argv[1:]:
        name, path = sys.argv[1:]
        known = page.load("performance") if (page.HERE / "performance.json").exists() else {}
        page.save("performance", known | {name: json.loads(Path(path).read_text())})
    page.write_page("performance", parts(page.load("performance")))


if __name__ == "__main__":
    main()
