"""`bench queue`: its arithmetic on figures with known answers, and that every carrier brings groups to the trainer."""

from collections.abc import Iterator

import pytest

from areal_lite.launch.bench.harness import in_turns
from areal_lite.launch.bench.queue import CONTENDERS, Case, QueueBench, QueuePeers, cases, summarise
from areal_lite.launch.bench.view import COLUMNS

BENCH = QueueBench(repeats=3, measured_s=1.0, tokens=(1000,), clients=(8,))


def scripted(case: Case, *, rates: dict[str, Iterator[float]]) -> float:
    return next(rates[case.contender])


def test_medians_ratios_and_traffic_of_figures_with_known_answers() -> None:
    """Ours 100, 300, 200 beside Ray's 50, 30, 100: ratios 2, 10, 2, whose median is 2, while 200 / 50 would be 4.

    200 groups/s of 8 samples of 1000 tokens of 12 bytes are 19.2 MB/s. Seen failing with the ratio of the medians.
    """
    rates = {"areal-lite": iter([100.0, 300.0, 200.0]), "ray": iter([50.0, 30.0, 100.0]), "zeromq": iter([400.0] * 3)}
    measured = in_turns(cases(BENCH), repeats=3, measure=lambda case: scripted(case, rates=rates))
    rows = {row["contender"]: row for row in summarise(measured)}
    assert rows["areal-lite"]["over"] == {"ray": [2.0, 10.0, 2.0], "zeromq": [0.25, 0.75, 0.5]}
    assert rows["ray"]["over"]["areal-lite"] == [0.5, 0.1, 0.5]
    expected = ["areal-lite", "8 x 1000", "8", "200\n100-300", "19.2", "2.00", "0.50"]
    assert [show(rows["areal-lite"]) for show in COLUMNS["queue"].values()] == expected


@pytest.mark.loop
def test_every_carrier_brings_groups_to_the_trainer() -> None:
    """Real processes, a tenth of a second each."""
    from areal_lite.launch.run.train import ray_session

    bench = QueueBench(repeats=1, measured_s=0.1, warm_s=0.0, tokens=(5,), clients=(3,))
    with ray_session():
        rows = summarise(in_turns(cases(bench), repeats=1, measure=QueuePeers(bench).measure))
    assert {row["contender"] for row in rows if row["median"] > 0} == set(CONTENDERS)
