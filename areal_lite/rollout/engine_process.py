"""What each process of an engine sets up first; vLLM calls it in all of them, through `weights/plugin.py`."""

import gc
import multiprocessing
import os
import threading


def set_up_engine_process() -> None:
    """End this process when its parent dies, and let it be killed without a warning; nothing in the parent itself."""
    parent = multiprocessing.parent_process()
    if parent is None:
        return
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
