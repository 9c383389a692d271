"""`areal-lite drill` as a user types it, on real runs."""

import json
from pathlib import Path

import pytest
import yaml
from loop_builders import loop_config

from areal_lite.cli import main as cli

pytestmark = pytest.mark.loop


def test_a_drill_of_two_faults(loop_folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A verifier comes back within its run; after SIGTERM a resume goes on, and no step is trained again."""
    config = loop_config(loop_folder, run={}, weights={"parity_every": 0})
    recipe, out = loop_folder / "drilled.yaml", loop_folder / "drill"
    recipe.write_text(yaml.safe_dump(config.model_dump()))
    words = ["drill", str(recipe), "run.steps=12", "--faults", "verifier,sigterm", "--out", str(out)]
    assert cli.main(words) == 0, capfd.readouterr().out
    verifier, sigterm = json.loads((out / "results.json").read_text())["rows"]
    assert (verifier["fault"], verifier["healed_by"], verifier["steps_lost"]) == ("verifier", "the run itself", 0)
    assert (sigterm["fault"], sigterm["healed_by"], sigterm["steps_lost"]) == ("sigterm", "areal-lite resume", 0)
    for row in (verifier, sigterm):
        assert 0 < row["noticed_s"][0] < row["back_s"][0]
        assert row["problems"] == []
