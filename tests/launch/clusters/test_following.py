"""What the commands do around a job: a cluster that does not answer for a while."""

from pathlib import Path

import pytest
from launch_builders import make_job

from areal_lite.errors import ConfigError
from areal_lite.launch.clusters.job import Job, Status
from areal_lite.launch.clusters.profile import Profile
from areal_lite.launch.clusters.supervised import Local
from areal_lite.launch.commands import launch


def test_a_cluster_that_does_not_answer_for_a_while(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Seen failing with the exit code 1 of the first such answer, while the job went on, and without the second half of
    a character that two looks at the log had cut in two.
    """
    silent = 3

    def status(self: Local, job: Job) -> Status:
        nonlocal silent
        silent -= 1
        if silent >= 0:
            raise ConfigError("kubectl must answer")
        job.log.write_bytes("café".encode()[: 4 if silent == -1 else 5])
        if silent == -1:
            return Status("running")
        return Status("done", code=7)

    monkeypatch.setattr(Local, "submit", lambda self, job: "1@2@here")
    monkeypatch.setattr(Local, "status", status)
    monkeypatch.setattr(launch, "_POLL_S", 0.01)
    job = make_job("local", "train arith_cpu", folder=str(tmp_path), profile=Profile())
    assert launch.run_job(job) == 7
    out = capsys.readouterr().out
    assert out.count("kubectl must answer; the job is still running") == 1
    assert "café" in out
    monkeypatch.setattr(launch, "_SILENCE_S", 0.05)
    silent = 1000
    with pytest.raises(ConfigError, match="kubectl must answer"):
        launch.run_job(job.model_copy(update={"name": "run-2"}))
