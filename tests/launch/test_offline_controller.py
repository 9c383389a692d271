"""The offline controller's order of things, with ranks that are only told about."""

import io
from pathlib import Path
from typing import Any

import pytest
from offline_builders import offline_config
from rich.console import Console

from areal_lite.errors import StallError
from areal_lite.launch.run.offline import OfflineController
from areal_lite.launch.run.view import View
from areal_lite.record.run_folder import RunFolder

FIGURES = {"loss": 0.5, "accuracy": 0.9, "tokens": 12.0, "lr": 1e-3, "grad_norm": 1.0, "step_skipped": 0.0}


class FakeRanks:
    """Answers `ask`, and notes what was asked with which deadline."""

    def __init__(self) -> None:
        self.asked: list[tuple[Any, ...]] = []

    def ask(self, method: str, *args: Any, timeout_s: float) -> list[Any]:
        self.asked.append((method, *args, timeout_s))
        return [7]


@pytest.fixture
def controller(tmp_path: Path) -> OfflineController:
    run = {"dir": str(tmp_path / "run"), "eval_every": 1, "start_timeout_s": 321.0}
    config = offline_config(tmp_path, run=run)
    view = View(config, console=Console(file=io.StringIO()))
    folder = RunFolder.create(config, recipe_name="x")
    made = OfflineController(config, folder=folder, model_folder=tmp_path / "model", view=view)
    made._ranks = FakeRanks()
    return made


def test_a_trained_step_has_its_row_even_where_its_evaluation_fails(
    controller: OfflineController, tmp_path: Path
) -> None:
    """The rescue saves that step, and a resumed run goes on behind it. Seen failing with the row written afterwards."""

    def ask(method: str, *_: Any, waiting_for: str) -> list[Any]:
        if method == "evaluate":
            raise StallError("late: trainer/1")
        return [FIGURES]

    controller._ask = ask
    with pytest.raises(StallError, match="late: trainer/1"):
        controller._step()
    controller._tick()  # as the rescue does first
    rows = RunFolder(tmp_path / "run").read("metrics.jsonl")
    assert [(row["step"], row["loss"]) for row in rows] == [(1, 0.5)]


def test_a_checkpoint_is_read_under_the_deadline_of_a_start(controller: OfflineController, tmp_path: Path) -> None:
    """A long read shows no progress. Seen failing with it under the watchdog of `prepare`."""
    asked = []
    controller._ask = lambda method, *_, waiting_for: asked.append(method) or [{}]
    controller._prepare(tmp_path / "step-000007")
    assert controller._ranks.asked == [("load", str(tmp_path / "step-000007" / "trainer"), 321.0)]
    assert controller._version == 7
    assert asked == ["prepare", "evaluate"]
