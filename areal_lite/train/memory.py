"""Estimate the memory of a recipe's trainer ranks and engines, and their peak speed; without weights or a GPU.

Arithmetic on the sizes in a model's config.json, and on the shapes of its parameters, which get no storage. The
coefficients of activations were read off torch's memory tracker, run on the trainer's own update with models of 0.5B to
70B parameters; its figures are golden values of the tests. `areal-lite estimate` prints the results.
"""

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig

from areal_lite.config.recipe import Config
from areal_lite.config.suggestion import suggestion
from areal_lite.data.demonstrations import alphabet
from areal_lite.data.tokenizer import build_char_tokenizer
from areal_lite.errors import ConfigError
from areal_lite.train.chunked_logits import CHUNK_ELEMENTS
from areal_lite.train.lora import add_adapters
from areal_lite.train.model import check_mesh, decoder_layers, empty_model
from areal_lite.train.score import needs_proximal_first
from areal_lite.train.warm_start import build_model

KNOWN: Mapping[str, Any] = json.loads((Path(__file__).parent / "known.json").read_text())
"""`models`: the part of a published config.json that decides sizes. `gpus`: GiB that torch sees, TFLOP/s of dense
bfloat16 matrices, TB/s of memory."""
_MARGIN = 1.08
"""Activations count as this much more than their tensors, as allocators leave gaps: a choice, not a measurement."""
_HANDOVER_BUFFERS = 2 * 256 * 2**20
"""Of weights/nccl.py, on both sides: one chunk on its way, and one that is packed or loaded."""
_NUM_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
"""What model families call the number of experts of a layer."""
_BATCHED_TOKENS = 8192
"""Of one forward pass of vLLM, about."""
_RANK_PROCESS, _ENGINE_PROCESS = 0.3 * 2**30, 1.0 * 2**30
"""A process with torch, and the two of an engine with vLLM, before they hold a model; measured on a CPU."""
_OTHER_PROCESSES, _VERIFIER_PROCESS = 0.45 * 2**30, 0.1 * 2**30
"""Ray's own, controller and queue together, and a verifier worker; measured on a CPU."""
_ENGINE_COPIES = 3
"""Copies of the weights in a CPU engine beside those in use and those received: prepared ones, and those being loaded.
A fit to the peaks of one model (134.5 M numbers, float32, resident)."""


def architecture_of(config: Config, *, of_reference: bool = False) -> Any:
    """Return the transformers config of the recipe's model: built in, known by name, of a folder, or downloaded before.

    Or of its reference model, where the recipe names one.

    A name with a suffix, such as `-Instruct` or `-Base`, is a known model trained further, of the same sizes.

    Raises:
        ConfigError: It is none of them.
    """
    path, option = config.model.path, "model.path"
    if of_reference:
        path, option = str(config.objective.reference_path), "objective.reference_path"
    if path == "builtin:arith":
        return build_model(config, build_char_tokenizer(alphabet(config))).config
    if known := max((name for name in KNOWN["models"] if f"{path}-".startswith(f"{name}-")), key=len, default=None):
        return AutoConfig.for_model(**KNOWN["models"][known], max_position_embeddings=config.model.max_context)
    try:
        return AutoConfig.from_pretrained(path, local_files_only=True)
    except OSError as error:
        raise ConfigError(
            f"{option} must be a folder with config.json, the hub id of a model downloaded before, or one of "
            f"{', '.join(KNOWN['models'])}, got {path}{suggestion(path, KNOWN['models'])} (weights are not needed)"
        ) from error


def known_gpu(name: str) -> Mapping[str, float]:
    """Return a GPU's `gib`, `tflops` and `tb_per_s`, as of `KNOWN`.

    Raises:
        ConfigError: It is unknown.
    """
    known = KNOWN["gpus"]
    if name not in known:
        raise ConfigError(f"--gpu must be one of {', '.join(known)}, got {name}. Fix: choose one with as much memory")
    card: Mapping[str, float] = known[name]
    return card


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSize:
    """The sizes of a model, and the memory of a trainer rank at the peak of an update."""

    num_parameters: int
    num_active: int
    """Parameters that work on a token: of experts only those chosen, no input embeddings."""
    largest_parameter: int
    """Numbers in the largest one."""
    layer_parameters: int
    """Numbers in a decoder layer, which is gathered at once."""
    outer_parameters: int
    """Numbers outside of the layers, gathered at once too."""
    parts: Mapping[str, float]
    """Bytes by what they are for."""
    host: float = 0.0
    """Bytes that wait in the host's memory instead (`trainer.offload`)."""

    @property
    def peak(self) -> float:
        """Bytes, all together."""
        return sum(self.parts.values())


def rank_size(architecture: Any, config: Config) -> RankSize:
    """Estimate a trainer rank's memory at the peak of an update whose micro-batches are full.

    A rank keeps its shard of float32 weights, gradients and two moments. FSDP2 gathers what is outside of the layers
    and two layers, one of them ahead, in the compute dtype; the gradient of a layer is on its way in float32.
    A critic counts as large as the policy.

    Example: Qwen2.5-7B, 7.62 billion numbers on 8 ranks, keeps 4 x 7.62 / 8 GB = 3.55 GiB of weights; with 1.09
    billion numbers outside of layers of 0.233 billion, 2 x (1.09 + 2 x 0.233) GB = 2.90 GiB more are gathered.

    Args:
        architecture: As of `architecture_of`.

    Raises:
        ConfigError: It cannot be split over `trainer.mesh`.
    """
    trainer, objective, itemsize = config.trainer, config.objective, itemsize_of(config)
    model = empty_model(architecture)
    check_mesh(model, trainer.mesh)
    numbers, has_query_norm = num_parameters(model), any(".q_norm." in name for name, _ in model.named_parameters())
    num_layers = architecture.num_hidden_layers
    in_layers = sum(weight.numel() for one in decoder_layers(model) for weight in one.parameters())
    layer = in_layers // num_layers
    outer = numbers["all"] - layer * num_layers
    ranks, tensor = trainer.ranks / trainer.mesh.replicate, trainer.mesh.tensor
    elsewhere = numbers["experts"] * (1 - 1 / trainer.mesh.expert)  # those that a rank never has
    gathered = layer - elsewhere / num_layers
    is_spread = trainer.ranks > 1 or itemsize < 4 or trainer.offload
    own = _kept(model, config)
    trained, own_bytes = own, 4 * own
    if trainer.lora is not None:
        with torch.device("meta"):
            add_adapters(model, trainer.lora, base_dtype=torch.float32, seed=0)
        trained = sum(weight.numel() for weight in model.parameters() if weight.requires_grad) / ranks
        own_bytes = itemsize * own + 4 * trained
    in_full = trainer.lora is None or objective.baseline == "critic"  # a critic learns after the policy, in full
    learned = own if in_full else trained
    if trainer.reduce_every == "update" and is_spread:
        gradients = 4 * (learned * ranks - (elsewhere if in_full else 0))
    else:
        gradients = 4 * learned + (4 * gathered / tensor if is_spread and in_full else 0)
    parts = {
        "parameters": own_bytes,
        "gathered parameters": itemsize * (outer + 2 * gathered / tensor) if is_spread else 0,
        "gradients": gradients,
        "optimiser": 8 * trained,
        **_activation_parts(
            architecture, config, layer_numbers=gathered if is_spread else 0, has_query_norm=has_query_norm
        ),
    }
    if objective.kl != "none" and (trainer.lora is None or objective.reference_path is not None):
        reference = model
        if objective.reference_path is not None:
            reference = empty_model(architecture_of(config, of_reference=True))
        parts["reference model"] = itemsize * _kept(reference, config)
    if objective.baseline == "critic":
        parts["critic"] = 12 * own  # float32 weights and two moments
    host = 0.0
    if trainer.offload:
        waiting = {"parameters": own_bytes, "gradients": 4 * learned * (trainer.reduce_every == "micro_batch")}
        waiting |= {name: parts[name] for name in ("optimiser", "reference model", "critic") if name in parts}
        host = sum(waiting.values())
        parts = {name: size - waiting.get(name, 0.0) for name, size in parts.items()}
    return RankSize(
        num_parameters=numbers["all"],
        num_active=numbers["active"],
        largest_parameter=numbers["largest"],
        layer_parameters=layer,
        outer_parameters=outer,
        parts=parts,
        host=host,
    )


def _kept(model: Any, config: Config) -> float:
    """Return the numbers of a model that a rank keeps; tensor parallelism splits layers alone."""
    in_layers = sum(weight.numel() for one in decoder_layers(model) for weight in one.parameters())
    outer = sum(weight.numel() for weight in model.parameters()) - in_layers
    mesh = config.trainer.mesh
    return float(in_layers + outer * mesh.tensor) * mesh.replicate / config.trainer.ranks


def _activation_parts(
    architecture: Any, config: Config, *, layer_numbers: float, has_query_norm: bool
) -> dict[str, float]:
    """Return the bytes that all layers keep until the backward pass, and those of the layer at work at the peak.

    Per token, H, Q, K and I numbers wide in hidden states, queries, keys and hidden units of the MLP. A layer keeps its
    input, what its norms see (in float32), keys, values, and of the MLP gate, activation, up projection and product.
    Its backward pass needs two more of the last kind. With checkpointing all layers but the one at work keep their
    inputs alone. At the output layer it is the gradient of its weight, summed up in float32 over chunks of the logits;
    then no gradient of a layer is on its way, and one layer less is gathered.
    """
    trainer, itemsize, tensor = config.trainer, itemsize_of(config), config.trainer.mesh.tensor
    context = config.model.max_context
    tokens = max(1, trainer.micro_batch_tokens // context) * context / trainer.mesh.context
    hidden, heads = architecture.hidden_size, architecture.num_attention_heads / tensor
    queries = heads * _head_dim(architecture)
    keys = _key_heads(architecture) * _head_dim(architecture) / tensor
    chosen = _chosen_experts(architecture)
    units = _mlp_width(architecture) / tensor
    layer = itemsize * (4 * units + 2 * keys + 2 * chosen * hidden) + (12 + 4 * itemsize) * hidden
    backward = itemsize * (2 * units + 1.5 * queries + 2.7 * chosen * hidden)
    if has_query_norm:
        layer += 4.5 * itemsize * queries
    if trainer.attention == "eager":  # scores, a softmax in float32, and its result
        layer += (4 + itemsize) * heads * context
        backward += itemsize * heads * context
    head = hidden * architecture.vocab_size
    if trainer.lora is not None:  # it is frozen
        head = 0
    chunk = min(CHUNK_ELEMENTS, tokens * architecture.vocab_size)
    output_layer = (4 + 2 * itemsize) * head + 16 * chunk - (4 + itemsize) * layer_numbers / tensor
    num_layers = architecture.num_hidden_layers
    kept = tokens * num_layers * (itemsize * hidden if trainer.activation_checkpointing else layer)
    at_work = tokens * (backward + (layer if trainer.activation_checkpointing else 0)) + itemsize * head
    return {
        "activations": _MARGIN * max(at_work, output_layer),
        "activations kept by layers": _MARGIN * kept,
    }


def num_parameters(model: Any) -> Counter[str]:
    """Count the parameters of a transformers model: `all`, `active` (see `RankSize`), of `experts`, and the `largest`.

    Raises:
        ConfigError: Its config.json does not give the number of experts, or how many work on a token.
    """
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
    experts = sum(size for name, size in sizes.items() if ".experts." in name)
    embeddings = 0 if model.config.tie_word_embeddings else model.get_input_embeddings().weight.numel()
    active = sum(sizes.values()) - embeddings
    if experts:
        known = (getattr(model.config, name, None) for name in _NUM_EXPERTS)
        number, chosen = next(filter(None, known), None), getattr(model.config, "num_experts_per_tok", None)
        if number is None or chosen is None:
            raise ConfigError(
                f"estimate needs the numbers of experts of {model.config.model_type}: expected num_experts_per_tok and "
                f"one of {', '.join(_NUM_EXPERTS)} in its config.json, got {chosen} and {number}. Fix: add them"
            )
        active -= round(experts * (1 - chosen / number))
    return Counter({"all": sum(sizes.values()), "active": active, "experts": experts, "largest": max(sizes.values())})


def handover_bytes(size: RankSize, config: Config) -> float:
    """Return the bytes of a publication on rank 0 (`gathers.py`).

    Over nccl a layer, everything outside of layers, and the chunks that are packed and sent; over ipc the whole model;
    over gloo twice, gathered and packed.
    """
    if config.weights.transport != "nccl":
        return size.num_parameters * itemsize_of(config) * (2 if config.weights.staged else 1)
    return (size.outer_parameters + size.layer_parameters) * itemsize_of(config) + _HANDOVER_BUFFERS


def engine_parts(architecture: Any, size: RankSize, config: Config, *, gib: float) -> dict[str, float]:
    """Return the bytes of each part of an engine's GPU; the KV cache gets the rest.

    Args:
        gib: GPU memory; not read on the CPU.
    """
    rollout, itemsize, hidden = config.rollout, itemsize_of(config), architecture.hidden_size
    parts = {
        "parameters": size.num_parameters * itemsize / rollout.tensor_parallel,
        "activations": _BATCHED_TOKENS * (2 * _mlp_width(architecture) + 4 * hidden) * itemsize
        + 2 * rollout.slots * architecture.vocab_size * 4,
        # A chunk ends with the parameter that takes it over its size.
        "transfers": itemsize * (size.num_parameters if config.weights.staged else size.largest_parameter)
        + (0 if config.weights.staged else _HANDOVER_BUFFERS),
    }
    if config.run.device == "cpu":
        return parts | {"KV cache": rollout.kv_cache_mb * 2.0**20}
    return parts | {"KV cache": rollout.gpu_memory_fraction * gib * 2**30 - sum(parts.values())}


def cpu_parts(size: RankSize, config: Config) -> dict[str, dict[str, float]]:
    """Return the bytes that a CPU adds to a trainer rank and to an engine, and those of all other processes."""
    return {
        "trainer rank": {"Python and torch": _RANK_PROCESS},
        "engine": {
            "Python and vLLM": _ENGINE_PROCESS,
            "further copies of the weights": _ENGINE_COPIES * size.num_parameters * itemsize_of(config),
        },
        "other processes": {"Ray, queue, verifiers": _OTHER_PROCESSES + config.verifier.workers * _VERIFIER_PROCESS},
    }


def kv_bytes_per_token(architecture: Any, config: Config) -> float:
    """Return the bytes of a token's keys and values on each GPU of an engine.

    Multi-head latent attention (arXiv 2405.04434 §2.1) keeps one latent vector and one rotary key for all heads.
    """
    if latent := getattr(architecture, "kv_lora_rank", None):
        return float(architecture.num_hidden_layers * (latent + architecture.qk_rope_head_dim) * itemsize_of(config))
    heads = max(1.0, _key_heads(architecture) / config.rollout.tensor_parallel)
    return 2.0 * int(architecture.num_hidden_layers) * float(heads) * _head_dim(architecture) * itemsize_of(config)


def trainer_tokens_per_s(architecture: Any, size: RankSize, config: Config, *, tflops: float) -> float:
    """Return the tokens/s that all ranks can train at the GPU's peak, every pass of a step included."""
    objective, minibatches = config.objective, config.trainer.minibatches
    passes = 3.0 + config.trainer.activation_checkpointing
    passes *= 2 if objective.baseline == "critic" else 1
    passes -= config.trainer.lora is not None  # frozen weights take no gradient
    passes += (objective.kl != "none") + (objective.baseline == "critic")
    if objective.proximal == "recompute":
        passes += 1 if needs_proximal_first(objective) else 1 - 1 / minibatches
    return config.trainer.ranks * tflops * 1e12 / (passes * forward_flops(architecture, size, config))


def engine_tokens_per_s(
    architecture: Any, size: RankSize, config: Config, *, gib: float, tflops: float, tb_per_s: float
) -> float:
    """Return the tokens/s that all engines can decode: a step reads the weights and every sample's cache once.

    Samples have the greatest length less half a completion.
    """
    parts, per_token = engine_parts(architecture, size, config, gib=gib), kv_bytes_per_token(architecture, config)
    length = config.model.max_context - config.rollout.max_new_tokens / 2
    running = min(config.rollout.slots, parts["KV cache"] / (per_token * length))
    read_s = (parts["parameters"] + running * per_token * length) / (tb_per_s * 1e12)
    work_s = running * forward_flops(architecture, size, config) / (tflops * 1e12 * config.rollout.tensor_parallel)
    return max(0.0, config.rollout.workers * running / max(read_s, work_s))


def forward_flops(architecture: Any, size: RankSize, config: Config) -> float:
    """Return the floating-point operations of a token's forward pass, attending to half the context."""
    attended = int(architecture.num_attention_heads) * _head_dim(architecture) * config.model.max_context / 2
    return 2.0 * size.num_active + 4 * int(architecture.num_hidden_layers) * attended


def _head_dim(architecture: Any) -> int:
    return int(getattr(architecture, "head_dim", None) or architecture.hidden_size // architecture.num_attention_heads)


def _chosen_experts(architecture: Any) -> int:
    return int(getattr(architecture, "num_experts_per_tok", None) or 0)


def _mlp_width(architecture: Any) -> int:
    """Return the hidden units of a layer's MLP that work on a token, the most of any layer."""
    chosen = _chosen_experts(architecture) + (getattr(architecture, "n_shared_experts", None) or 0)
    experts = chosen * (getattr(architecture, "moe_intermediate_size", None) or 0)
    widths = (getattr(architecture, name, None) for name in ("intermediate_size", "ffn_dim", "n_inner"))
    return int(max(experts, next(filter(None, widths), 0 if experts else 4 * architecture.hidden_size)))


def _key_heads(architecture: Any) -> int:
    """Return the heads of keys and values; families that do not share them, such as GPT-2's, have no name for it."""
    return int(getattr(architecture, "num_key_value_heads", None) or architecture.num_attention_heads)


def itemsize_of(config: Config) -> int:
    """Return the bytes of a number in the compute dtype."""
    return int(getattr(torch, config.compute_dtype).itemsize)
