"""What each process of an engine sets up first; vLLM calls it in all of them, through `weights/plugin.py`."""

import contextlib
import gc
import logging
import multiprocessing
import os
import tempfile
import threading
from collections.abc import Iterator

_ERRORS = "AREAL_LITE_ENGINE_ERRORS"
"""Names the file that the processes of an engine write their errors to."""
_REGISTRY = "vllm.model_executor.models.registry"
_LOGGERS = (_REGISTRY, "vllm.v1.engine.core", "vllm.v1.executor.multiproc_executor")
"""What logs the errors that end an engine."""
_SURVIVED = ("Invocation of", "Unexpected error pre-processing", "Error saving model info")
"""First words of vLLM's lines on an error that the engine survives, with all errors logged before it."""


class EngineErrors:
    """Errors that end an engine: vLLM logs them where they arise, and raises only that something failed."""

    def __init__(self) -> None:
        self._file = tempfile.TemporaryFile("r")  # noqa: SIM115  # without a name, so that nothing is left of it
        self._path = f"/proc/{os.getpid()}/fd/{self._file.fileno()}"
        self.environment = {_ERRORS: self._path}
        """For the processes of the engine."""

    @contextlib.contextmanager
    def gathered(self) -> Iterator[None]:
        """Keep errors that vLLM logs in this process, too."""
        keep = _ErrorsToFile(self._path)
        for name in _LOGGERS:
            logging.getLogger(name).addFilter(keep)
        try:
            yield
        finally:
            for name in _LOGGERS:
                logging.getLogger(name).removeFilter(keep)

    def clear(self) -> None:
        """Forget errors that the engine has survived."""
        os.ftruncate(self._file.fileno(), 0)

    def first(self) -> str:
        """Return the first error that the engine did not survive, in one line; empty if none was logged.

        An architecture that cannot be inspected counts only where nothing else failed: vLLM may have taken another.
        """
        self._file.seek(0)
        lines = [line.strip().partition(" ") for line in self._file]
        return min(lines, key=lambda line: line[0] == _REGISTRY, default=("", "", ""))[2]


class _ErrorsToFile(logging.Filter):
    """Not a handler: vLLM configures logging again while it starts, which removes those."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self._path = path

    def filter(self, record: logging.LogRecord) -> bool:
        if record.exc_info and (error := record.exc_info[1]) is not None:
            survived = record.msg.startswith(_SURVIVED)
            with contextlib.suppress(OSError), open(self._path, "w" if survived else "a") as file:
                file.write("" if survived else f"{record.name} {in_a_line(error)}\n")
        return True


def in_a_line(error: BaseException) -> str:
    """Return an error and its first cause; of one that quotes another process's traceback, that one's last line."""
    if "Traceback (most recent call last)" in str(error):
        return str(error).strip().splitlines()[-1]
    line, root = " ".join(f"{type(error).__name__}: {error}".split())[:500], error
    while root.__cause__ is not None:
        root = root.__cause__
    return line if root is error else f"{line}; caused by {in_a_line(root)}"


def set_up_engine_process() -> None:
    """End this process when its parent dies, and let it be killed without a warning; nothing in the parent itself."""
    parent = multiprocessing.parent_process()
    if parent is None:
        return
    if path := os.environ.get(_ERRORS):
        for name in _LOGGERS:
            logging.getLogger(name).addFilter(_ErrorsToFile(path))
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
