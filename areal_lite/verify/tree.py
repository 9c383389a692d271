"""Processes below a process, as /proc tells: who they are, what memory they take, and how to end them all."""

import contextlib
import os
import signal
from pathlib import Path

__all__ = ["children", "descendants", "proportional_bytes", "resident_bytes", "stop_and_kill"]

_PAGE = os.sysconf("SC_PAGE_SIZE")


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
    """Return the memory that processes hold, what they share divided among those who share it. Walks all pages."""
    total = 0
    for pid in pids:
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
                if line.startswith("Pss:"):
                    total += int(line.split()[1]) * 1024
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
