"""Half an hour of one run: kills, Ray's memory monitor's too, then twenty minutes in which nothing may grow.

Not part of `make test`: `make test ARGS="-m soak -s"`. The machine should have nothing else to do.
"""

import statistics
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from signal import SIGCONT
from typing import Any

import psutil
import pytest

from areal_lite.config.recipe import load_config
from areal_lite.launch.drill import SETTINGS
from areal_lite.launch.drilled_run import FAULTS, KILLS, DrilledRun
from areal_lite.record.run_folder import RunFolder

KILLED_S, SETTLED_S, QUIET_S, COMPARED_S = 420, 180, 1200, 120
HEADROOM = 0.35
"""Share of the machine's memory that the run may take before Ray's monitor kills one of its processes."""
MOST_GROWTH = 0.02
FILL = """
import psutil, sys, time
held = []
while True:
    if psutil.virtual_memory().percent < 100 * float(sys.argv[1]):
        held.append(bytearray(2**26))
        held[-1][::4096] = bytes([1]) * len(held[-1][::4096])
    time.sleep(0.01)
"""


def fill_memory(threshold: float, run: DrilledRun) -> tuple[str, str]:
    """Hold memory in a process of our own until Ray's monitor kills a process of the run."""
    start = run.log.stat().st_size
    run.send(SIGCONT, [])  # to nobody: the fault begins now
    with subprocess.Popen([sys.executable, "-c", FILL, str(threshold + 0.01)]) as filler:
        try:
            run.wait(lambda: run.printed("memory monitor", start), "a message about Ray's memory monitor")
        finally:
            filler.kill()
    return "memory monitor", ""


def growth(rows: list[Mapping[str, Any]]) -> dict[str, float]:
    """Return by how much the memory of each process grew between the first and the last two minutes, as a share."""
    first, last = rows[0]["time_s"] + COMPARED_S, rows[-1]["time_s"] - COMPARED_S
    parts = [[row["memory_mb"] for row in rows if row["time_s"] <= first]]
    parts.append([row["memory_mb"] for row in rows if row["time_s"] >= last])
    names = set.intersection(*(set(memory) for part in parts for memory in part))
    means = [{name: statistics.fmean(memory[name] for memory in part) for name in names} for part in parts]
    return {name: means[1][name] / means[0][name] - 1 for name in sorted(names)}


@pytest.mark.soak
def test_a_run_survives_kills_and_then_does_not_grow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The ledger balances, every death is named, and no process grows by more than 2 % in the last twenty minutes."""
    threshold = min(0.95, psutil.virtual_memory().percent / 100 + HEADROOM)
    monkeypatch.setenv("RAY_memory_usage_threshold", str(threshold))
    monkeypatch.setitem(FAULTS, "memory-monitor", lambda run: fill_memory(threshold, run))
    words = ["train", "arith_cpu", *SETTINGS, "run.steps=1000000"]
    queue = load_config("arith_cpu", []).queue
    with DrilledRun(tmp_path / "soak", words, seed=0) as run:
        ends_at, number = time.monotonic() + KILLED_S, 0
        while time.monotonic() < ends_at:
            run.inject_fault("memory-monitor" if number % 5 == 1 else run.random.choice(KILLS))
            number += 1
        num_rows = []
        for seconds in (SETTLED_S, QUIET_S):
            until = time.monotonic() + seconds
            run.wait(lambda until=until: time.monotonic() > until, "the end of the soak", poll_s=1.0)
            num_rows.append(run.num_rows())
        run.finish(run.end_soon(queue.max_staleness), groups_per_step=queue.groups_per_step)
    rows = RunFolder(tmp_path / "soak").read("metrics.jsonl")
    grown = growth([row for row in rows if num_rows[0] < row["step"] <= num_rows[1]])
    for outcome in run.outcomes:
        print(outcome)
    print(f"{len(rows)} steps; growth in the last {QUIET_S // 60} minutes: {grown}")
    assert run.problems == []
    assert max(grown.values()) <= MOST_GROWTH, grown
