"""The policy model: loading, sharding, and logits at completion positions. Called by the trainer.

Any causal language model of transformers will do; nothing here names an architecture.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_layers import GradientCheckpointingLayer

from areal_lite.train.micro_batch import MicroBatch

__all__ = ["completion_logits", "load_model", "reshard", "shard_model"]


def load_model(folder: str, *, device: torch.device, activation_checkpointing: bool) -> nn.Module:
    """Load a Hugging Face folder in float32, the dtype of the master weights.

    Args:
        folder: The model's folder.
        device: Where the whole model goes; every rank holds all of it for a moment, before it is sharded.
        activation_checkpointing: Keep only each layer's input, and compute the rest again in the backward pass.
    """
    config = AutoConfig.from_pretrained(folder)
    _switch_dropout_off(config)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, config=config, dtype=torch.float32)
    if activation_checkpointing:
        model.gradient_checkpointing_enable()
    trained: nn.Module = model.to(device).train()
    return trained


def shard_model(model: nn.Module, *, world_size: int, device: torch.device, compute_dtype: torch.dtype) -> nn.Module:
    """Spread the model over the ranks with FSDP2, in place: a unit per decoder layer, one for the rest.

    A single float32 rank has nothing to spread and nothing to cast, and is left alone: the hooks cost 4 % of a step
    of the built-in model in micro-batches of 2560 tokens, 7 % in micro-batches of 1280.

    Args:
        model: From `load_model`, alike on all ranks.
        world_size: Trainer ranks; their process group exists, unless it is one float32 rank.
        device: The rank's device.
        compute_dtype: Of the matrix work; master weights and gradient sums stay float32.
    """
    if world_size == 1 and compute_dtype == torch.float32:
        return model
    mesh = init_device_mesh(device.type, (world_size,))
    policy = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32)
    for module in model.modules():
        if isinstance(module, GradientCheckpointingLayer):
            fully_shard(module, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    return model


def completion_logits(model: nn.Module, batch: MicroBatch) -> Tensor:
    """Run the model and return the logits that predict the completion tokens, prompt and padding left out.

    The positions are chosen in front of the output layer, which for a large vocabulary is most of the memory. A hook
    does it, because the model's own `forward` must run: FSDP hangs on it, and some models scale their logits there.

    Args:
        model: From `load_model`.
        batch: One micro-batch with T completion tokens.

    Returns:
        [T, V] logits in the compute dtype.
    """

    def choose(_layer: nn.Module, inputs: tuple[Tensor]) -> Tensor:
        return inputs[0].flatten(0, 1).index_select(0, batch.predictors_T).unsqueeze(0)

    causal_lm: Any = model
    hook = causal_lm.get_output_embeddings().register_forward_pre_hook(choose)
    try:
        logits: Tensor = causal_lm(input_ids=batch.input_ids_RS, use_cache=False).logits
    finally:
        hook.remove()
    return logits.squeeze(0)


def reshard(model: nn.Module) -> None:
    """Drop the gathered parameters that a forward pass leaves behind when no backward pass follows it.

    Otherwise `model.parameters()` would be whole tensors in the compute dtype, not the float32 shards, until the next
    backward pass.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def _switch_dropout_off(config: Any) -> None:
    """Set every dropout rate to 0: proximal and current policy must be the same function of the weights."""
    for name, value in vars(config).items():
        if isinstance(value, float) and ("dropout" in name or name.endswith("pdrop")):
            setattr(config, name, 0.0)
