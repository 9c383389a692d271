"""Registers our transports with vLLM: `gloo`, and `nccl` in place of its own.

vLLM calls `register` in every process that it starts (entry point `vllm.general_plugins`), the engine core included.
"""

from areal_lite.rollout.engine_process import set_up_engine_process

_CLASSES = {"gloo": "Gloo", "nccl": "Nccl"}
"""Transports by module in this folder, with the prefix of their class names."""


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
