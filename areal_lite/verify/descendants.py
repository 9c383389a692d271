"""Processes below a process, as listed in /proc: their ids, their memory, and how to end them all.

psutil would read every process of the machine for each look, twenty times a second for each verifier; the kernel's
list of a thread's children costs a hundredth of that, and misses none that is stopped.
"""

import contextlib
import ctypes
import os
import signal
import time
from collections.abc import Callable, Iterable
from pathlib import Path

_PAGE = os.sysconf("SC_PAGE_SIZE")
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_EMPTY_LOOKS = 3
"""One may miss a process whose parent ends during it, and which only then becomes a child of this one."""


def adopt_orphans() -> None:
    """Become the parent of every descendant whose own parent ends."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent(parent_pid: int, number: signal.Signals) -> None:
    """Have the kernel send this process a signal when its parent ends, even while C code holds the interpreter."""
    _prctl(_PR_SET_PDEATHSIG, number)
    if os.getppid() != parent_pid:
        raise RuntimeError("the parent ended before its verifier process was ready")


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None).prctl(option, value)


def children(pid: int) -> list[int]:
    """Return the process ids right below a process; none where /proc does not list them."""
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

    Where /proc does not have it (Linux before 4.14, some sandboxes), what a process shares counts in full.
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


def held_above(limit_bytes: float, pids: list[int]) -> int:
    """Return the memory that processes hold where that is more than the limit, else 0; mostly cheap."""
    held = proportional_bytes(pids) if resident_bytes(pids) > limit_bytes else 0
    return held if held > limit_bytes else 0


def kill_trees(roots: Callable[[], Iterable[int]]) -> set[int]:
    """Kill processes and everything below them that is alive now or appears while this looks; returns their ids.

    A process is stopped before its children are read: what is stopped forks no more. Only a whole look, with
    the roots read again, that finds no new process ends the collecting; then all are killed.
    """
    stopped: set[int] = set()
    while True:
        found = list(roots())
        for number in found:  # grows while it is read
            if number not in stopped:
                _send(number, signal.SIGSTOP)
            found += children(number)
        if stopped.issuperset(found):
            break
        stopped.update(found)
    for number in stopped:
        _send(number, signal.SIGKILL)
    return stopped


def end_descendants(*, spare: Callable[[int], bool] = lambda _: False) -> None:
    """Kill all below this process, adopted orphans too, until only children to spare are left, and all below them."""
    num_empty_looks = 0
    while num_empty_looks < _EMPTY_LOOKS:
        killed = kill_trees(lambda: [child for child in children(os.getpid()) if not spare(child)])
        for pid in killed:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
        num_empty_looks = 0 if killed else num_empty_looks + 1
        time.sleep(0.001)


def _send(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)
