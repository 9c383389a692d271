"""The policy and value models: loading, sharding, and their outputs at completion positions. Called by the trainer.

Any causal language model of transformers will do; nothing here names an architecture.

Shape letters: `T` completion tokens of a micro-batch, `V` vocabulary.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)
from transformers.modeling_layers import GradientCheckpointingLayer

from areal_lite.train.micro_batch import MicroBatch

__all__ = [
    "completion_logits",
    "completion_values",
    "load_model",
    "load_reward_model",
    "load_value_model",
    "reshard",
    "shard_model",
]


def load_model(folder: str, *, device: torch.device, activation_checkpointing: bool) -> nn.Module:
    """Load a Hugging Face folder in float32, the dtype of the master weights.

    Args:
        folder: The model's folder.
        device: Where the whole model goes; every rank holds all of it for a moment, before it is sharded.
        activation_checkpointing: Keep only each layer's input, and compute the rest again in the backward pass.
    """
    return _load(AutoModelForCausalLM, folder, device=device, activation_checkpointing=activation_checkpointing)


def load_value_model(folder: str, *, device: torch.device, activation_checkpointing: bool) -> nn.Module:
    """Load a Hugging Face folder in float32 with a head that gives every token one number, 0 at the start.

    The head is new even where the folder has one: a value is not the score of another task.

    Args:
        folder: A causal language model or a reward model; only its body is used.
        device: As in `load_model`.
        activation_checkpointing: As in `load_model`.
    """
    model = _load(
        AutoModelForTokenClassification,
        folder,
        device=device,
        activation_checkpointing=activation_checkpointing,
        num_labels=1,
    )
    head = _value_head(model)
    for parameter in head.parameters():
        nn.init.zeros_(parameter)
    return model


def load_reward_model(
    folder: str, *, device: torch.device, activation_checkpointing: bool, pad_token_id: int
) -> nn.Module:
    """Load a Hugging Face folder in float32 with a head that gives every sequence one score, 0 at the start.

    The score is read at the last token that is not padding, by the model's own `forward`: whoever loads the trained
    folder with transformers gets the same.

    Args:
        folder: A causal language model, or a reward model, whose head is kept.
        device: As in `load_model`.
        activation_checkpointing: As in `load_model`.
        pad_token_id: What shorter sequences of a batch are filled up with.
    """
    architectures = AutoConfig.from_pretrained(folder).architectures or []
    model = _load(
        AutoModelForSequenceClassification,
        folder,
        device=device,
        activation_checkpointing=activation_checkpointing,
        num_labels=1,
        pad_token_id=pad_token_id,
    )
    if not any("SequenceClassification" in name for name in architectures):
        for parameter in _value_head(model).parameters():
            nn.init.zeros_(parameter)
    return model


def _load(kind: Any, folder: str, *, device: torch.device, activation_checkpointing: bool, **changes: Any) -> nn.Module:
    config = AutoConfig.from_pretrained(folder, **changes)
    _switch_dropout_off(config)
    model: Any = kind.from_pretrained(folder, config=config, dtype=torch.float32)
    for module in model.modules():
        # Heads have rates of their own, which no config need name.
        if isinstance(module, nn.Dropout):
            module.p = 0.0
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

    Args:
        model: From `load_model`.
        batch: One micro-batch with T completion tokens.

    Returns:
        [T, V] logits in the compute dtype.
    """
    causal_lm: Any = model
    return _at_predictors(model, causal_lm.get_output_embeddings(), batch)


def completion_values(model: nn.Module, batch: MicroBatch) -> Tensor:
    """Run the value model and return the value of the state before each completion token.

    Args:
        model: From `load_value_model`.
        batch: One micro-batch with T completion tokens.

    Returns:
        [T] float32 values in units of return.
    """
    return _at_predictors(model, _value_head(model), batch).squeeze(1).float()


def _at_predictors(model: nn.Module, output_layer: nn.Module, batch: MicroBatch) -> Tensor:
    """Return the outputs at the places that predict the completion tokens, [T, outputs].

    The positions are chosen in front of the output layer, which for a large vocabulary is most of the memory. A hook
    does it, because the model's own `forward` must run: FSDP hangs on it, and some models scale their logits there.
    """

    def choose(_layer: nn.Module, inputs: tuple[Tensor]) -> Tensor:
        return inputs[0].flatten(0, 1).index_select(0, batch.predictors_T).unsqueeze(0)

    hook = output_layer.register_forward_pre_hook(choose)
    try:
        logits: Tensor = model(input_ids=batch.input_ids_RS, use_cache=False).logits
    finally:
        hook.remove()
    return logits.squeeze(0)


def _value_head(model: nn.Module) -> nn.Linear:
    """Return the last layer with one output: architectures give it different names."""
    return [module for module in model.modules() if isinstance(module, nn.Linear) and module.out_features == 1][-1]


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
