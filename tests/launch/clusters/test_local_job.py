"""Kind local as a user has it: a job in the background of a terminal, and its record."""

from pathlib import Path

import pytest

from areal_lite.launch.commands import main as cli


@pytest.mark.slow
def test_a_job_that_fails_returns_its_code_and_is_found_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The supervisor and the command are real processes. Seen failing with `_follow` returning 0 for any end,
    and with the last line printed twice."""
    monkeypatch.chdir(tmp_path)
    assert cli.main(["launch", "--name", "mine", "eval", "no_such_model", "--recipe", "arith_cpu"]) == 1
    out = capsys.readouterr().out
    assert "no_such_model, which has no config.json" in out
    assert out.count("failed at step 0, attempt 1 of launch.max_attempts=1") == 1
    assert cli.main(["launch", "--status", "mine"]) == 0
    assert "mine: failed at step 0, attempt 1 of launch.max_attempts=1: ConfigError" in capsys.readouterr().out
    assert cli.main(["launch", "--logs", "mine"]) == 0
    assert "no_such_model" in capsys.readouterr().out
    assert cli.main(["launch", "--stop", "mine"]) == 0
    assert cli.main(["launch", "--name", "mine", "eval", "no_such_model", "--recipe", "arith_cpu"]) == 1
    assert "a job needs a name of its own, got mine" in capsys.readouterr().err
