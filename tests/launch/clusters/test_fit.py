"""Recipe against profile: what does not fit is found before anything is asked of a cluster."""

import re
from pathlib import Path

import pytest
from launch_builders import make_job, make_profile
from pydantic import ValidationError

from areal_lite.errors import ConfigError
from areal_lite.launch.clusters.fit import own_files, problems, recipe_of, with_run_folder
from areal_lite.launch.commands import main as cli
from areal_lite.launch.commands.launch import run_job

GPU = "run.device=cuda weights.transport=nccl"


@pytest.mark.parametrize(
    ("words", "changed", "message"),
    [
        (f"train arith_cpu {GPU} rollout.workers=24 trainer.ranks=8", {}, None),
        (
            f"train arith_cpu {GPU} rollout.workers=25 trainer.ranks=8",
            {},
            "nodes=4 x gpus_per_node=8.*no node +1 +1 x trainer of 1\n.* gpus_per_node in a --profile",
        ),
        (
            f"train arith_cpu {GPU} rollout.tensor_parallel=6 rollout.workers=5",
            {},
            "an engine on one node.*no node +6 +1 x rollout of 6\nlower rollout.workers",
        ),
        (f"eval some/model --recipe arith_cpu {GPU} rollout.workers=90", {}, None),
        (f"eval m --recipe=arith_cpu {GPU} rollout.tensor_parallel=9", {}, "no node +9 +1 x rollout of 9\n"),
        ("train arith_cpu", {"shared": None}, "need a folder that all see, got shared: null"),
        ("train arith_cpu run.dir=/elsewhere/run", {}, "every node must see /elsewhere/run, got shared=/shared"),
        ("train arith_cpu", {}, None),
        ("train arith_cpu run.dir=runs", {}, "a run folder must not hold /shared/me/runs/jobs/run-1, got"),
    ],
)
def test_what_does_not_fit_is_said(words: str, changed: dict[str, object], message: str | None) -> None:
    """Seen failing with a run in a folder that a retry renames, the job's own record in it."""
    found = list(problems(make_job(words=words, profile=make_profile(**changed))))
    assert len(found) == (message is not None)
    if message:
        assert re.search(message, found[0], re.DOTALL)


def test_a_run_folder_that_holds_a_run(tmp_path: Path) -> None:
    """A second attempt would go on from it, or rename it."""
    folder = tmp_path / "runs" / "run-1"
    folder.mkdir(parents=True)
    (folder / "config.json").touch()
    local = make_profile(nodes=1, ssh={})
    (found,) = problems(make_job("local", "train arith_cpu", folder=str(tmp_path), profile=local))
    assert found.startswith(f"the run folder must be a new one, got {folder}, which holds a run: choose another --name")
    words = f"train arith_cpu run.resume={folder}"
    assert list(problems(make_job("local", words, folder=str(tmp_path), profile=local))) == []


OWN_FOLDER = {"": "old", "run.resume=mine": "mine", "run.dir=mine": "old", "run.resume=null": "new"}


@pytest.mark.parametrize("typed", OWN_FOLDER)
def test_a_recipe_may_name_its_run_folder(typed: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As `train` takes it: `run.resume` comes first. Seen failing with `runs/JOB` in place of it."""
    recipe = tmp_path / "own.yaml"
    recipe.write_text("run: {dir: new, resume: old}")
    job = make_job("local", f"train {recipe} {typed}", folder=str(tmp_path), profile=make_profile(nodes=1))
    assert with_run_folder(job).run_folder == tmp_path / OWN_FOLDER[typed]
    assert run_job(job, dry_run=True) == 0
    assert f"run.dir={tmp_path}/runs" not in capsys.readouterr().out


def test_a_job_that_ships_its_files_needs_them_below(tmp_path: Path) -> None:
    (tmp_path / "beside.py").touch()
    words = f"train arith_cpu verifier.function={tmp_path}/v.py:f"
    first, second = problems(make_job("kubernetes", words, profile=make_profile(shared=None)))
    assert first.startswith(f"files that are shipped must lie below /shared/me, got {tmp_path}/v.py")
    assert second.endswith("shared folder, got none: set shared")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("verify arith_cpu", "one of train"),
        ("train run.steps=3", "right after it"),
        ("train arith_cpu --dry-run", "before the command, got --dry-run after it"),
    ],
)
def test_a_command_that_is_none(words: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        recipe_of(words.split())


def test_a_folder_may_hold_an_equals_sign(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen failing with `eval` and `train` refused, as if the path were an override."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "lr=1").mkdir()
    assert recipe_of(["train", "lr=1", "run.steps=3"]) == ("train", "lr=1", ["run.steps=3"])
    assert recipe_of(["eval", "lr=1", "--recipe", "r", "run.steps=3"]) == ("eval", "r", ["run.steps=3"])


@pytest.mark.parametrize("words", ["run.steps 3", "--foo"])
def test_words_that_train_refuses_are_refused(words: str) -> None:
    """Seen failing: `launch` left them out, and the job that had waited ended at once."""
    with pytest.raises(ConfigError, match="an override is section"):
        list(problems(make_job(words=f"train arith_cpu {words}")))


def test_the_recipe_and_plug_ins_that_are_one_s_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen failing with overrides left out, with what a preset's file names, and with what a plug-in imports."""
    monkeypatch.chdir(tmp_path)
    Path("mine.yaml").write_text("rollout: {workflow: flow.py:run}\nobjective: {preset: p.yaml}\n")
    Path("p.yaml").write_text("objective: {loss_function: loss.py:f}\n")
    job = make_job(words="train mine.yaml verifier.function=v.py:f")
    Path("imported.py").touch()
    own = ["mine.yaml", "p.yaml", "flow.py", "loss.py", "v.py", "imported.py"]
    assert own_files("mine.yaml", job) == list(map(Path, own))
    assert own_files("arith_cpu", make_job(words="train arith_cpu")) == []


def test_a_dry_run_prints_and_fails_with_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["launch", "--dry-run", "train", "arith_cpu", "run.steps=3"]) == 0
    assert "commands.main train arith_cpu run.steps=3 run.dir=" in capsys.readouterr().out
    assert cli.main(["launch", "--dry-run", "train", "arith_cpu", *GPU.split()]) == 1
    output = capsys.readouterr()
    assert "must fit into nodes=1 x gpus_per_node=0" in output.err
    assert "# run.sh" in output.out
    assert not Path("runs").exists()


@pytest.mark.parametrize("name", ["../x", "x%j", "", "two words", "x.json"])
def test_a_name_is_one_that_every_kind_can_use(name: str) -> None:
    """Seen failing: such a job could not be found again, or its log was elsewhere."""
    with pytest.raises(ValidationError, match="choose another --name"):
        make_job(name=name)
