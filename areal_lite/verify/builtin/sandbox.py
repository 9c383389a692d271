"""Runs a program that is not trusted: in bubblewrap, or, if the recipe asks for it, in a plain process with limits.

docs/verifiers.md lists what each kind contains and what it does not. Every program sets limits of its own on itself
(`inside.py`). Linux only.
"""

import contextlib
import functools
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from pydantic import Field

from areal_lite.config.section import Arguments
from areal_lite.errors import VerifierError
from areal_lite.verify.descendants import adopt_orphans, children, end_descendants

FOLDER = "/program"
"""Where a program finds its files in bubblewrap; in a plain process they lie in its working folder."""

_NOBODY = 65534
_OWN_USER = 1_900_000_000  # far from what system users and containers take; the process id is added
_MIB = 2**20
_MAX_FILES = 64
"""Open files of a process: the kernel's buffers of sockets and pipes, up to 0.4 MiB each, count nowhere else."""


class Limits(Arguments):
    """What one program may take."""

    wall_s: float = Field(10.0, gt=0)
    """seconds that one case, or all asserts together, may take; for programs that sleep: far above cpu_s it decides
    nothing on a busy machine"""
    cpu_s: int = Field(2, gt=0)
    """processor seconds of one process"""
    memory_mb: int = Field(512, gt=0)
    """address space of a process, and resident memory of all, in MiB"""
    output_kb: int = Field(256, gt=0)
    """standard output and error together, in KiB, beyond what is expected"""
    disk_mb: int = Field(16, gt=0)
    """a file, what it prints included, and in bubblewrap the whole temporary folder, in MiB"""
    processes: int = Field(8, gt=0)
    """processes and threads at once"""
    sandbox: Literal["bubblewrap", "plain"] = "bubblewrap"
    """plain = limits alone"""


@functools.cache
def check_bubblewrap() -> None:
    """Try bubblewrap, once; a `VerifierError` where it does not work."""
    if trouble := _bubblewrap_trouble():
        raise VerifierError(
            f"bubblewrap must work here, got: {trouble}. Fix: install it (apt-get install bubblewrap) and allow user "
            "namespaces, or write `sandbox: plain` to run a model's programs without a sandbox"
        )


def _bubblewrap_trouble() -> str:
    if shutil.which("bwrap") is None:
        return "there is no program bwrap"
    with tempfile.TemporaryDirectory() as folder, sweeping():
        os.chmod(folder, 0o755)
        command = _bubblewrap(Path(folder), disk_mb=1)
        try:
            result = subprocess.run([*command, _python(), "-I", "-S", "-c", ""], capture_output=True, timeout=30)
        except (OSError, subprocess.TimeoutExpired) as error:
            return str(error)
    return "" if result.returncode == 0 else result.stderr.decode(errors="replace").strip() or "no reason"


def command_line(folder: Path, file: str, descriptor: int, *, limits: Limits) -> list[str]:
    """Return what starts `inside.py` of a folder; the folder is the working folder of a plain process.

    Wall time, output and the memory of all processes are the caller's to watch. `inside.py` starts a process for each
    case: it does not count as one of them itself.
    """
    # A program's output goes into files, too: one byte more than allowed must fit.
    file_bytes = max(limits.disk_mb * _MIB, limits.output_kb * 1024 + 1)
    figures = {"AS": limits.memory_mb * _MIB, "FSIZE": file_bytes, "NOFILE": _MAX_FILES, "CORE": 0}
    command, inside = list[str](), str(folder)
    if limits.sandbox == "bubblewrap":
        command, inside = _bubblewrap(folder, disk_mb=limits.disk_mb), FOLDER
        # Bubblewrap's process and `inside.py` count as well. Outside, the limit would count all of the user's.
        figures["NPROC"] = limits.processes + 2
    command += [_python(), "-I", f"{inside}/inside.py", json.dumps(figures), str(limits.cpu_s)]
    return [*command, f"{inside}/{file}", str(descriptor)]


@functools.cache
def _python() -> str:
    """Return the interpreter under any virtual environment: a program gets the standard library, and no more."""
    return os.path.realpath(getattr(sys, "_base_executable", sys.executable))


def _bubblewrap(folder: Path, *, disk_mb: int) -> list[str]:
    """Return the command before the program's own, which is process 1 of its namespace.

    Root is no user whose processes the kernel counts, whatever it is called inside. So root becomes a user of its own
    first, in a view of the file system where such a user can reach the interpreter, wherever it lies.
    """
    inner = [
        *("bwrap", "--unshare-all", "--unshare-user", "--disable-userns", "--uid", str(_NOBODY), "--gid", str(_NOBODY)),
        *("--die-with-parent", "--as-pid-1", "--new-session", "--cap-drop", "ALL", "--clearenv"),
        *("--setenv", "PATH", "/usr/bin:/bin", "--setenv", "HOME", "/tmp", "--setenv", "LANG", "C.UTF-8"),
        *system_view(),
        *("--ro-bind", FOLDER if os.geteuid() == 0 else str(folder), FOLDER),
        *("--proc", "/proc", "--dev", "/dev", "--remount-ro", "/dev"),
        *("--size", str(disk_mb * _MIB), "--tmpfs", "/tmp", "--remount-ro", "/", "--chdir", "/tmp", "--"),
    ]
    if os.geteuid() != 0:
        return inner
    user = str(_OWN_USER + os.getpid())
    return [
        *("bwrap", "--cap-drop", "ALL", "--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"),
        *system_view(),
        *("--ro-bind", str(folder), FOLDER, "--bind", "/proc", "/proc", "--dev", "/dev", "--perms", "0755"),
        *("--dir", "/tmp", "--chdir", "/", "--", "setpriv", "--reuid", user, "--regid", user, "--clear-groups"),
        *("--pdeathsig", "KILL", *inner),
    ]


@functools.cache
def system_view() -> tuple[str, ...]:
    """Return bubblewrap's arguments for a view of the system's programs and the interpreter, and of no user's files."""
    command = ["--ro-bind", "/usr", "/usr"]
    for place in ("/bin", "/lib", "/lib32", "/lib64", "/sbin"):
        command += ["--ro-bind-try", place, place]
    command += ["--perms", "0755", "--dir", "/etc", "--ro-bind-try", "/etc/ld.so.cache", "/etc/ld.so.cache"]
    prefix = Path(_python()).parents[1]
    if prefix.is_relative_to("/usr"):
        return tuple(command)
    for parent in reversed(prefix.parents[:-1]):
        command += ["--perms", "0755", "--dir", str(parent)]
    return (*command, "--ro-bind", str(prefix), str(prefix))


@contextlib.contextmanager
def sweeping() -> Iterator[None]:
    """Kill whatever was started within the block, and wait until it is gone, daemons included.

    A daemon leaves its parents, and what bubblewrap held together dies a moment after it. As their subreaper,
    this process gets both as children. Nothing else may start processes from this one meanwhile.
    """
    adopt_orphans()
    before = set(children(os.getpid()))
    try:
        yield
    finally:
        end_descendants(spare=before.__contains__)
