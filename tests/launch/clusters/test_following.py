"""What the commands do around a job: a cluster that does not answer for a while, and a submit that is refused."""

import pytest
from launch_builders import make_job

from areal_lite.errors import ConfigError
from areal_lite.launch.clusters.job import Job, Status
from areal_lite.launch.clusters.supervised import Local
from areal_lite.launch.commands import launch


def follow(silent: int, monkeypatch: pytest.MonkeyPatch) -> int:
    """Follow a job whose cluster does not answer so many times."""
    answers = iter([*[None] * silent, Status("done", code=7)])

    def status(self: Local, job: Job) -> Status:
        if (answer := next(answers)) is None:
            raise ConfigError("kubectl must answer")
        return answer

    monkeypatch.setattr(Local, "status", status)
    monkeypatch.setattr(launch, "_POLL_S", 0.01)
    return launch._follow(make_job("local"))


def test_a_cluster_that_does_not_answer_for_a_while(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Seen failing with the exit code 1 of the first such answer, while the job went on."""
    assert follow(3, monkeypatch) == 7
    assert capsys.readouterr().out.count("kubectl must answer; the job is still running") == 1
    monkeypatch.setattr(launch, "_SILENCE_S", 0.05)
    with pytest.raises(ConfigError, match="kubectl must answer"):
        follow(1000, monkeypatch)
