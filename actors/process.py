"""What every actor process has: a log file of its own, its memory, and the line of code that a thread is at."""

import contextlib
import faulthandler
import logging
import os
import re
import socket
import sys
from collections.abc import Iterable
from pathlib import Path

import psutil

HOME = re.compile(r" on (\S+), process \d+$")
"""The node, in a log's first line."""


def log_path(folder: str, name: str) -> str:
    """Return the path of a lane's log."""
    return f"{folder}/{name.replace('/', '-')}.log"


def log_to_file(folder: str, name: str, *, environment: Iterable[str] = ()) -> None:
    """Redirect stdout, stderr, logging and crash traces of this process and its children to a lane's log.

    Args:
        environment: Names of the variables in `run.env`, for the log; their values may be secrets.
    """
    path = Path(log_path(folder, name))
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for stream in (1, 2):
        os.dup2(descriptor, stream)
    os.close(descriptor)
    faulthandler.enable()
    logging.basicConfig(
        level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s: %(message)s", force=True
    )
    logging.getLogger(__name__).info("%s on %s, process %d", name, socket.gethostname(), os.getpid())
    if names := ", ".join(environment):
        logging.getLogger(__name__).info("set by run.env: %s", names)


class MeasuredProcess:
    """An actor that reports the memory of its process."""

    def memory_mb(self) -> int:
        """Return the resident memory of this process and of those below it, in MiB."""
        own = psutil.Process()
        return resident_mb([own, *own.children(recursive=True)])


def resident_mb(processes: Iterable[psutil.Process]) -> int:
    """Add up the resident memory of processes, in MiB; pages that they share count for each."""
    total = 0
    for process in processes:
        with contextlib.suppress(psutil.Error):  # it has ended
            total += process.memory_info().rss
    return total >> 20


def position(thread: int) -> str:
    """Describe the call that a thread is in, and the line of this package that made it."""
    frame = sys._current_frames().get(thread)
    innermost = frame.f_code.co_name if frame else ""
    while frame is not None and not str(frame.f_globals.get("__name__")).startswith("areal_lite."):
        frame = frame.f_back
    return innermost + (f", {frame.f_globals['__name__']}:{frame.f_lineno}" if frame else "")
