"""List the figures that were measured with other code than today's, and measure them again.

    python docs/figures.py                    lists all; exits with 1 if some are stale (`make figures`)
    python docs/figures.py measure [NAME...]  measures the stale ones, or those named, one after another

Each JSON file of docs/, and each part of performance.json, holds the hash of the package's source (`source_hash`).
Those that need another machine, or are not worth their time for each release, are `apart` in figures.yaml: they keep
the date and source that the list shows, and are measured when they are named.

Ctrl-C stops; repeated, `measure` skips what is fresh by then, and runs that ended. Code that changes in between makes
everything stale again.
"""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from areal_lite.config.reading import read_yaml
from areal_lite.node import source_hash
from areal_lite.record.run_files import read_summary

HERE = Path(__file__).parent
FIGURES = read_yaml(HERE / "figures.yaml", holding="commands by figures, and which of them are apart")
COMMANDS: dict[str, str] = FIGURES["commands"]
APART: dict[str, str] = FIGURES["apart"]


def measured() -> dict[str, dict[str, Any]]:
    """Return what was measured, in the order of figures.yaml, by the name of its file or part of performance.json."""
    files: dict[str, dict[str, Any]] = {path.stem: json.loads(path.read_text()) for path in sorted(HERE.glob("*.json"))}
    return {**{name: {} for name in COMMANDS}, **files.pop("performance"), **files}


def stale(found: dict[str, dict[str, Any]]) -> dict[str, str]:
    """Return why each of the stale ones is stale."""
    now = source_hash()
    return {
        name: f"source {content['source']}, now {now}"
        if content.get("source")
        else "no hash of the source" * bool(content) or "not measured yet"
        for name, content in found.items()
        if content.get("source") != now
    }


def commit() -> str:
    """Return the commit, marked if the package was edited; edited pages, which each measurement makes, do not count."""
    name, edited = (
        subprocess.run(["git", *words], cwd=HERE.parent, capture_output=True, text=True).stdout.strip()
        for words in (["describe", "--always", "--exclude=*"], ["status", "--short", "areal_lite", "actors", "launch"])
    )
    return f"{name}-dirty" if edited else name


def measure(name: str) -> bool:
    """Run a command of figures.yaml; return whether it did what it is for."""
    command, folder = COMMANDS[name], name.replace(" ", "-").replace(",", "")
    out = HERE.parent / f"runs/figures/{source_hash()}/{folder}"
    print(f"{name}: {command}", flush=True)
    out.mkdir(parents=True, exist_ok=True)
    for config in out.glob("*/config.json"):  # a resumed run would count the pause as its own time
        if read_summary(config.parent).get("status") != "done":
            shutil.rmtree(config.parent)
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    run = ["bash", "-euc", command.format(out=out.relative_to(HERE.parent))]
    environment = {"AREAL_LITE_COMMIT": commit()} | os.environ | {"PATH": path}
    process = subprocess.Popen(run, cwd=HERE.parent, env=environment)
    try:
        process.wait()
    except KeyboardInterrupt:
        process.wait()  # it got the signal too, and ends what it started
        raise
    return name not in stale(measured())


def measure_all(names: Sequence[str]) -> int:
    """Measure one after another; say how long each took and what is left; return the exit code."""
    failed, begun = [], time.monotonic()
    for place, name in enumerate(names):
        try:
            is_done = measure(name)
        except KeyboardInterrupt:
            print(f"stopped in {name}; repeat the command to go on. Left: {', '.join(names[place:])}", flush=True)
            return 130
        failed += [] if is_done else [name]
        minutes, begun = (time.monotonic() - begun) / 60, time.monotonic()
        ending = "measured" if is_done else "NOT measured"
        print(f"{name}: {ending}, {minutes:.1f} minutes. Left: {', '.join(names[place + 1 :]) or 'none'}", flush=True)
    print(f"not measured: {', '.join(failed) or 'none'}")
    return bool(failed)


def main(words: Sequence[str]) -> int:
    """List, or measure; return the exit code."""
    if words and (words[0] != "measure" or not COMMANDS.keys() >= set(words[1:])):
        raise SystemExit(f"expected measure and names of {', '.join(COMMANDS)}, got {' '.join(words)}")
    found = measured()
    old = stale(found)
    if words:
        return measure_all(words[1:] or [name for name in old if name not in APART])
    for name, content in found.items():
        apart = f"apart ({APART[name]}): " if name in APART and name in old else ""
        print(f"{name:<38}{(content.get('commit') or '-')[:14]:<16}{apart}{old.get(name, 'fresh')}")
    return bool(old.keys() - APART.keys())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
