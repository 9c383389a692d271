"""Registers the gloo transport with vLLM.

vLLM calls `register` in every process it starts (entry point `vllm.general_plugins`), so that the
engine-core process knows the transport as well.
"""

import multiprocessing
import os
import threading

__all__ = ["register"]

_NAME = "gloo"
_MODULE = "areal_lite.weights.gloo"


def register() -> None:
    """Make `WeightTransferConfig(backend="gloo")` and its trainer side known; calling it again is harmless."""
    from vllm.distributed.weight_transfer import factory

    for registry, class_name in (
        (factory.WeightTransferEngineFactory, "GlooWeightTransferEngine"),
        (factory.WeightTransferTrainerFactory, "GlooTrainerWeightTransferEngine"),
    ):
        if _NAME not in registry._registry:
            registry.register_engine(_NAME, _MODULE, class_name)
    _die_with_parent()


def _die_with_parent() -> None:
    """End an engine-core process whose parent was killed; by itself it would live for ever."""
    parent = multiprocessing.parent_process()
    if parent is None:
        return

    def watch() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, name="die-with-parent", daemon=True).start()
