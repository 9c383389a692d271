"""`areal-lite drill` as a user types it, on real runs."""

import json
from pathlib import Path

import pytest
from loop_builders import loop_config, write_recipe

from areal_lite.launch.commands import main as cli

pytestmark = [pytest.mark.loop, pytest.mark.usefixtures("copied")]


def test_a_drill_of_a_lost_head_of_ray(loop_folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The run saves before Ray ends it, and a resume goes on: no step is trained again.

    Seen failing where a step that is trained before the run ends counts as its return.
    """
    config = loop_config(loop_folder, run={}, weights={"parity_every": 0})
    recipe, out = write_recipe(loop_folder / "drilled.yaml", config), loop_folder / "drill"
    words = ["drill", str(recipe), "run.steps=100", "--faults", "gcs", "--out", str(out)]
    assert cli.main(words) == 0, capfd.readouterr().out
    (row,) = json.loads((out / "results.json").read_text())["rows"]
    assert (row["fault"], row["steps_lost"], row["problems"]) == ("gcs", 0, [])
    assert row["healed_by"] == "areal-lite resume"
    assert 0 < row["noticed_s"][0] < row["back_s"][0]
    assert "saved step-" in (out / "gcs.log").read_text()
