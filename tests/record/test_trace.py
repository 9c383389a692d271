"""The event log as a Perfetto trace: what is drawn, where, and how long."""

import gzip
import itertools
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from report_builders import event

from areal_lite.events import Event
from areal_lite.record.trace import trace_rows, write_trace


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
