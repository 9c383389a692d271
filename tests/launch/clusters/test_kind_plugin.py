"""A kind of cluster that is not shipped: named by its file, with its own section of the profile and batch template."""

from pathlib import Path

import pytest
from launch_builders import make_job
from places import FIXTURES

from areal_lite.config.plugins import known_names
from areal_lite.errors import ConfigError
from areal_lite.launch.clusters.job import find_kind
from areal_lite.launch.commands import main as cli

PBS = f"{FIXTURES / 'launch/pbs/pbs_kind.py'}:Pbs"


def launch(folder: Path, profile: str, *words: str) -> int:
    (folder / "pbs.yaml").write_text(profile)
    return cli.main(["launch", "--on", PBS, "--profile", "pbs.yaml", *words])


def test_its_script_is_the_shared_one_with_its_own_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Seen failing with templates looked for in the package alone, and with sections of installed kinds alone."""
    monkeypatch.chdir(tmp_path)
    assert launch(tmp_path, "Pbs: {queue: h200}", "--dry-run", "--name", "tried", "train", "arith_cpu") == 0
    text = capsys.readouterr().out
    assert "#!/bin/bash\n#PBS -N tried\n#PBS -q h200\n" in text
    assert f"-m areal_lite.launch.clusters.attempts {tmp_path}/runs/jobs/tried.json &" in text
    assert "back into the queue" not in text
    assert launch(tmp_path, "Pbs: {que: h200}", "--dry-run", "train", "arith_cpu") == 1
    assert "unknown key Pbs.que; did you mean Pbs.queue?" in capsys.readouterr().err
    assert cli.main(["launch", "--new-profile", PBS]) == 0
    assert "Pbs:\n  queue: main" in capsys.readouterr().out


@pytest.mark.slow
def test_it_runs_a_job_to_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The command fails in its recipe's verifier, so that nothing is trained; its exit code and cause come through.

    Seen failing with a table of the shipped kinds in the supervisor.
    """
    monkeypatch.chdir(tmp_path)
    words = ["train", "arith_cpu", "verifier.function=none.py:f", "launch.max_attempts=1"]
    assert launch(tmp_path, "nodes: 1", "--name", "real", *words) == 1
    assert "failed at step 0, attempt 1 of launch.max_attempts=1" in capsys.readouterr().out


def test_the_shipped_kinds_come_through_the_same_door() -> None:
    """Seen failing without the entry points."""
    assert {"kubernetes", "local", "ray", "slurm", "ssh"} <= set(known_names("cluster"))
    with pytest.raises(ConfigError, match=r"cannot be imported|must have a function"):
        find_kind(f"{PBS}s")
    assert not find_kind(PBS).ships(make_job(PBS))
