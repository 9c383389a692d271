"""Shares of time from scripted event logs, worked out by hand (more in test_recorder.py); a buffer's clock."""

import os
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_lite import events as events_module
from areal_lite.events import Event, EventBuffer, clock_variables
from areal_lite.record.lanes import LaneClocks, slices

LANE = "rollout/0"


def events(*rows: tuple[float, str] | tuple[float, str, int]) -> list[Event]:
    """`(time, kind)`, or `(time, "running", n)`."""
    return [{"time": row[0], "lane": LANE, "kind": row[1], **({"n": row[2]} if len(row) == 3 else {})} for row in rows]


#  0 ..  2 nothing runs: idle
#  2 ..  6 four samples run, 6 .. 10 two: generating, slot seconds 4*4 + 2*4
# 10 .. 11 pausing, 11 .. 13 transferring, 13 .. 13.5 reloading, 13.5 .. 14 stamping; the two samples stay: 2*4
# 14 .. 16 generating, slot seconds 2*2
# 16 .. 20 nothing runs: idle
PAUSED = events(
    (0.0, "resumed"),
    (2.0, "running", 4),
    (6.0, "running", 2),
    (10.0, "pause"),
    (11.0, "paused"),
    (11.5, "update_open"),
    (13.0, "update_received"),
    (13.5, "update_loaded"),
    (13.8, "stamped"),
    (14.0, "resumed"),
    (15.0, "group"),
    (16.0, "running", 0),
)
TOTALS = {
    "idle": 6.0,
    "generating": 10.0,
    "pausing": 1.0,
    "transferring": 2.0,
    "reloading": 0.5,
    "stamping": 0.5,
    "slot_seconds": 16.0 + 8.0 + 8.0 + 4.0,
}


def test_draining_is_counted_apart_from_the_pause() -> None:
    """Samples run to their end from 2 to 7. Seen failing with `drain` as `pausing`."""
    clocks = LaneClocks()
    clocks.feed(events(
        (0.0, "running", 3), (2.0, "drain"), (5.0, "running", 1), (7.0, "running", 0), (7.0, "paused"), (8.0, "resumed")
    ))  # fmt: skip
    assert clocks.read(9.0)[LANE] == pytest.approx(
        {"generating": 2.0, "draining": 5.0, "transferring": 1.0, "idle": 1.0, "slot_seconds": 3 * 5.0 + 2.0}
    )


@given(st.lists(st.floats(0.0, 20.0), max_size=6))
def test_readings_in_between_change_nothing(moments: list[float]) -> None:
    """Events reach the controller late, after readings of later times.

    Seen failing with a reading that moves the clock: what had happened before it was counted from it.
    """
    clock = LaneClocks()
    for event in PAUSED:
        clock.feed([event])
        for moment in moments:
            clock.read(moment)
    assert clock.read(20.0)[LANE] == pytest.approx(TOTALS)


def test_a_pause_in_which_a_worker_was_lost_is_no_pause() -> None:
    """Seen failing with one until the worker was back."""
    log = events((10.0, "pause"), (11.0, "lost"), (50.0, "resumed"), (60.0, "pause"), (61.0, "resumed"))
    assert [(found.start, found.end) for found in slices(log)] == [(60.0, 61.0)]


# --- the event buffer ---


LATER = """
import time
time.time = lambda: {set_to}
from areal_lite.events import EventBuffer
buffer = EventBuffer("rollout/0")
buffer.emit("resumed")
print(buffer.drain()[0]["time"])
"""


@pytest.mark.parametrize("jump_s", [-3600.0, 3600.0])
def test_a_clock_that_is_set_moves_no_event(monkeypatch: pytest.MonkeyPatch, jump_s: float) -> None:
    """Nor one of a worker that is restarted after it. Seen failing with the time of day, in either process."""
    buffer, clock = EventBuffer("rollout/0"), SimpleNamespace(time=lambda: 0.0, monotonic=time.monotonic)
    buffer.emit("pause")
    (before,) = buffer.drain()
    monkeypatch.setattr(events_module, "time", clock)
    buffer.emit("paused")
    code = LATER.format(set_to=time.time() + jump_s)
    done = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | clock_variables(), capture_output=True, text=True, timeout=60
    )
    assert before["time"] <= buffer.drain()[0]["time"] <= float(done.stdout) < before["time"] + 1800, done.stderr
