"""List the figures that were measured with other code than today's, and measure them again.

    python docs/figures.py                    lists all; exits with 1 if some are stale (`make figures`)
    python docs/figures.py measure [NAME...]  measures the stale ones, or those named, one after another

Each JSON file of docs/, and each part of performance.json, holds the hash of the package's source (`source_hash`).
`measure` runs the commands of figures.yaml. Repeated after an interruption, it skips what is fresh by then. Code that
changes in between makes everything stale again.
"""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from areal_lite.config.reading import read_yaml
from areal_lite.node import source_hash

HERE = Path(__file__).parent
COMMANDS: dict[str, str | None] = read_yaml(HERE / "figures.yaml", holding="commands by figures")


def measured() -> dict[str, dict[str, Any]]:
    """Return what was measured, by the name of its file or of its part of performance.json."""
    files: dict[str, dict[str, Any]] = {path.stem: json.loads(path.read_text()) for path in sorted(HERE.glob("*.json"))}
    return files.pop("performance") | files


def stale(found: dict[str, dict[str, Any]]) -> dict[str, str]:
    """Return why each of the stale ones is stale."""
    now = source_hash()
    return {
        name: f"source {content['source']}, now {now}" if content.get("source") else "no hash of the source"
        for name, content in found.items()
        if content.get("source") != now
    }


def measure(name: str) -> bool:
    """Run a command of figures.yaml; return whether it did what it is for."""
    command, out = COMMANDS[name], f"runs/figures/{source_hash()}/{name.replace(' ', '-').replace(',', '')}"
    print(f"{name}: {command}", flush=True)
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    if command is not None:
        run = ["bash", "-euc", command.format(out=out)]
        subprocess.run(run, cwd=HERE.parent, env=os.environ | {"PATH": path}, check=False)
    return name not in stale(measured())


def main(words: Sequence[str]) -> int:
    """List, or measure; return the exit code."""
    if words and (words[0] != "measure" or not COMMANDS.keys() >= set(words[1:])):
        raise SystemExit(f"expected measure and names of {', '.join(COMMANDS)}, got {' '.join(words)}")
    if words:
        failed = [name for name in words[1:] or stale(measured()) if not measure(name)]
        print(f"not measured: {', '.join(failed) or 'none'}")
        return bool(failed)
    found = measured()
    old = stale(found)
    for name, content in found.items():
        print(f"{name:<38}{content.get('commit') or '-':<16}{old.get(name, 'fresh')}")
    return bool(old)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
