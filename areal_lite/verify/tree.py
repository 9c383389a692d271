"""Processes below a process, as /proc tells: who they are, what memory they take, and how to end them all."""

import contextlib
import ctypes
import os
import signal
import sys
from pathlib import Path

__all__ = [
    "adopt_orphans",
    "children",
    "descendants",
    "end_adopted",
    "proportional_bytes",
    "resident_bytes",
    "stop_and_kill",
]

_PAGE = os.sysconf("SC_PAGE_SIZE")
_PR_SET_CHILD_SUBREAPER = 36


def adopt_orphans() -> None:
    """Become the parent of every descendant whose own parent ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)


def end_adopted() -> None:
    """Kill whom a guardian left to this process, and all below; returns when they are gone.

    They are told from other children by the filter that asks before forks: nobody below a guardian can lose it, and
    whoever has a guardian is no child of this process.
    """
    while found := [pid for pid in children(os.getpid()) if _num_filters(pid) > _num_filters(os.getpid())]:
        for pid in found:
            stop_and_kill(pid)
            _send(pid, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)


def _num_filters(pid: int) -> int:
    """Return how many seccomp filters a process has; 0 where /proc does not tell (Linux before 5.11)."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("Seccomp_filters:"):
                return int(line.split()[1])
    return 0


def children(pid: int) -> list[int]:
    """Return the process ids right below a process; none where /proc does not tell."""
    found: list[int] = []
    with contextlib.suppress(OSError):
        for task in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(OSError), open(f"/proc/{pid}/task/{task}/children") as file:
                found += map(int, file.read().split())
    return found


def descendants(pid: int) -> list[int]:
    """Return the process ids below a process, parents first."""
    found = children(pid)
    for child in found:  # grows while it is read
        found += children(child)
    return found


def resident_bytes(pids: list[int]) -> int:
    """Return the memory that processes hold; what several share counts for each of them. Cheap."""
    pages = 0
    for pid in pids:
        with contextlib.suppress(OSError, IndexError), open(f"/proc/{pid}/statm") as file:
            pages += int(file.read().split()[1])
    return pages * _PAGE


def proportional_bytes(pids: list[int]) -> int:
    """Return the memory that processes hold, what they share divided among those who share it. Walks all pages.

    Where /proc does not tell (Linux before 4.14, some sandboxes), what a process shares counts in full.
    """
    total = 0
    for pid in pids:
        try:
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        except OSError:
            total += resident_bytes([pid])
        else:
            total += sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))
    return total


def stop_and_kill(pid: int) -> None:
    """Kill everything below a process that is alive now or appears while this looks.

    A process is stopped before its children are read: what is stopped forks no more. Only a whole look that finds
    nobody new ends the collecting, then all are killed.
    """
    stopped: set[int] = set()
    while new := _stop(pid, known=stopped):
        stopped |= new
    for number in stopped:
        _send(number, signal.SIGKILL)


def _stop(pid: int, *, known: set[int]) -> set[int]:
    new: set[int] = set()
    found = children(pid)
    for number in found:  # grows while it is read
        if number not in known:
            new.add(number)
            _send(number, signal.SIGSTOP)
        found += children(number)
    return new


def _send(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)
