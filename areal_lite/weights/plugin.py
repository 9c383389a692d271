"""Registers our transports with vLLM: `gloo`, and `nccl` in the place of its own.

vLLM calls `register` in every process it starts (entry point `vllm.general_plugins`), so that the
engine-core process knows them as well.
"""

from areal_lite.rollout.engine_process import set_up_engine_process

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
    set_up_engine_process()
