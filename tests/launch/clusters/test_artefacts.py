"""What a cluster is given, as snapshots; and that each kind's own reader takes it.

New snapshots, to be read before they are kept: python tests/launch/clusters/test_artefacts.py
"""

import re
import shlex
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path

import pytest
import yaml
from launch_builders import make_job, make_profile

from areal_lite.errors import ConfigError
from areal_lite.launch.clusters.job import find_kind
from areal_lite.launch.clusters.kubernetes import Kubernetes, manifest, schema_problems
from areal_lite.launch.clusters.ray_nodes import RayNodes
from areal_lite.launch.clusters.remote import render

SNAPSHOTS = Path(__file__).parents[2] / "fixtures" / "launch"
KINDS = ("local", "ray", "ssh", "kubernetes")
WORDS = "train gsm8k_1node model.path=/models/Qwen3-1.7B"


def written(kind: str) -> str:
    files = find_kind(kind).artefacts(make_job(kind, WORDS))
    return "".join(f"# {name}\n{text}\n" for name, text in files.items())


@pytest.mark.parametrize("kind", KINDS)
def test_artefacts_are_those_that_were_read(kind: str) -> None:
    """Seen failing with the token's variables left out."""
    assert written(kind) == (SNAPSHOTS / f"{kind}.txt").read_text()
    assert len(find_kind(kind).check(make_job(kind, WORDS))) == (kind == "local")  # of four nodes


@pytest.mark.parametrize("kind", ["ssh", "ray", "kubernetes"])
def test_a_shell_line_that_bash_cannot_read(kind: str) -> None:
    job = make_job(kind, profile=make_profile(enter="source 'open"))
    assert any("must be a script that bash reads" in problem for problem in find_kind(kind).check(job))


def test_the_entry_point_of_a_rayjob_is_plain_words() -> None:
    """KubeRay pastes it into a shell line of its own. Seen failing with the steps themselves in it."""
    config_map, rayjob = manifest(make_job("kubernetes", WORDS))
    assert shlex.split(rayjob["spec"]["entrypoint"], comments=True) == ["bash", "/etc/areal-lite/start.sh"]
    (items,) = [
        volume["configMap"]["items"]
        for volume in rayjob["spec"]["rayClusterSpec"]["headGroupSpec"]["template"]["spec"]["volumes"]
        if "configMap" in volume
    ]
    (key,) = [item["key"] for item in items if item["path"] == "start.sh"]
    assert "areal_lite.launch.clusters.attempts" in config_map["data"][key]


@pytest.mark.slow
def test_a_head_that_has_to_go_waits_until_the_run_is_saved(tmp_path: Path) -> None:
    """Seen failing without the wait."""
    job = make_job("kubernetes", WORDS, profile=make_profile(shared=str(tmp_path)))
    pod = manifest(job)[1]["spec"]["rayClusterSpec"]["headGroupSpec"]["template"]["spec"]
    files, saved = tmp_path / job.name / "runs" / "jobs" / job.name, tmp_path / "saved"
    files.mkdir(parents=True)
    save = (
        "import pathlib, signal, time\nsignal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "try:\n    print(flush=True)\n    signal.pause()\n"
        f"except KeyboardInterrupt:\n    time.sleep(1)\n    pathlib.Path({str(saved)!r}).touch()"
    )
    with subprocess.Popen([sys.executable, "-c", save], stdout=subprocess.PIPE) as run:
        assert run.stdout is not None
        run.stdout.readline()
        (files / "pid").write_text(f"{run.pid}\n")
        reaper = threading.Thread(target=run.wait)
        reaper.start()
        subprocess.run(pod["containers"][0]["lifecycle"]["preStop"]["exec"]["command"], timeout=60, check=False)
        assert saved.exists()
        reaper.join()


@pytest.mark.parametrize(
    ("breakage", "at"),
    [
        ({"entrypont": "x"}, r"at \$\.spec: .*entrypont"),
        ({"backoffLimit": "none"}, r"at \$\.spec\.backoffLimit"),
        (
            {"rayClusterSpec": {"headGroupSpec": {"template": {"spec": {"containers": [{}]}}}}},
            r"containers\[0\]: 'name'",
        ),
    ],
)
def test_the_schema_refuses(breakage: Mapping[str, object], at: str) -> None:
    """Seen failing with a schema that lets unknown keys pass."""
    _, rayjob = manifest(make_job("kubernetes", WORDS))
    assert schema_problems(rayjob) == []
    found = schema_problems({**rayjob, "spec": {**rayjob["spec"], **breakage}})
    with pytest.raises(ValueError, match=at):
        raise ValueError(*found[:1])


@pytest.mark.parametrize(
    ("kind", "changed", "message"),
    [
        ("kubernetes", {"kubernetes": {}}, "kubernetes.image must name an image"),
        ("local", {}, "--on local is one machine, got nodes=4"),
        ("ssh", {"ssh": {}}, "ssh.hosts must name nodes=4 hosts, got none"),
        ("ssh", {"ssh": {"hosts": ["a"]}}, "ssh.hosts must name nodes=4 hosts, got 1 (a)"),
        ("ssh", {"ssh": {"hosts": list("abcd"), "shell": "ssh me"}}, "must say where {host} goes"),
        ("ray", {"ray": {}}, "got neither: set ray.address or ray.jobs"),
    ],
)
def test_what_a_kind_needs(kind: str, changed: dict[str, object], message: str) -> None:
    assert message in find_kind(kind).check(make_job(kind, profile=make_profile(**changed)))[0]


def test_a_file_that_should_be_shipped_and_is_not_there() -> None:
    job = make_job("kubernetes", "train gsm8k_1node verifier.function=none.py:f")
    with pytest.raises(ConfigError, match=r"are shipped, got .*none\.py"):
        find_kind("kubernetes").artefacts(job)


def test_every_node_has_ports_of_its_own_and_the_run_the_rest(tmp_path: Path) -> None:
    job = make_job()
    nodes = RayNodes(job, find_kind("ssh").nodes(job), logs=tmp_path)
    ranges = [nodes._ports(index) for index in range(4)]
    assert [ports[0] for ports in ranges] == [20000, 21250, 22500, 23750]
    assert ranges[-1][-1] == 24999
    assert "run.ports=25000-29999" in find_kind("ssh").artefacts(job)["run.sh"]


if __name__ == "__main__":
    SNAPSHOTS.mkdir(exist_ok=True)
    for one in KINDS:
        (SNAPSHOTS / f"{one}.txt").write_text(written(one))


def test_values_and_paths_reach_a_rayjob_as_they_are() -> None:
    """Seen failing: line separators became spaces, DEL a traceback, and a path of two words was two."""
    env = {"A": "a\u2028b\u0085c\x7fd 🙂 \"'\n"}
    job = make_job("kubernetes", profile=make_profile(shared="/mnt/my data", env=env))
    _, rayjob = yaml.safe_load_all(Kubernetes().artefacts(job)["rayjob.yaml"])
    cluster = rayjob["spec"]["rayClusterSpec"]
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        assert group["template"]["spec"]["containers"][0]["env"] == [{"name": "A", "value": env["A"]}]
    stop = cluster["headGroupSpec"]["template"]["spec"]["containers"][0]["lifecycle"]["preStop"]["exec"]["command"][2]
    assert "cat '/mnt/my data/run-1/runs/jobs/run-1/pid')" in stop


@pytest.mark.parametrize(("enter", "code"), [("true\n", 7), ("true # why\nfalse # and why\n", 1), ("export A=1", 7)])
def test_what_is_entered_may_be_lines_and_must_succeed(enter: str, code: int, tmp_path: Path) -> None:
    """Seen failing: a syntax error, and with a comment behind it a failure that was passed over."""
    folder = tmp_path / "there"
    job = make_job("kubernetes", folder=str(folder), profile=make_profile(shared=str(tmp_path), enter=enter))
    text = render("start.sh", job=job, source=tmp_path / "from").replace("exec python", "exec false && exec python")
    (tmp_path / "from").mkdir()
    text = re.sub(r"^exec .*", "exit 7", text, flags=re.MULTILINE)
    assert subprocess.run(["bash", "-c", text], check=False).returncode == code


def test_files_that_cannot_be_shipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen failing with a traceback, and with a manifest that no cluster takes."""
    monkeypatch.chdir(tmp_path)
    job = make_job("kubernetes", "train arith_cpu verifier.function=v.py:f", folder=str(tmp_path))
    Path("v.py").write_bytes(b"# \xe9\n")
    with pytest.raises(ConfigError, match="the recipe's files are shipped"):
        Kubernetes().check(job)
    Path("v.py").write_text("#" * 2**20)
    assert any("ConfigMap of 1 MiB" in problem for problem in Kubernetes().check(job))
