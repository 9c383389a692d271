"""The policy and value models: loading, sharding, and their outputs at completion positions.

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

from areal_lite.config.offline import OfflineConfig
from areal_lite.config.recipe import Config
from areal_lite.config.sections import LoraConfig
from areal_lite.train.lora import add_adapters
from areal_lite.train.micro_batch import MicroBatch

Recipe = Config | OfflineConfig


def load_model(folder: str, config: Recipe, *, world_size: int, lora: LoraConfig | None = None) -> nn.Module:
    """Load a causal language model, the master weights in float32, and spread it over the ranks; collective.

    Args:
        config: The recipe: `run.device`, `model.compute_dtype`, `trainer.activation_checkpointing`.
        world_size: Trainer ranks; each holds the whole model for a moment, before it is sharded.
        lora: The adapters to train in the place of its weights, which are then in the compute dtype; None = none.
    """
    model = _load(AutoModelForCausalLM, folder, config)
    if lora is not None:
        add_adapters(model, lora, base_dtype=getattr(torch, config.compute_dtype), seed=config.run.seed)
    return _sharded(model, config, world_size)


def load_value_model(folder: str, config: Recipe, *, world_size: int) -> nn.Module:
    """Load a model with a head that gives every token one number, 0 at the start; as `load_model`.

    The head is new even where the folder has one: a value is not the score of another task.
    """
    model = _load(AutoModelForTokenClassification, folder, config, num_labels=1)
    _set_to_zero(_value_head(model))
    return _sharded(model, config, world_size)


def load_reward_model(folder: str, config: Recipe, *, world_size: int, pad_token_id: int) -> nn.Module:
    """Load a model with a head that gives every sequence one score; as `load_model`.

    The score is 0 at the start, unless the folder is a reward model's, whose head is kept. It is read at the last token
    that is not padding, by the model's own `forward`: whoever loads the trained folder with transformers gets the same.
    """
    architectures = AutoConfig.from_pretrained(folder).architectures or []
    model = _load(AutoModelForSequenceClassification, folder, config, num_labels=1, pad_token_id=pad_token_id)
    if not any("SequenceClassification" in name for name in architectures):
        _set_to_zero(_value_head(model))
    return _sharded(model, config, world_size)


def _load(kind: Any, folder: str, config: Recipe, **changes: Any) -> nn.Module:
    """Load without dropout: proximal and current policy must be the same function of the weights."""
    architecture = AutoConfig.from_pretrained(folder, **changes)
    for name, value in vars(architecture).items():
        if isinstance(value, float) and ("dropout" in name or name.endswith("pdrop")):
            setattr(architecture, name, 0.0)
    attention: str | None = config.trainer.attention
    if attention == "auto":
        # Of itself transformers takes sdpa, which leaves capped logits uncapped, and says nothing.
        attention = "eager" if getattr(architecture, "attn_logit_softcapping", None) else None
    model: Any = kind.from_pretrained(folder, config=architecture, dtype=torch.float32, attn_implementation=attention)
    for module in model.modules():
        # Heads have rates of their own, which no config need name.
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    if config.trainer.activation_checkpointing:
        model.gradient_checkpointing_enable()
    trained: nn.Module = model.to(torch.device(config.run.device)).train()
    return trained


def _set_to_zero(head: nn.Module) -> None:
    for parameter in head.parameters():
        nn.init.zeros_(parameter)


def _sharded(model: nn.Module, config: Recipe, world_size: int) -> nn.Module:
    dtype = getattr(torch, config.compute_dtype)
    return shard_model(model, world_size=world_size, device=torch.device(config.run.device), compute_dtype=dtype)


def shard_model(model: nn.Module, *, world_size: int, device: torch.device, compute_dtype: torch.dtype) -> nn.Module:
    """Spread the model over the ranks with FSDP2, in place: a unit per decoder layer, one for the rest.

    A single float32 rank has nothing to spread and nothing to cast, and is left alone: the hooks cost 4 % of a step
    of the built-in model in micro-batches of 2560 tokens, 7 % in micro-batches of 1280.

    Args:
        model: In float32, alike on all ranks.
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
        batch: One micro-batch with T completion tokens.

    Returns:
        [T, V] logits in the compute dtype.
    """
    causal_lm: Any = model
    return _at_predictors(model, causal_lm.get_output_embeddings(), batch)


def completion_values(model: nn.Module, batch: MicroBatch) -> Tensor:
    """Run the value model and return the value of the state before each completion token.

    Args:
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
