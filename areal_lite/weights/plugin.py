"""Registers our transports with vLLM: `gloo`, and `nccl` in the place of its own.

vLLM calls `register` in every process it starts (entry point `vllm.general_plugins`), so that the
engine-core process knows them as well.
"""

import gc
import multiprocessing
import os
import threading

_CLASSES = {"gloo": "Gloo", "nccl": "Nccl"}
"""Transports, by the module in this folder, and how the names of their classes begin."""


def register() -> None:
    """Make `WeightTransferConfig(backend=...)` and the trainer's side known; calling it again is harmless."""
    from vllm.distributed.weight_transfer import factory

    for name, prefix in _CLASSES.items():
        for registry, class_name in (
            (factory.WeightTransferEngineFactory, f"{prefix}WeightTransferEngine"),
            (factory.WeightTransferTrainerFactory, f"{prefix}TrainerWeightTransferEngine"),
        ):
            registry._registry.pop(name, None)
            registry.register_engine(name, f"areal_lite.weights.{name}", class_name)
    _begin_engine_process()


def _begin_engine_process() -> None:
    """Hasten the start of an engine-core process, and end it when its parent is killed: it would live for ever."""
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
