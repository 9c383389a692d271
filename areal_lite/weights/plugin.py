"""Registers our transports with vLLM: `gloo`, and `nccl` in place of its own.

vLLM calls `register` in every process that it starts (entry point `vllm.general_plugins`), the engine core included.
"""

from areal_lite.rollout.engine_process import set_up_engine_process

_CLASSES = {"gloo": "GlooWeightTransferEngine", "nccl": "NcclWeightTransferEngine"}
"""The engines' sides of the transports, by module in this folder."""


def register() -> None:
    """Make `WeightTransferConfig(backend=...)` known; calling it again is harmless."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    for name, class_name in _CLASSES.items():
        WeightTransferEngineFactory._registry.pop(name, None)
        WeightTransferEngineFactory.register_engine(name, f"areal_lite.weights.{name}", class_name)
    set_up_engine_process()
