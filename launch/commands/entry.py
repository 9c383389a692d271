"""The `areal-lite` command: Ctrl-C and SIGTERM end it with code 130 from its first moment on.

This module imports next to nothing, as importing the commands takes a second. A run replaces the handlers once it has
something to save.
"""

import os
import signal
import sys
import threading
from typing import Any


def main() -> int:
    """Run the command line; returns the exit code."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _exit_now)
    from areal_lite.launch.commands.main import main as run
    from areal_lite.launch.run.signals import LEAVING

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
    try:
        code = run()
    except KeyboardInterrupt:  # the second one, while the first one ended the command
        code = 130
    if any(thread.name == LEAVING for thread in threading.enumerate()):
        sys.stdout.flush()
        os._exit(code)
    return code


def _exit_now(number: int, frame: Any) -> None:
    """Exit without clean-up: nothing has been started, and an exception may get lost inside an import."""
    os.write(2, b"stopped\n")
    os._exit(130)
