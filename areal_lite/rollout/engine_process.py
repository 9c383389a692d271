"""How an engine's processes begin, and how they end with the rollout worker above them."""

import contextlib
import gc
import multiprocessing
import os
import stat
import threading
from multiprocessing.context import ForkProcess
from pathlib import Path


def begin_process() -> None:
    """Hasten the start of a process of an engine, and end it when its parent is killed: it would live for ever."""
    parent = multiprocessing.parent_process()
    if parent is None:
        return
    from tqdm import tqdm

    # tqdm's own lock is one between processes, which Python calls leaked where this one is killed (`VllmEngine.close`).
    tqdm.set_lock(threading.RLock())
    gc.freeze()  # what is imported stays: as it starts, vLLM has the collector look through all of it, time and again

    def watch() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, name="die-with-parent", daemon=True).start()


class ForkedProcess(ForkProcess):
    """A copy of this process, in which vLLM is imported already: worth 5 s of a processor.

    What another thread holds locked stays locked in the copy. The others are Ray's, and the copy uses nothing of Ray.
    """

    def run(self) -> None:
        """Begin the copy, and do what it is for."""
        _close_inherited_sockets()
        Path("/proc/self/comm").write_text(f"VLLM::{self.name}")  # vLLM's way fails where Ray has renamed the process
        begin_process()
        super().run()


def _close_inherited_sockets() -> None:
    """Close this copy's ends of its parent's connections: else nobody would see that the parent is gone."""
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        with contextlib.suppress(OSError):  # the list's own, which is closed by now
            if stat.S_ISSOCK(os.fstat(descriptor).st_mode):
                os.close(descriptor)
