"""The timeline of the report: lines, versions, pauses and caps, from scripted events with known answers."""

from typing import Any

import pytest
from report_builders import event, make_events

from areal_lite.record.lanes import between_publications
from areal_lite.record.report.timeline import KINDS, sample_segments, timeline, versions_alive
from areal_lite.record.report.times import lane_shares


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


def pieces(spans: list[list[int]], *, start: float, end: float, alive: Any = ALIVE) -> list[tuple[int, float, float]]:
    found = sample_segments(spans, start=start, end=end, alive=alive, row=0, label="g")
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
