"""What every actor process does first: send its output to a file of its own."""

import faulthandler
import logging
import os
import sys
from pathlib import Path

__all__ = ["log_path", "log_to_file"]


def log_path(folder: str, name: str) -> str:
    """Return the path of a lane's log."""
    return f"{folder}/{name.replace('/', '-')}.log"


def log_to_file(folder: str, name: str) -> None:
    """Send stdout, stderr, logging and crash traces of this process and its children to a lane's log."""
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
