"""A profile is typed: what is misspelt or impossible is said in three parts."""

import re
from pathlib import Path

import pytest
from launch_builders import make_job

from areal_lite.errors import ConfigError
from areal_lite.launch.clusters.job import find_job, find_kind, load_profile, own_settings
from areal_lite.launch.clusters.profile import Profile
from areal_lite.launch.commands import main as cli


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nodes: 0", "nodes: input should be greater than or equal to 1, got 0"),
        ("ports: 40000-50000", "from 1024 to 32767"),
        ("env: {HF-HUB: '1'}", "a name in env must match pattern '^[A-Za-z_][A-Za-z0-9_]*$', got 'HF-HUB'"),
        ("{nodes: 4, ports: 20000-22300}", "ports must hold 2400 ports for nodes=4, got 20000-22300"),
        ("nods: 4", "unknown key nods; did you mean nodes?"),
        ("kubernetes: {imag: x}", "unknown key kubernetes.imag; did you mean kubernetes.image?"),
        ("kubernets: {image: x}", "unknown key kubernets; did you mean kubernetes?"),
        ("ray: {address: 'h:1', jobs: 'http://h:2'}", "an address or a jobs URL"),
        ("slurm: {signal_s: 1}", "slurm.signal_s: input should be greater than or equal to 10, got 1"),
    ],
)
def test_a_profile_and_the_section_of_every_kind_are_checked(text: str, message: str, tmp_path: Path) -> None:
    """Also where the job is of another kind. Seen failing without the check."""
    (tmp_path / "profile.yaml").write_text(text)
    with pytest.raises(ConfigError, match=re.escape(message)):
        load_profile(str(tmp_path / "profile.yaml"), kind="ssh")


@pytest.mark.parametrize("kind", ["local", "ray", "ssh", "kubernetes"])
def test_a_new_profile_is_one_with_its_own_section_alone(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Seen failing with the sections of all kinds in it."""
    assert cli.main(["launch", "--new-profile", kind]) == 0
    text = capsys.readouterr().out
    (tmp_path / "new.yaml").write_text(text)
    made, own = load_profile(str(tmp_path / "new.yaml")), find_kind(kind)
    assert {**made.model_dump(), kind: None} == {**Profile().model_dump(), kind: None}
    assert own_settings(made, kind, own) == own.Settings()
    sections = [line.partition(":")[0] for line in text.splitlines() if line.endswith(":")]
    assert sections == ([] if kind == "local" else [kind])
    assert all("#" in line for line in text.splitlines() if not line.endswith(":"))


def test_an_unknown_kind_or_job_is_told_the_nearest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="got 'slrum'; did you mean slurm"):
        find_kind("slrum")
    with pytest.raises(ConfigError, match=r"\(none yet\), got 'x'"):
        find_job("x")
    job = make_job(folder=str(tmp_path)).save().without_values()
    assert find_job("run-1") == job
    with pytest.raises(ConfigError, match="did you mean run-1"):
        find_job("run-2")
    dotted = make_job(folder=str(tmp_path), name="run-0.5").save().without_values()
    assert find_job("run-0.5") == find_job("runs/jobs/run-0.5.json") == dotted


def test_a_time_limit_without_quotes_is_read_as_it_is_written(tmp_path: Path) -> None:
    """Seen failing with 14400, which Slurm takes for minutes: YAML reads 4:00:00 in base 60."""
    for text, time in {"4:00:00": "4:00:00", "1-00:30:00.5": "1-00:30:00.5", "90:00": "90:00", "240": "240"}.items():
        (tmp_path / "profile.yaml").write_text(f"slurm: {{time: {text}}}\n")
        profile = load_profile(str(tmp_path / "profile.yaml"))
        assert own_settings(profile, "slurm", find_kind("slurm")).time == time
