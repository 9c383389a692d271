"""What a cluster is given, as snapshots; and that each kind's own reader takes it.

New snapshots, to be read before they are kept: python tests/launch/clusters/test_artefacts.py
"""

import re
import shlex
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import yaml
from launch_builders import make_job, make_profile

from areal_lite.config.reading import parse_override
from areal_lite.errors import ConfigError
from areal_lite.launch.clusters.attempts import attempt_scripts
from areal_lite.launch.clusters.fit import shipped
from areal_lite.launch.clusters.job import Job, find_kind
from areal_lite.launch.clusters.kubernetes import Kubernetes, manifest, schema_problems
from areal_lite.launch.clusters.profile import Profile
from areal_lite.launch.clusters.remote import bash_problems, render, script
from areal_lite.launch.clusters.slurm import Slurm
from areal_lite.launch.clusters.supervised import Local
from areal_lite.launch.commands.launch import run_job

SNAPSHOTS = Path(__file__).parents[2] / "fixtures" / "launch"
KINDS = ("local", "ray", "ssh", "kubernetes")
WORDS = "train gsm8k_1node model.path=/models/Qwen3-1.7B"


def written(kind: str) -> str:
    job = make_job(kind, WORDS)
    files = {**find_kind(kind).artefacts(job), **attempt_scripts(shipped(job, ".")[0] if job.ships else job)}
    return "".join(f"# {name}\n{text}\n" for name, text in files.items())


@pytest.mark.parametrize("kind", KINDS)
def test_artefacts_are_those_that_were_read(kind: str) -> None:
    """Seen failing with the token's variables left out, and with a volume that a claim had named, such as `files`."""
    assert written(kind) == (SNAPSHOTS / f"{kind}.txt").read_text()
    assert bash_problems(find_kind(kind).artefacts(make_job(kind, WORDS))) == []
    assert list(find_kind(kind).check(make_job(kind, WORDS))) == []


@pytest.mark.parametrize("kind", ["local", "slurm", "kubernetes"])
def test_a_shell_line_that_bash_cannot_read(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    profile = make_profile(enter="source 'open") if kind != "local" else Profile(enter="source 'open")
    with pytest.raises(ConfigError, match="must be a script that bash reads"):
        run_job(make_job(kind, "train arith_cpu", profile=profile), dry_run=True)


@pytest.mark.slow
def test_a_head_that_has_to_go_waits_until_the_run_is_saved(tmp_path: Path) -> None:
    """Seen failing without the wait."""
    job = make_job("kubernetes", WORDS, profile=make_profile(shared=str(tmp_path)))
    pod = manifest(job)[1]["spec"]["rayClusterSpec"]["headGroupSpec"]["template"]["spec"]
    files, saved = tmp_path / job.name / "runs" / "jobs" / job.name, tmp_path / "saved"
    files.mkdir(parents=True)
    save = (
        "import pathlib, signal, time\nsignal.signal(signal.SIGTERM, signal.default_int_handler)\n"
        "try:\n    print(flush=True)\n    signal.pause()\n"
        f"except KeyboardInterrupt:\n    time.sleep(1)\n    pathlib.Path({str(saved)!r}).touch()"
    )
    with subprocess.Popen([sys.executable, "-c", save], stdout=subprocess.PIPE) as run:
        assert run.stdout is not None
        run.stdout.readline()
        (files / "pid").write_text(f"{run.pid}\n")
        reaper = threading.Thread(target=run.wait)
        reaper.start()
        subprocess.run(pod["containers"][0]["lifecycle"]["preStop"]["exec"]["command"], timeout=300, check=False)
        assert saved.exists()
        reaper.join()


def test_the_schema_refuses_an_unknown_key() -> None:
    """Seen failing with a schema that lets unknown keys pass."""
    _, rayjob = manifest(make_job("kubernetes", WORDS))
    assert schema_problems(rayjob) == []
    (problem,) = schema_problems({**rayjob, "spec": {**rayjob["spec"], "entrypont": "x"}})
    assert "at $.spec: " in problem
    assert "entrypont" in problem


@pytest.mark.parametrize(
    ("kind", "changed", "message"),
    [
        ("kubernetes", {"kubernetes": {}}, "kubernetes.image must name an image"),
        ("ssh", {"ssh": {}}, "ssh.hosts must name nodes=4 hosts, got none"),
        ("ssh", {"ssh": {"hosts": ["a"]}}, "ssh.hosts must name nodes=4 hosts, got 1 (a)"),
        ("ssh", {"ssh": {"hosts": list("abca")}}, "nodes=4 hosts, got 4 (a, b, c, a): list each once"),
        ("ssh", {"ssh": {"hosts": list("abcd"), "shell": "ssh me"}}, "must hold {host} where"),
        ("ray", {"ray": {}}, "got neither: set ray.address or ray.jobs"),
    ],
)
def test_what_a_kind_needs(kind: str, changed: dict[str, object], message: str) -> None:
    """Seen failing with a host that was named twice: the job got one node less."""
    assert message in find_kind(kind).check(make_job(kind, profile=make_profile(**changed)))[0]


@pytest.mark.parametrize("kind", [*KINDS, "slurm"])
def test_any_folder_reaches_the_command_as_it_is(kind: str) -> None:
    """In a shell, then in YAML. Seen failing: a job in the folder `a #3` wrote its run, and looked for it, in `a`."""
    odd = '/shared/ü it\'s "x" #3: $HOME'
    job = make_job(kind, profile=make_profile(shared=odd, nodes=1), folder=odd)
    for words, run_folder in (([], f"{odd}/runs/run-1"), (['run.dir="/shared/a: b #3"'], "/shared/a: b #3")):
        own = job.model_copy(update={"words": [*job.words, *words]})
        there = shipped(own, ".")[0] if own.ships else own
        typed = shlex.split(attempt_scripts(there)["run.sh"].splitlines()[-1])
        assert parse_override(next(word for word in typed if word.startswith("run.dir="))) == (
            "run.dir",
            str(there.run_folder),
        )
        assert str(own.run_folder) == run_folder
        assert bash_problems(find_kind(kind).artefacts(own) | attempt_scripts(there)) == []


if __name__ == "__main__":
    SNAPSHOTS.mkdir(exist_ok=True)
    for one in KINDS:
        (SNAPSHOTS / f"{one}.txt").write_text(written(one))


def test_values_and_paths_reach_a_rayjob_as_they_are() -> None:
    """Seen failing: line separators became spaces, DEL a traceback, and a path of two words was two."""
    env = {"A": "a\u2028b\u0085c\x7fd 🙂 \"'\n"}
    job = make_job("kubernetes", profile=make_profile(shared="/mnt/my data", env=env))
    assert yaml.safe_load(Kubernetes().secrets(job)["secret.yaml"])["stringData"] == env
    _, rayjob = yaml.safe_load_all(Kubernetes().artefacts(job)["rayjob.yaml"])
    cluster = rayjob["spec"]["rayClusterSpec"]
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        (variable,) = group["template"]["spec"]["containers"][0]["env"]
        assert variable == {"name": "A", "valueFrom": {"secretKeyRef": {"name": "run-1", "key": "A"}}}
    stop = cluster["headGroupSpec"]["template"]["spec"]["containers"][0]["lifecycle"]["preStop"]["exec"]["command"][2]
    assert "cat '/mnt/my data/run-1/runs/jobs/run-1/pid')" in stop


@pytest.mark.parametrize(("enter", "code"), [("true\n", 7), ("true # why\nfalse # and why\n", 1), ("export A=1", 7)])
@pytest.mark.parametrize("template", ["start.sh", "node.sh", "job.sbatch"])
def test_what_is_entered_may_be_lines_and_must_succeed(enter: str, code: int, template: str, tmp_path: Path) -> None:
    """Seen failing with the commands run all the same, on all kinds but Ray jobs and Kubernetes."""
    kind = "slurm" if template == "job.sbatch" else "kubernetes"
    job = make_job(kind, folder=str(tmp_path), profile=make_profile(shared=str(tmp_path), enter=enter, env={}))
    (tmp_path / "from").mkdir()
    if template == "start.sh":
        text = "python() { :; }\n" + re.sub(
            r"^exec .*", "exit 7", render(template, job=job, source=tmp_path / "from"), flags=re.MULTILINE
        )
    elif template == "node.sh":
        text = script(job, command=["sh", "-c", "'exit 7'"])
    else:
        text = re.sub(r"^python .*", "exit 7 &", Slurm().artefacts(job)[template], flags=re.MULTILINE)
    done = subprocess.run(["bash", "-c", text], capture_output=True, text=True, check=False)
    assert (done.returncode, "enter in the profile must succeed" in done.stderr) == (code, code == 1), done


def test_values_of_env_are_in_one_file_that_only_its_owner_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Seen failing with values in the command line (`ps`), the record, the scripts and what --dry-run prints."""
    monkeypatch.setattr(Local, "submit", lambda self, job: "1@2@here")
    profile = Profile(env={"TOKEN": "it's val-7"})
    job = make_job("local", "train arith_cpu", folder=str(tmp_path), profile=profile)
    run_job(job, dry_run=True)
    assert "env.sh: the values of TOKEN" in capsys.readouterr().out
    assert run_job(job, detach=True) == 0
    files = [path for path in (tmp_path / "runs").rglob("*") if path.is_file()]
    assert [path.name for path in files if "val-7" in path.read_text()] == ["env.sh"]
    assert (job.files / "env.sh").stat().st_mode & 0o777 == 0o600
    assert "val-7" not in capsys.readouterr().out
    recorded = Job.model_validate_json((tmp_path / "runs/jobs/run-1.json").read_text())
    text = script(recorded, command=["printenv", "TOKEN"])
    done = subprocess.run(["bash", "-s"], input=text, capture_output=True, text=True, check=False)
    assert done.stdout.endswith("it's val-7\n")
    ssh = {"ssh": {"hosts": ["one"], "shell": "env {host}"}}
    for kind, sections in {"ssh": ssh, "ray": {"ray": {"jobs": "http://h:1"}}, "kubernetes": {}, "slurm": {}}.items():
        settings = {"nodes": 1, "shared": str(tmp_path), "env": {"TOKEN": "it's val-7"}, **sections}
        other = make_job(kind, "train arith_cpu", folder=str(tmp_path), profile=Profile.model_validate(settings))
        assert "val-7" not in str({**find_kind(kind).artefacts(other), **attempt_scripts(other)})
        assert any("val-7" in text for text in find_kind(kind).secrets(other).values())


def test_a_patch_of_the_manifest() -> None:
    """Node selectors, another kind of GPU, a label; a null takes away; the schema still has the last word."""
    limits = {"nvidia.com/gpu": None, "rdma/ib": "8"}
    mounts = [{"name": "home", "mountPath": "/models", "subPath": "models"}]
    pod = {
        "nodeSelector": {"pool": "h200"},
        "containers": [{"name": "ray", "resources": {"limits": limits}, "volumeMounts": mounts}],
    }
    cluster = {"headGroupSpec": {"template": {"spec": pod}}}
    patch = {"metadata": {"labels": {"team": "rl"}}, "spec": {"backoffLimit": None, "rayClusterSpec": cluster}}
    settings = {"image": "i", "claim": "home", "patch": patch}
    _, rayjob = manifest(make_job("kubernetes", WORDS, profile=make_profile(kubernetes=settings)))
    assert schema_problems(rayjob) == []
    assert rayjob["metadata"] == {"name": "run-1", "namespace": "default", "labels": {"team": "rl"}}
    assert "backoffLimit" not in rayjob["spec"]
    spec = rayjob["spec"]["rayClusterSpec"]["headGroupSpec"]["template"]["spec"]
    (container,) = spec["containers"]
    assert (spec["nodeSelector"], container["image"]) == (pod["nodeSelector"], "i")
    assert set(container["resources"]["limits"]) == {"cpu", "memory", "rdma/ib"}
    assert [mount["mountPath"] for mount in container["volumeMounts"]][-2:] == ["/shared", "/models"]
    pod["nodeSelektor"] = {}
    job = make_job("kubernetes", WORDS, profile=make_profile(kubernetes=settings))
    assert any("nodeSelektor" in problem for problem in find_kind("kubernetes").check(job))


def test_files_that_cannot_be_shipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen failing with a traceback, and with a manifest that no cluster takes."""
    monkeypatch.chdir(tmp_path)
    job = make_job("kubernetes", "train arith_cpu verifier.function=v.py:f", folder=str(tmp_path))
    with pytest.raises(ConfigError, match=r"are shipped: expected .*v\.py as UTF-8 text, got .*No such file"):
        Kubernetes().check(job)
    Path("v.py").touch()
    Path("beside.py").write_bytes(b"# \xe9\n")
    with pytest.raises(ConfigError, match=r"expected .*beside\.py as UTF-8 text, got 'utf-8' codec"):
        Kubernetes().check(job)
    Path("beside.py").unlink()
    Path("v.py").write_text("#" * 2**20)
    assert any("ConfigMap of 1 MiB" in problem for problem in Kubernetes().check(job))
