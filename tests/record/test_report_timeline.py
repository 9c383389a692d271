"""What the event log is drawn as, from scripted events with known answers: the timeline of the report (lines, versions,
pauses and caps), and the Perfetto trace.
"""

import gzip
import itertools
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from report_builders import event, make_events

from areal_lite.events import Event
from areal_lite.record.lanes import between_publications
from areal_lite.record.report.timeline import KINDS, sample_segments, timeline, versions_alive
from areal_lite.record.report.times import lane_shares
from areal_lite.record.trace import trace_rows, write_trace


def drawn(lane: dict[str, Any]) -> list[tuple[int, float, float, str | int]]:
    """Row, start, end in seconds, and version or kind, of each segment."""
    names = [kind if kind >= 0 else KINDS[-1 - kind] for kind in lane["kind"]]
    times = [[ticks * 1e-4 for ticks in lane[key]] for key in ("start", "end")]
    return list(zip(lane["row"], *times, names, strict=True))


def test_a_version_lives_from_a_resume_to_the_next_pause() -> None:
    """Seen failing with the end taken from the stamp, which comes after the pause."""
    log = [
        event(1.0, "rollout/0", "pause"),
        event(1.5, "rollout/0", "stamped", version=0),
        event(2.0, "rollout/0", "resumed"),
        event(5.0, "rollout/0", "drain"),
        event(6.0, "rollout/0", "stamped", version=1),
        event(6.5, "rollout/0", "resumed"),
    ]
    assert versions_alive(log) == {0: (2.0, 5.0), 1: (6.5, float("inf"))}


ALIVE = {0: (0.0, 4.0), 1: (5.0, 8.0), 2: (9.0, float("inf"))}


def pieces(spans: list[list[int]], *, start: float, end: float) -> list[tuple[int, float, float]]:
    found = sample_segments(spans, start=start, end=end, alive=ALIVE, row=0, label="g")
    return [(segment.kind, segment.start, segment.end) for segment in found]


def test_a_sample_is_split_where_the_weights_changed() -> None:
    """Seen failing with time split by tokens: version 0 would have ended at 3."""
    assert pieces([[0, 0, 5], [1, 5, 10]], start=1.0, end=6.0) == [(0, 1.0, 4.0), (1, 5.0, 6.0)]


def test_a_sample_waits_for_the_version_that_answers_it() -> None:
    """Asked for at 3.5 under version 0, all of it generated under version 1. Seen failing without the first piece."""
    assert pieces([[1, 0, 5]], start=3.5, end=7.0) == [(-1 - KINDS.index("wait"), 3.5, 5.0), (1, 5.0, 7.0)]


def test_lanes_hold_samples_pauses_verifications_and_the_trainers_phases() -> None:
    """Seen failing with a publication that ends at the next wait: the last one was lost.

    Saves and evaluations have a lane, and a mark only in a log without their start; seen failing with the marks alone.
    """
    late = event(3.4, "trainer", "wait")
    found = timeline([*make_events(steps=2, workers=1), late])
    assert [lane["name"] for lane in found["lanes"]] == ["rollout/0", "verifier/0", "trainer", "controller"]
    rollout, verifier, trainer, controller = (drawn(lane) for lane in found["lanes"])
    times = [(row, pytest.approx(start), pytest.approx(end), kind) for row, start, end, kind in controller]
    assert times == [(0, 2.25, 2.5, "checkpoint"), (1, 2.5, 3.0, "eval")]
    pauses = [(row, start, end) for row, start, end, kind in rollout if kind == "pause"]
    assert pauses == [(-1, pytest.approx(0.9), pytest.approx(1.0)), (-1, pytest.approx(1.9), pytest.approx(2.0))]
    first_line = [(start, end, kind) for row, start, end, kind in rollout if row == 0]
    assert first_line[:2] == [(0.5, pytest.approx(0.9), 0), (1.0, pytest.approx(1.7), 1)]
    assert [end for _, _, end, _ in verifier] == pytest.approx([1.71, 2.71])
    assert sorted(trainer)[-1] == (0, pytest.approx(2.0), pytest.approx(3.4), "other")
    assert [kind for *_, kind in sorted(trainer)] == [*["wait", "train", "publish"] * 2, "other"]
    assert [mark["text"] for mark in found["marks"]] == ["eval 0"]


def test_workers_are_in_the_order_of_their_numbers() -> None:
    """Seen failing with names sorted as texts: rollout/10 stood before rollout/2."""
    log = [event(float(at), f"rollout/{n}", kind) for n in (10, 2) for at, kind in enumerate(("pause", "resumed"))]
    assert [lane["name"] for lane in timeline(log)["lanes"]] == ["rollout/2", "rollout/10"]
    log += [event(float(at), "trainer", "published") for at in (0, 1)]
    assert list(lane_shares(between_publications(log))) == ["rollout/2", "rollout/10", "trainer"]


def test_an_empty_log_has_no_timeline_and_one_cut_off_has_what_is_whole() -> None:
    assert timeline([]) == {}
    (lane,) = timeline([event(1.0, "trainer", "train"), event(2.0, "trainer", "trained")])["lanes"]
    assert drawn(lane) == [(0, 0.0, 1.0, "train")]


# --- the Perfetto trace: what is drawn, where, and how long ---


def trace_of(log: Iterable[Event]) -> list[dict[str, Any]]:
    return list(trace_rows(lambda: log))


def rows_of(trace: list[dict[str, Any]], phase: str) -> list[dict[str, Any]]:
    return [row for row in trace if row["ph"] == phase]


def test_lanes_do_not_close_each_others_slices() -> None:
    """Seen failing with open slices kept by end event alone."""
    log = [
        event(0.0, "rollout/0", "pause"),
        event(1.0, "rollout/1", "pause"),
        event(2.0, "rollout/1", "resumed"),
        event(5.0, "rollout/0", "resumed"),
    ]
    trace = trace_of(log)
    names = {row["pid"]: row["args"]["name"] for row in rows_of(trace, "M")}
    found = {names[row["pid"]]: row["dur"] for row in rows_of(trace, "X")}
    assert found == {"rollout/0": 5e6, "rollout/1": 1e6}


def test_samples_that_overlap_each_have_a_line_with_their_versions() -> None:
    """Seen failing with one identity for all samples of a group: the second `b` would nest in the first."""
    samples = [
        {"end": 4.0, "tokens": 9, "spans": [[0, 0, 5], [1, 5, 9]]},
        {"end": 6.0, "tokens": 3, "spans": [[1, 0, 3]]},
    ]
    trace = trace_of([event(0.0, "rollout/0", "running", n=2), event(6.5, "rollout/0", "group", group="p/0/1#0",
                      start=2.0, samples=samples)])  # fmt: skip
    begins, ends = rows_of(trace, "b"), rows_of(trace, "e")
    assert [(row["ts"], row["args"]) for row in begins] == [
        (2e6, {"group": "p/0/1#0", "tokens": 9, "versions": [0, 1]}),
        (2e6, {"group": "p/0/1#0", "tokens": 3, "versions": [1]}),
    ]
    assert [row["ts"] for row in ends] == [4e6, 6e6]
    assert [row["id2"]["local"] for row in begins] == [row["id2"]["local"] for row in ends]
    assert len({row["id2"]["local"] for row in begins}) == 2
    (counter,) = rows_of(trace, "C")
    assert counter["args"] == {"samples": 2}


def test_every_event_of_a_killed_run_still_gives_valid_json(tmp_path: Path) -> None:
    """Slices left open are left out; unknown kinds draw nothing."""
    log = [event(0.0, "trainer", "wait"), event(1.0, "controller", "eval", step=3, accuracy=0.5)]
    for events, phases in ((log, ["M", "M"]), ([], [])):
        write_trace(tmp_path / "trace.json.gz", lambda events=events: events)
        trace = json.loads(gzip.decompress((tmp_path / "trace.json.gz").read_bytes()))
        assert trace["displayTimeUnit"] == "ms"
        assert [row["ph"] for row in trace["traceEvents"]] == phases


def test_tokens_that_an_environment_gave_have_no_version() -> None:
    """Seen failing with the versions of all spans: -1 stood between them, and each version once per turn."""
    spans = [[0, 0, 3], [-1, 3, 5], [0, 5, 8], [-1, 8, 9], [1, 9, 12]]
    sample = {"end": 4.0, "tokens": 12, "spans": spans}
    (begin,) = rows_of(trace_of([event(5.0, "rollout/0", "group", group="g", start=2.0, samples=[sample])]), "b")
    assert begin["args"] == {"group": "g", "tokens": 12, "versions": [0, 1], "given": 3}


def test_slices_that_follow_one_another_do_not_overlap() -> None:
    """Perfetto rounds begin and length by themselves, and drops a slice that then begins before the last one's end.

    In whole microseconds nothing is rounded. Seen failing without.
    """
    kinds = ["wait", "train", "trained", "published"] * 9
    log = [event(1.8e9 + 0.0123457 * place**1.5, "trainer", kind) for place, kind in enumerate(kinds)]
    found = rows_of(trace_of(log), "X")
    assert len(found) == 3 * 9
    assert {type(row[key]) for row in found for key in ("ts", "dur")} == {int}
    assert all(one["ts"] + one["dur"] <= other["ts"] for one, other in itertools.pairwise(found))
