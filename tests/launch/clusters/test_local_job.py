"""Kind local as a user has it: a job in the background of a terminal, and its record."""

import time
from pathlib import Path

import pytest
from launch_builders import make_job

from areal_lite.launch.clusters.profile import Profile
from areal_lite.launch.clusters.supervised import Local
from areal_lite.launch.commands import main as cli


@pytest.mark.slow
def test_a_job_that_fails_returns_its_code_and_is_found_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The supervisor and the command are real processes. Seen failing with `_follow` returning 0 for any end,
    with the last line printed twice, with a job that "saves and ends" although it had ended, and with the user's
    `token.py` in place of the library's."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "token.py").write_text("raise RuntimeError")
    assert cli.main(["launch", "--name", "mine", "eval", "no_such_model", "--recipe", "arith_cpu"]) == 1
    out = capsys.readouterr().out
    assert "no_such_model, which has no config.json" in out
    assert out.count("failed at step 0, attempt 1 of launch.max_attempts=1") == 1
    assert cli.main(["launch", "--status", "mine"]) == 0
    assert "mine: failed at step 0, attempt 1 of launch.max_attempts=1: ConfigError" in capsys.readouterr().out
    assert cli.main(["launch", "--logs", "mine"]) == 0
    assert "no_such_model" in capsys.readouterr().out
    assert cli.main(["launch", "--stop", "mine"]) == 0
    assert "mine had ended: failed at step 0" in capsys.readouterr().out
    assert cli.main(["launch", "--status", "mine", "--stop", "mine"]) == 2
    assert cli.main(["launch", "--name", "mine", "eval", "no_such_model", "--recipe", "arith_cpu"]) == 1
    assert "a job needs a name of its own, got mine" in capsys.readouterr().err


@pytest.mark.slow
def test_a_stop_that_comes_at_once_is_a_stop(tmp_path: Path) -> None:
    """Seen failing with a supervisor that was killed while it was still importing, and the exit code 1."""
    job = make_job("local", "train arith_cpu", folder=str(tmp_path), profile=Profile()).save()
    job = job.model_copy(update={"id": Local().submit(job)})
    Local().stop(job)
    while (status := Local().status(job)).code is None:
        time.sleep(0.1)
    assert (status.words, status.code) == ("stopped at step 0: stopped before the command started", 130)
