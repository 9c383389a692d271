"""The policy and value models: loading, sharding, and their outputs at completion positions.

Any causal language model of transformers will do; nothing here names an architecture.

Shape letters: `T` completion tokens of a micro-batch, `V` vocabulary.
"""

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import Concatenate, MergeModulelist, WeightConverter
from transformers.distributed import DistributedConfig
from transformers.modeling_layers import GradientCheckpointingLayer

from areal_lite.algo.logprobs import token_logprobs
from areal_lite.config.offline import OfflineConfig
from areal_lite.config.recipe import Config
from areal_lite.config.sections import LoraConfig, MeshConfig, TrainerConfig
from areal_lite.errors import CheckpointError, ConfigError
from areal_lite.train.chunked_logits import LazyLogits, Reading, read_in_chunks
from areal_lite.train.context_parallel import NAME, check_divisible, joined, own_part
from areal_lite.train.distributed import make_mesh
from areal_lite.train.expert_parallel import layers_of_experts, shard_experts
from areal_lite.train.lora import add_adapters
from areal_lite.train.micro_batch import MicroBatch, TokenRows, micro_batch
from areal_lite.train.tensor_parallel import check_plan, split_layers

Recipe = Config | OfflineConfig


def load_model(folder: str, config: Recipe, *, trained: bool = True) -> nn.Module:
    """Load a causal language model spread over the ranks, each of which reads its own part; collective.

    Args:
        config: The recipe: `run.device`, `model.compute_dtype`, `trainer`.
        trained: With float32 master weights, or with the adapters of `trainer.lora`, for which each rank reads the
            whole model into the host's memory; otherwise in the compute dtype alone, without gradients and adapters.
            The outputs are the same.

    Raises:
        CheckpointError: The folder lacks weights of the model, or has others.
        ConfigError: `trainer.packing`, and the model looks from one packed row into another; or as `attention_of`.
    """
    dtype = torch.float32 if trained else getattr(torch, config.compute_dtype)
    model = _load(AutoModelForCausalLM, folder, config, dtype=dtype, lora=config.trainer.lora if trained else None)
    if config.trainer.packing:
        _check_packing(model, torch.device(config.run.device), getattr(torch, config.compute_dtype))
    return model if trained else model.requires_grad_(False)


def load_value_model(folder: str, config: Recipe) -> nn.Module:
    """Load a model with a head that gives every token one number, 0 at the start; as `load_model`.

    The head is new even where the folder has one, which scores another task.
    """
    return _load(AutoModelForTokenClassification, folder, config, new_head=True, num_labels=1)


def load_reward_model(folder: str, config: Recipe, *, pad_token_id: int) -> nn.Module:
    """Load a model with a head that gives every sequence one score; as `load_model`.

    The score is 0 at the start, unless the folder is a reward model's, whose head is kept. The model's own `forward`
    reads it at the last token that is not padding, so the trained folder gives the same score in transformers.
    """
    architectures = AutoConfig.from_pretrained(folder).architectures or []
    new_head = not any("SequenceClassification" in name for name in architectures)
    kind = AutoModelForSequenceClassification
    return _load(kind, folder, config, new_head=new_head, num_labels=1, pad_token_id=pad_token_id)


def _load(
    kind: Any,
    folder: str,
    config: Recipe,
    *,
    dtype: torch.dtype = torch.float32,
    new_head: bool = False,
    lora: LoraConfig | None = None,
    **changes: Any,
) -> nn.Module:
    """Load without dropout: proximal and current policy must be the same function of the weights."""
    architecture = AutoConfig.from_pretrained(folder, **changes)
    for name, value in vars(architecture).items():
        if isinstance(value, float) and ("dropout" in name or name.endswith("pdrop")):
            setattr(architecture, name, 0.0)
    rope = getattr(architecture.get_text_config(), "rope_parameters", None) or {}
    if rope.get("rope_type") == "longrope" and config.model.max_context > rope["original_max_position_embeddings"]:
        # Long factors for every row, as in vLLM; transformers chooses by the longest row of a pass.
        rope["short_factor"] = rope["long_factor"]
    attention = attention_of(architecture, config.trainer)
    device = torch.device(config.run.device)
    num_parts = config.trainer.ranks // (config.trainer.mesh.replicate * config.trainer.mesh.tensor)

    def shard(model: Any, *_: object) -> nn.Module:
        # Tie before sharding: a tied tensor would otherwise be gathered once per name.
        model.tie_weights()
        if attention == NAME:
            check_divisible(model, config.trainer.mesh.context)
        return shard_model(model, config, device=device)

    def shard_empty(model: Any, *_: object) -> nn.Module:
        return shard(model) if lora is None and _reads_in_parts(model, num_parts) else model

    model_class: Any = type(empty_model(architecture, kind))
    # transformers calls this between building a model without storage and reading its weights, and then reads only what
    # the sharded parameters hold. Its own sharding knows fewer architectures and one precision.
    sharding = {"maybe_distribute_model": staticmethod(shard_empty), "__module__": model_class.__module__}
    sharding_class: Any = type(model_class.__name__, (model_class,), sharding)
    model, keys = sharding_class.from_pretrained(
        folder,
        config=architecture,
        dtype=dtype,
        attn_implementation=attention,
        distributed_config=DistributedConfig(),
        output_loading_info=True,
    )
    del model.config.distributed_config
    head = _value_head(model) if new_head else None
    _check_keys(model, keys, head=head, folder=folder)
    for parameter in () if head is None else head.parameters():
        nn.init.zeros_(parameter)
    if lora is not None:
        add_adapters(model, lora, base_dtype=getattr(torch, config.compute_dtype), seed=config.run.seed)
    if not isinstance(model, FSDPModule):
        model = shard(model)
    # Routers with jitter, and randomly skipped layers (LayerDrop), are random in training mode too.
    loaded: nn.Module = model.to("cpu" if config.trainer.offload else device).eval()
    if config.trainer.activation_checkpointing:
        model.gradient_checkpointing_enable()
        for layer in decoder_layers(loaded):
            layer.training = True  # transformers checkpoints no others; their own submodules stay as they are
    for module in loaded.modules():
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, buffer.to(device))
    return loaded


def empty_model(architecture: Any, kind: Any = AutoModelForCausalLM) -> Any:
    """Make a model without storage, of a transformers config and class."""
    with torch.device("meta"):
        return kind.from_config(architecture)


def _reads_in_parts(model: nn.Module, num_parts: int) -> bool:
    """Whether a rank can convert its own rows of the files' tensors to the model's parameters.

    It can where experts are stacked and each rank has some; not where projections are fused or split.
    """
    converters = [one for one in get_model_conversion_mapping(model) if isinstance(one, WeightConverter)]
    experts = [len(weight) for weight in model.parameters() if weight.dim() == 3]
    return not converters or (
        all(-(-count // num_parts) * (num_parts - 1) < count for count in experts)
        and all(
            isinstance(first, MergeModulelist) and all(isinstance(one, Concatenate) and one.dim > 0 for one in rest)
            for first, *rest in (one.operations for one in converters)
        )
    )


def _check_keys(model: nn.Module, keys: dict[str, set[str]], *, head: nn.Module | None, folder: str) -> None:
    """Raise if the folder lacks weights, or has some that the model lacks; a new head replaces another one."""
    missing, unexpected = keys["missing_keys"], keys["unexpected_keys"]
    if head is not None:
        new = {id(parameter) for parameter in head.parameters()}
        missing = missing - {name for name, parameter in model.named_parameters() if id(parameter) in new}
        unexpected = set()
    if missing or unexpected:
        raise CheckpointError(
            f"{folder} must hold the weights that its config.json describes ({type(model).__name__}), got "
            f"{len(missing)} missing ({sorted(missing)[:5]}) and {len(unexpected)} unknown ({sorted(unexpected)[:5]}). "
            "Fix: set the path to the whole folder of one model"
        )


def attention_of(architecture: Any, settings: TrainerConfig) -> str | None:
    """Return the attention that a model is loaded with; None = transformers' default.

    Raises:
        ConfigError: `trainer.attention=sdpa`, and the model caps its attention logits.
    """
    caps = getattr(architecture, "attn_logit_softcapping", None)
    if settings.attention == "sdpa" and caps:
        raise ConfigError(
            f"trainer.attention=sdpa does not cap attention logits, but the model ({architecture.model_type}) does. "
            "Fix: set trainer.attention=eager, or auto"
        )
    if settings.mesh.context > 1:
        return NAME
    if settings.attention == "auto":
        # transformers would choose sdpa, which ignores the capping of logits without a warning.
        return "eager" if caps else None
    return settings.attention


def check_mesh(model: nn.Module, mesh: MeshConfig) -> None:
    """Check that a model, which may be on the meta device, can be split over the ranks of a mesh.

    Raises:
        ConfigError: It cannot.
    """
    if mesh.tensor > 1:
        check_plan(model, mesh.tensor)
    if mesh.context > 1:
        check_divisible(model, mesh.context)
    if mesh.expert > 1:
        layers_of_experts(model, mesh.expert)


def shard_model(model: nn.Module, config: Recipe, *, device: torch.device) -> nn.Module:
    """Shard the model over the ranks with FSDP2, in place: a unit per decoder layer, one for the rest.

    A single float32 rank is left alone, as it has nothing to shard or cast: the hooks cost 4 % of a step of the
    built-in model in micro-batches of 2560 tokens, 7 % in micro-batches of 1280.

    Args:
        model: The same on all ranks, or on the meta device.
        config: The recipe; the ranks' process group exists, unless there is one float32 rank without offload. The
            compute dtype is that of the matrix work; master weights and gradient sums stay float32.
        device: The rank's device.
    """
    settings, compute_dtype = config.trainer, getattr(torch, config.compute_dtype)
    if settings.ranks == 1 and compute_dtype == torch.float32 and not settings.offload:
        return model
    copies, tensor = settings.mesh.replicate, settings.mesh.tensor
    sizes = {"replicate": copies, "shard": settings.ranks // (copies * tensor), "tensor": tensor}
    sizes = {name: size for name, size in sizes.items() if size > 1 or name == "shard"}
    mesh = make_mesh(device.type, sizes)
    if tensor > 1:
        split_layers(model, mesh["tensor"])
        mesh = mesh[tuple(sizes)[:-1]]
    offload = CPUOffloadPolicy(pin_memory=device.type == "cuda") if settings.offload else OffloadPolicy()
    policy = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32)
    # One CPU rank keeps its cast weights from the forward to the backward pass: 13 % less time for 2 bytes a parameter.
    reshard = None if settings.ranks > 1 or device.type != "cpu" else False
    options: dict[str, Any] = {"mp_policy": policy, "offload_policy": offload}
    if settings.mesh.expert > 1:
        shard_experts(model, settings, device=device.type, **options)
    options["mesh"] = mesh
    for module in (*decoder_layers(model), model):
        fully_shard(module, reshard_after_forward=reshard, **options)
    return model


def decoder_layers(model: nn.Module) -> list[nn.Module]:
    """Return the layers that transformers can checkpoint, which are sharded and gathered one at a time."""
    return [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]


def completion_outputs(model: nn.Module, batch: MicroBatch, read: Reading, *aligned_T: Tensor) -> Tensor:
    """Run the model and read numbers off the logits, or the values, at the places that predict completion tokens.

    One hook selects these places before the output layer, and another reads the logits at the end of the model's own
    `forward`, which must run: FSDP is attached to it, and some models scale their logits there.

    Args:
        batch: One micro-batch with T completion tokens.
        read: From [t, V] logits in the compute dtype, of some of the tokens, and their part of `aligned_T`, to one or
            several numbers per token.

    Returns:
        What `read` returns for all T tokens. No matrix has more logits than a chunk.
    """
    causal_lm: Any = model
    output_layer = causal_lm.get_output_embeddings() or _value_head(model)
    arguments, predictors, mine = own_part(batch)
    if mine is not None:
        aligned_T = tuple(aligned.index_select(0, mine) for aligned in aligned_T)

    def choose(_layer: nn.Module, inputs: tuple[Tensor]) -> Tensor:
        hidden = inputs[0].flatten(0, 1).index_select(0, predictors).unsqueeze(0)
        return LazyLogits(hidden, lambda chunk: chunk)

    def finish(_model: nn.Module, _inputs: Any, output: Any) -> None:
        output.logits = read_in_chunks(output.logits, read, *aligned_T)

    # Before FSDP's own hook, after which the weights are no longer whole.
    hooks = [output_layer.register_forward_pre_hook(choose), model.register_forward_hook(finish, prepend=True)]
    try:
        result: Tensor = model(**arguments, use_cache=False).logits
    finally:
        for hook in hooks:
            hook.remove()
    return result if mine is None else joined(result, mine, len(batch.predictors_T))


@torch.no_grad()
def _check_packing(model: nn.Module, device: torch.device, dtype: torch.dtype) -> None:
    """Raise if a packed row's outputs depend on the row before it, as in models that build masks of their own."""
    architecture: Any = model.config
    refused = "chunked_attention" in (getattr(architecture.get_text_config(), "layer_types", None) or ())
    if not refused:
        pairs = [TokenRows([(first, [0]), ([1, 2], [3, 0])]) for first in ([1, 2, 3], [3, 3, 1])]
        batches = [micro_batch(rows, range(2), device=device, packed=True) for rows in pairs]
        one, other = (completion_outputs(model, batch, lambda logits: logits.float())[1:] for batch in batches)
        reshard(model)
        refused = bool((one - other).abs().max() > max(1e-4, 8 * torch.finfo(dtype).eps) * one.abs().max())
    if refused:
        raise ConfigError(
            "trainer.packing needs a model whose attention stays within a row, where positions restart, got "
            f"{type(model).__name__}, whose attention sees the row before, or is cut by places in the pass. "
            "Fix: set trainer.packing=false"
        )


def completion_logprobs(model: nn.Module, batch: MicroBatch, *, temperature: float = 1.0) -> Tensor:
    """Run the language model and return the log-probability of each completion token, [T] float32 nats."""
    return completion_outputs(model, batch, partial(token_logprobs, temperature=temperature), batch.token_ids_T)


def completion_values(model: nn.Module, batch: MicroBatch) -> Tensor:
    """Run the value model and return the value of the state before each completion token.

    Args:
        batch: One micro-batch with T completion tokens.

    Returns:
        [T] float32 values in units of return.
    """
    own_routes = replace(batch, routes_RSLK=None)  # a sample's routes are the policy's
    return completion_outputs(model, own_routes, lambda values: values.squeeze(1).float())


def _value_head(model: nn.Module) -> nn.Linear:
    """Return the last layer with one output: architectures give it different names."""
    return [module for module in model.modules() if isinstance(module, nn.Linear) and module.out_features == 1][-1]


def reshard(model: nn.Module) -> None:
    """Free the gathered parameters after a forward pass that no backward pass follows.

    Otherwise `model.parameters()` would be whole tensors in the compute dtype instead of float32 shards.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
