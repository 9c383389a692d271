"""Kind local as a user has it: a job in the background of a terminal, its record, and a run that dies once."""

import json
from pathlib import Path

import pytest
from launch_builders import crashing_recipe

from areal_lite.launch.commands import main as cli


@pytest.mark.slow
def test_a_job_that_fails_returns_its_code_and_is_found_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The supervisor and the command are real processes. Seen failing with `_follow` returning 0 for any end."""
    monkeypatch.chdir(tmp_path)
    assert cli.main(["launch", "--name", "mine", "eval", "no_such_model", "--recipe", "arith_cpu"]) == 1
    assert "no_such_model, which has no config.json" in capsys.readouterr().out
    assert cli.main(["launch", "--status", "mine"]) == 0
    assert "mine: failed at step 0, attempt 1 of launch.max_attempts=1: ConfigError" in capsys.readouterr().out
    assert cli.main(["launch", "--logs", "mine"]) == 0
    assert "no_such_model" in capsys.readouterr().out
    assert cli.main(["launch", "--stop", "mine"]) == 0
    assert cli.main(["launch", "--name", "mine", "eval", "no_such_model", "--recipe", "arith_cpu"]) == 1
    assert "a job needs a name of its own, got mine" in capsys.readouterr().err


@pytest.mark.loop
def test_a_run_that_dies_goes_on_from_its_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = crashing_recipe(tmp_path)
    monkeypatch.chdir(tmp_path)
    assert cli.main(["launch", "--name", "mine", "train", str(recipe)]) == 0
    record = json.loads(Path("runs/jobs/mine/attempts.json").read_text())
    assert [(one["code"], one["step"]) for one in record["attempts"]] == [(1, 2), (0, 4)]
    assert "trainer/0 died" in record["attempts"][0]["cause"]
    rows = [json.loads(line) for line in Path("runs/mine/metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert json.loads(Path("runs/mine/summary.json").read_text())["attempts"] == 2
    for number in (1, 2):
        logs = {path.name for path in Path(f"runs/mine/logs/attempt-{number}").iterdir()}
        assert any(name.endswith("-trainer-0.log") for name in logs)
        assert any(name.endswith("-driver.log") for name in logs)
