"""Kinds of cluster that are not shipped: the example of docs/clusters.md, and classes that are wrong."""

import os
from pathlib import Path

import pytest
from launch_builders import make_job
from pages import blocks

from areal_lite.config.plugins import known_names
from areal_lite.errors import ConfigError
from areal_lite.launch.clusters.job import find_kind
from areal_lite.launch.commands import main as cli

PBS = "pbs_kind.py:Pbs"
WRONG = """
import os
import signal
from pathlib import Path

from areal_lite.launch.clusters.job import Kind, Status

def function(job): ...

class NotKind: ...

class NoSubmit(Kind):
    def status(self, job): ...
    def stop(self, job): ...

class Good(NoSubmit):
    def submit(self, job):
        return "7"
    def status(self, job):
        return Status("done", code=0)

class Slow(Good):
    def submit(self, job):
        os.kill(os.getpid(), signal.SIGINT)
        return "7"
    def stop(self, job):
        Path("stopped").write_text(job.id)

class Misspelt(Good):
    def artifacts(self, job):
        return {}

class BadFiles(Good):
    def artefacts(self, job):
        return ["a"]

class NoId(Good):
    def submit(self, job): ...

class NoStatus(Good):
    def status(self, job): ...
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The page's files, wrong.py, and a qsub that runs the script elsewhere, with its output in the log."""
    monkeypatch.chdir(tmp_path)
    (example,), (template,) = blocks("clusters.md", "python"), blocks("clusters.md", "jinja")
    Path("pbs_kind.py").write_text(example.text)
    Path("job.pbs").write_text(template.text)
    Path("wrong.py").write_text(WRONG)
    qsub = tmp_path / "bin" / "qsub"
    qsub.parent.mkdir()
    qsub.write_text("""#!/bin/bash
log=$(sed -n 's/^#PBS -j oe -o //p' "$1")
cd / && bash "$1" >"$log" 2>&1 &
echo 7.server
""")
    qsub.chmod(0o755)
    monkeypatch.setenv("PATH", str(qsub.parent), prepend=os.pathsep)
    return tmp_path


def launch(profile: str, *words: str, kind: str = PBS) -> int:
    Path("profile.yaml").write_text(profile)
    return cli.main(["launch", "--on", kind, "--profile", "profile.yaml", *words])


def test_its_script_is_the_shared_one_with_its_own_lines(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Seen failing with templates looked for in the package alone, and with sections of installed kinds alone."""
    assert launch("Pbs: {queue: h200}", "--dry-run", "--name", "tried", "train", "arith_cpu") == 0
    text = capsys.readouterr().out
    assert "#!/bin/bash\n#PBS -N tried\n#PBS -q h200\n" in text
    assert f"-P -m areal_lite.launch.clusters.attempts {folder}/runs/jobs/tried.json &" in text
    assert "back into the queue" not in text
    assert launch("Pbs: {que: h200}", "--dry-run", "train", "arith_cpu") == 1
    assert "unknown key Pbs.que; did you mean Pbs.queue?" in capsys.readouterr().err
    assert cli.main(["launch", "--new-profile", PBS]) == 0
    assert "Pbs:\n  queue: main" in capsys.readouterr().out


@pytest.mark.slow
def test_it_runs_a_job_to_its_end(capsys: pytest.CaptureFixture[str]) -> None:
    """The command fails in its recipe's verifier, so that nothing is trained; its exit code and cause come through.

    Seen failing with a table of the shipped kinds in the supervisor.
    """
    words = ["train", "arith_cpu", "verifier.function=none.py:f", "launch.max_attempts=1"]
    assert launch("nodes: 1", "--name", "real", *words) == 1
    assert "failed at step 0, attempt 1 of launch.max_attempts=1" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("NotKind", "extends areal_lite.launch.clusters.job.Kind, got one that does not. Fix: see the example"),
        ("function", "job.Kind, got a function. Fix:"),
        ("NoSubmit", "got one without submit. Fix:"),
        ("Misspelt", "got artifacts, which nothing calls; did you mean artefacts?"),
        ("BadFiles", "artefacts: expected collections.abc.Mapping[str, str], got ['a']. Fix:"),
    ],
)
def test_a_class_that_is_no_kind(kind: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Seen failing: tracebacks, and dry runs without a complaint."""
    assert launch("nodes: 1", "--dry-run", "train", "arith_cpu", kind=f"wrong.py:{kind}") == 1
    assert message in capsys.readouterr().err


def test_a_submit_that_returns_nothing_leaves_the_name_free(capsys: pytest.CaptureFixture[str]) -> None:
    """Seen failing: the job's record held `id: null`, could not be read, and kept its name."""
    words = ("--name", "first", "train", "arith_cpu")
    assert launch("nodes: 1", *words, kind="wrong.py:NoId") == 1
    assert "submit: expected str, got None" in capsys.readouterr().err
    assert launch("nodes: 1", *words, kind="wrong.py:Good") == 0


def test_ctrl_c_while_a_job_is_submitted_stops_it(folder: Path) -> None:
    """Seen failing: the job ran, and had no id to stop it by."""
    assert launch("nodes: 1", "--detach", "--name", "first", "train", "arith_cpu", kind="wrong.py:Slow") == 0
    assert (folder / "stopped").read_text() == "7"


@pytest.mark.parametrize("kind", ["local", "wrong.py:Good"])
def test_a_kind_without_nodes_is_one_machine(folder: Path, kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Seen failing for kinds of one's own."""
    assert launch(f"nodes: 2\nshared: {folder}", "--dry-run", "train", "arith_cpu", kind=kind) == 1
    assert f"--on {kind} is one machine, got nodes=2" in capsys.readouterr().err


def test_the_shipped_kinds_come_through_the_same_door() -> None:
    """Seen failing without the entry points."""
    assert {"kubernetes", "local", "ray", "slurm", "ssh"} <= set(known_names("cluster"))
    with pytest.raises(ConfigError, match=r"cannot be imported|must have a function"):
        find_kind(f"{PBS}s")
    assert not find_kind(PBS).ships(make_job(PBS))
