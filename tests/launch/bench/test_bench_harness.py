"""What every benchmark shares: the order of measurements, and columns of tables."""

from pathlib import Path
from typing import Any

import measuring
import pytest

from areal_lite.config.recipe import Config, load_config
from areal_lite.errors import ArealLiteError
from areal_lite.launch.bench.harness import PlannedRun, run_all
from areal_lite.record.columns import cells, spread


def test_cases_take_turns_and_every_other_repeat_goes_backwards(capsys: pytest.CaptureFixture[str]) -> None:
    """Seen failing with all repeats of a case in a row: what the machine does meanwhile would hit one side."""
    order: list[str] = []
    measured = measuring.in_turns("abc", repeats=3, measure=lambda case: order.append(case) or f"{case}{len(order)}")
    assert order == [*"abc", *"cba", *"abc"]
    assert capsys.readouterr().out.splitlines()[3:5] == ["repeat 2 of 3: c", "repeat 2 of 3: b"]
    assert measured == {"a": ["a1", "a6", "a7"], "b": ["b2", "b5", "b8"], "c": ["c3", "c4", "c9"]}


def test_a_column_shows_a_value_a_median_or_nothing() -> None:
    """A list where a repeat has no value shows nothing. Seen failing with the median of the others."""

    def show(row: dict[str, Any]) -> str:
        _, (text,) = cells({"x": "{a.b:10*.1f~}"}, [row])
        return text

    assert show({"a": {"b": 0.25}}) == "2.5"
    assert show({"a": {"b": [1.0, 3.0, 2.0]}}) == show({"a": {"b": spread([1.0, 3.0, 2.0])}}) == "20.0\n10.0-30.0"
    assert show({"a": {"b": [1.0, 1.0]}}) == "10.0"
    assert {show(row) for row in ({"a": {"b": [1.0, None]}}, {"a": {"b": []}}, {"a": {}}, {"a": None}, {})} == {"-"}


def test_a_finished_run_of_a_measurement_leaves_no_checkpoint(tmp_path: Path) -> None:
    """One that failed, or whose recipe asks for checkpoints, keeps them. Seen failing with all kept, and with none."""

    def train(config: Config, *, dir: str) -> None:
        (Path(dir) / "checkpoints/step-2").mkdir(parents=True)
        if Path(dir).name == "fails":
            raise ArealLiteError("no space left")

    every = {"done": 0, "fails": 0, "asks": 1}
    runs = [
        PlannedRun(name=name, config=load_config("arith_cpu", [f"run.checkpoint_every={steps}"]))
        for name, steps in every.items()
    ]
    failures = run_all(runs, out=tmp_path, train=train, after_each=lambda: None)
    assert failures == {"fails": "ArealLiteError: no space left"}
    assert {path.parent.name for path in tmp_path.glob("*/checkpoints")} == {"fails", "asks"}
