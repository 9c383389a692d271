"""The batch script of a job on four nodes, and Slurm's words for how a job stands, turned into ours."""

import subprocess
from pathlib import Path

import pytest
from launch_builders import make_job, make_profile
from places import FIXTURES

from areal_lite.errors import ConfigError
from areal_lite.launch.clusters import remote, slurm
from areal_lite.launch.clusters.attempts import attempt_scripts
from areal_lite.launch.clusters.job import Job
from areal_lite.launch.clusters.profile import Profile
from areal_lite.launch.clusters.remote import bash_problems
from areal_lite.launch.clusters.slurm import Slurm

FOUR_NODES = (FIXTURES / "launch" / "slurm.sbatch").read_text()


def script(job: Job) -> str:
    artefacts = Slurm().artefacts(job)
    assert bash_problems(artefacts) == []
    return artefacts["job.sbatch"]


def test_the_script_of_four_nodes_with_gpus() -> None:
    """Everything of the profile is in it; after the time limit it goes on from a checkpoint. A folder with a blank."""
    settings = {"partition": "h200", "account": "rl", "time": "4:00:00", "signal_s": 600}
    profile = make_profile(env={}, slurm={**settings, "options": ["--constraint=nvlink"]})
    job = make_job("slurm", "train gsm8k_4node", name="gsm8k", folder="/shared/my work", profile=profile)
    assert script(job) == FOUR_NODES


@pytest.mark.parametrize(
    ("told", "saved", "requeues"),
    [
        ("", "", False),
        ("", "echo 2 >", True),
        ("", "echo 2 > {0}; touch -d '1 hour ago'", True),
        ("USR1", "", True),
        ("USR1", "rm", False),
        ("INT", "echo 2 >", False),
        ("USR1 TERM", "echo 2 >", True),
        ("INT USR1", "echo 2 >", False),
    ],
)
def test_a_job_goes_back_into_the_queue_unless_it_was_asked_to_stop(
    told: str, saved: str, requeues: bool, tmp_path: Path
) -> None:
    """A run that gets the signal alone, as when a preemption begins, is requeued only if it saves: else without end.

    Seen failing where the run alone got it, with only the last signal looked at, with any checkpoint, and, where the
    clock was set back, with times of files.
    """
    told_by = "".join(f"kill -{name} $$; sleep 0.2; " for name in told.split())
    (meta := tmp_path / "runs/told/checkpoints/step-1/meta.json").parent.mkdir(parents=True)
    meta.write_text("1")
    saves = f"{saved.format(meta)} {meta}; " if saved else ""
    supervisor = f"python() {{ trap 'ends=1' TERM; {saves}{told_by}sleep {1 if told else 0} & wait; exit 130; }}"
    enter = f"{supervisor}; scontrol() {{ echo requeued; }}"
    job = Job(name="told", kind="slurm", folder=str(tmp_path), words=["train", "a"], profile=Profile(enter=enter))
    done = subprocess.run(["bash", "-s"], input=script(job), capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode, "requeued" in done.stdout) == (130, requeues), done


def test_a_controller_that_does_not_answer_fails_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Seen failing with a TimeoutExpired, and with no nodes where scontrol failed."""
    (tmp_path / "scontrol").write_text("#!/bin/sh\nexec /bin/sleep 60\n")
    (tmp_path / "scontrol").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("SLURM_JOB_NODELIST", "n[1-2]")
    monkeypatch.setattr(remote, "_TIMEOUT_S", 0.1)
    with pytest.raises(ConfigError, match="Slurm must answer, got"):
        Slurm().status(EVAL)
    with pytest.raises(ConfigError, match=r"`scontrol show hostnames n\[1-2\]` must work, got: .*late|within"):
        Slurm().nodes(EVAL.model_copy(update={"profile": Profile(nodes=2)}))


EVAL = Job(name="eval", kind="slurm", folder="/shared/me", words=["eval", "/models/a"], id="7")


@pytest.mark.parametrize(
    ("shown", "words", "code"),
    [
        (
            "PENDING ExitCode=0:0 NodeList= Reason=BeginTime Restarts=1",
            "job 7 without nodes (BeginTime), start 2",
            None,
        ),
        ("REQUEUED ExitCode=0:0 NodeList=n1", "requeued: job 7 on n1, start 1", None),
        ("COMPLETED ExitCode=0:0 NodeList=n1", "completed: job 7 on n1, start 1, exit code 0", 0),
        ("FAILED ExitCode=3:0 NodeList=n1", "exit code 3", 3),
        ("FAILED ExitCode=0:9 NodeList=n1", "exit code 137", 137),
        ("TIMEOUT ExitCode=0:0 NodeList=n1", "exit code 1", 1),
    ],
)
def test_a_status_of_slurm(shown: str, words: str, code: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A job that is being requeued has no exit code; one that Slurm ended has failed, whatever its processes returned.

    Seen failing with `on (null)`.
    """
    monkeypatch.setattr(slurm, "ask", lambda *argv: subprocess.CompletedProcess(argv, 0, f"JobState={shown}", ""))
    status = Slurm().status(EVAL)
    assert status.words.endswith(words)
    assert status.code == code


def test_options_of_steps_are_those_of_each_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a container by pyxis, for which one node is a step, too. Outside an allocation nodes have made-up names."""
    monkeypatch.delenv("SLURM_JOB_NODELIST", raising=False)
    slurm = {"srun_options": ["--container-image=/shared/image.sqsh", "--container-mounts=/shared"]}
    for nodes in (1, 2):
        profile = Profile.model_validate({"nodes": nodes, "shared": "/shared", "enter": ":", "slurm": slurm})
        job = Job(name="eval", kind="slurm", folder="/shared/me", words=["eval", "/models/a"], profile=profile)
        scripts = attempt_scripts(job)
        lines = scripts["nodes"].splitlines()
        assert [line.split()[-3] for line in lines] == [f"--nodelist=NODE-{n}" for n in range(1, nodes + 1)]
        assert all(" --container-image=/shared/image.sqsh --container-mounts=/shared " in line for line in lines)
        assert ("worker.sh" in scripts, scripts["run.sh"].splitlines()[-1].startswith("exec python ")) == (
            nodes > 1,
            True,
        )


def test_a_command_of_slurm_outlives_a_connection_that_is_hung_up() -> None:
    """`scontrol` was ended by SIGPIPE under load before it could ask again. Seen failing with Python's default."""
    assert remote.ask("sh", "-c", "kill -s PIPE $$; echo lives").stdout == "lives\n"
