"""What each process of an engine sets up first; vLLM calls it in all of them, through `weights/plugin.py`."""

import contextlib
import gc
import logging
import multiprocessing
import os
import tempfile
import threading

_ERRORS = "AREAL_LITE_ENGINE_ERRORS"
"""Names the file that the processes of an engine write their errors to."""


class EngineErrors:
    """Errors that end an engine's processes: vLLM logs them there, and its owner learns only that a process ended."""

    def __init__(self) -> None:
        self._file = tempfile.TemporaryFile("r")  # noqa: SIM115  # without a name, so that nothing is left of it
        self.environment = {_ERRORS: f"/proc/{os.getpid()}/fd/{self._file.fileno()}"}
        """For the processes of the engine."""

    def first(self) -> str:
        """Return the first error in one line; empty if none was logged."""
        self._file.seek(0)
        return self._file.readline().strip()


class _ErrorsToOwner(logging.Handler):
    def __init__(self, path: str) -> None:
        super().__init__(logging.ERROR)
        self._path = path

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        while error is not None and (cause := error.__cause__) is not None:
            error = cause
        if error is not None:
            line = " ".join(f"{type(error).__name__}: {error}".split())
            with contextlib.suppress(OSError), open(self._path, "a") as file:
                file.write(f"{line:.500}\n")


def set_up_engine_process() -> None:
    """End this process when its parent dies, and let it be killed without a warning; nothing in the parent itself."""
    parent = multiprocessing.parent_process()
    if parent is None:
        return
    if path := os.environ.get(_ERRORS):
        logging.getLogger("vllm").addHandler(_ErrorsToOwner(path))
    from tqdm import tqdm

    # tqdm's default lock is a semaphore shared between processes. Python reports it as leaked when this process is
    # killed, as `VllmEngine.close` does on a CPU.
    tqdm.set_lock(threading.RLock())
    # vLLM runs the garbage collector several times while it starts. Imported modules never become garbage; skipping
    # them saves a second of CPU time.
    gc.freeze()

    def watch() -> None:
        parent.join()
        os._exit(1)

    # Without it, an engine whose parent is killed would run forever.
    threading.Thread(target=watch, name="exit-with-parent", daemon=True).start()
