"""What a trainer rank and an engine of a recipe take, and how fast they can be at most; neither weights nor GPU needed.

The project's own model, loss and update run on fake tensors, which have shapes and no storage, among fake ranks, while
torch's memory tracker counts. Decoder layers are alike: two depths are traced, and the rest is a straight line.
Engines, hand-over and speeds are arithmetic. `areal-lite estimate` calls this, and prints it.
"""

import copy
import json
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.distributed._tools.mem_tracker import MemTracker
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForCausalLM

from areal_lite.config.recipe import Config
from areal_lite.config.suggestion import suggestion
from areal_lite.data.demonstrations import alphabet
from areal_lite.data.tokenizer import build_char_tokenizer
from areal_lite.errors import ConfigError
from areal_lite.train import pieces
from areal_lite.train.batch import PolicyBatch
from areal_lite.train.lora import add_adapters
from areal_lite.train.micro_batch import MicroBatch
from areal_lite.train.model import shard_model
from areal_lite.train.objective import UpdateLoss
from areal_lite.train.optimiser import Learner
from areal_lite.train.score import needs_proximal_first
from areal_lite.train.warm_start import build_model
from areal_lite.types import Row, Sample, Shard, StopReason, VersionSpan

KNOWN: Mapping[str, Any] = json.loads((Path(__file__).parent / "known.json").read_text())
"""`models`: what of a published config.json decides sizes. `gpus`: GiB that torch sees, TFLOP/s of dense bfloat16
matrices, TB/s of memory."""
TRACED_LAYERS = (3, 4)
"""With two, the layer that is gathered ahead is nowhere in the way of the peak."""
_TRACED_PIECES = 2
"""Of the logits of a micro-batch: they are alike too, and there may be 75."""
_PARTS = {"Param": "parameters", "Buffer": "parameters", "All Gather": "parameters", "Grad": "gradients"} | {
    "Reduce Scatter": "gradients", "Opt": "optimiser"}  # fmt: skip
"""Words in the tracker's names of what it counts -> ours; whatever else there is are activations."""
_HANDOVER_BUFFERS = 2 * 256 * 2**20
"""Of weights/nccl.py, on both sides: one chunk on its way, and one that is packed or loaded."""
_NUM_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
"""What model families call the number of experts of a layer."""
_BATCHED_TOKENS = 8192
"""Of one forward pass of vLLM, about."""


def architecture_of(config: Config) -> Any:
    """Return the transformers config of the recipe's model: built in, known by name, of a folder, or downloaded before.

    A name with more behind it, as `-Instruct` or `-Base`, is a known model trained further: its sizes are the same.

    Raises:
        ConfigError: It is none of them.
    """
    path = config.model.path
    if path == "builtin:arith":
        return build_model(config, build_char_tokenizer(alphabet(config))).config
    if known := max((name for name in KNOWN["models"] if f"{path}-".startswith(f"{name}-")), key=len, default=None):
        return AutoConfig.for_model(**KNOWN["models"][known], max_position_embeddings=config.model.max_context)
    try:
        return AutoConfig.from_pretrained(path, local_files_only=True)
    except OSError as error:
        raise ConfigError(
            "model.path must be a folder with config.json, the hub id of a model downloaded before, or one of "
            f"{', '.join(KNOWN['models'])}, got {path}{suggestion(path, KNOWN['models'])}: weights are not needed"
        ) from error


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSize:
    """A model, and what a trainer rank holds at the peak of an update."""

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
    """Bytes that wait in the host's memory instead (`trainer.offload`): by arithmetic, as the tracker sees one kind."""

    @property
    def peak(self) -> float:
        """Bytes, all together."""
        return sum(self.parts.values())


def rank_size(architecture: Any, config: Config, *, depths: tuple[int, int] = TRACED_LAYERS) -> RankSize:
    """Trace the update of a trainer rank whose micro-batches are as full as the recipe allows.

    Reference and critic, which wait meanwhile, are added, as large as the policy.

    Args:
        architecture: As of `architecture_of`.
        depths: Numbers of decoder layers to trace.
    """
    num_layers = architecture.num_hidden_layers
    few, many = (min(depth, num_layers) for depth in depths)
    low = _traced(architecture, config, few)
    high = _traced(architecture, config, many) if many > few else low
    slope = {name: (high[name] - low[name]) / max(1, many - few) for name in high}
    found = {name: low[name] + slope[name] * (num_layers - few) for name in high}
    layer_parameters = round(slope["all"])
    numbers = [round(found.pop(name)) for name in ("all", "active", "largest", "own", "own trained")]
    in_layers = slope["activations"] * num_layers
    parts = found | {"activations": found["activations"] - in_layers, "activations kept by layers": in_layers}
    share = numbers[0] / (config.trainer.ranks / config.trainer.mesh.replicate)
    if config.objective.kl != "none" and (config.trainer.lora is None or config.objective.reference_path is not None):
        parts["reference model"] = _itemsize(config) * share
    if config.objective.baseline == "critic":
        parts["critic"] = 12 * share  # float32 weights and two moments; its gradients come later
    host = 0.0
    if config.trainer.offload:
        waiting = {"parameters": numbers[3], "gradients": numbers[4] * (config.trainer.reduce_every == "micro_batch")}
        waiting |= {name: parts[name] for name in ("optimiser", "reference model", "critic") if name in parts}
        host = sum(waiting.values())
        parts = {name: size - waiting.get(name, 0.0) for name, size in parts.items()}
    return RankSize(
        num_parameters=numbers[0],
        num_active=numbers[1],
        largest_parameter=numbers[2],
        layer_parameters=layer_parameters,
        outer_parameters=numbers[0] - layer_parameters * num_layers,
        parts=parts,
        host=host,
    )


def _traced(architecture: Any, config: Config, num_layers: int) -> Counter[str]:
    """Return the bytes of each part at the peak, the numbers of parameters `all`, `active` and the `largest`, and the
    bytes of a rank's `own` ones and `own trained` ones.
    """
    shallow = copy.deepcopy(architecture)
    shallow.num_hidden_layers = num_layers
    if getattr(shallow, "layer_types", None):
        shallow.layer_types = shallow.layer_types[:num_layers]
    fake, cpu = FakeTensorMode(allow_non_fake_inputs=True), torch.device("cpu")
    attention = None if config.trainer.attention == "auto" else config.trainer.attention
    with _fake_ranks(config.trainer.ranks):
        batch = _batch(config)
        with fake:
            model: Any = AutoModelForCausalLM.from_config(
                shallow, dtype=torch.float32, attn_implementation=attention
            ).train()
        if config.trainer.activation_checkpointing:
            model.gradient_checkpointing_enable()
        numbers, dtype = num_parameters(model), getattr(torch, config.compute_dtype)
        if config.trainer.lora is not None:
            # Fake parameters cannot move, and are where they belong.
            with fake, patch.object(nn.Module, "to", lambda module, *_, **__: module):
                add_adapters(model, config.trainer.lora, base_dtype=dtype, seed=0)
        shard_model(model, config, device=cpu)
        for parameter in model.parameters():
            own = parameter.to_local() if isinstance(parameter, DTensor) else parameter
            numbers["own"] += own.nbytes
            numbers["own trained"] += own.nbytes * parameter.requires_grad
        few = patch.object(pieces, "_pieces", lambda *sizes, cut=pieces._pieces: cut(*sizes)[:_TRACED_PIECES])
        with fake, few, _Ones():  # type: ignore[no-untyped-call]
            learner = Learner(model, settings=config.trainer, total_steps=1)
            tracker = (
                MemTracker() if not isinstance(model, FSDPModule) else FSDPMemTracker(learner.model, learner.optimizer)
            )
            tracker.track_external(model, learner.optimizer)
            loss_of = UpdateLoss(
                batch=batch, model=model, config=config, is_first=False,
                kl_coef=config.objective.kl_coef, proximal_kl_coef=config.objective.proximal_kl_coef,
            )  # fmt: skip

            def share(part: MicroBatch) -> tuple[Tensor, Mapping[str, Tensor]]:
                tracker.reset_mod_stats()  # it looks at one pass at a time
                return loss_of(part)

            shares = [partial(share, part) for part in batch.updates[0]]
            # As it first steps, DTensor finds out the shapes of whole parameters, which the tracker would count.
            for parameter in model.parameters():
                parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
            learner.update([], step=0)
            # Gradients of a micro-batch wait while the next one is at work.
            with tracker:
                learner.update(shares, step=0)
            peak = tracker.get_tracker_snapshot("peak")[cpu]
    parts = Counter(dict.fromkeys((*_PARTS.values(), "activations"), 0))
    for kind, size in peak.items():
        name = str(getattr(kind, "value", kind))
        if name != "Total":
            parts[next((ours for word, ours in _PARTS.items() if word in name), "activations")] += size
    return parts + numbers


class _Ones(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Says 1 where Python asks for a number in a fake tensor, which has none; the gradient norm is finite."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return 1.0 if func is torch.ops.aten._local_scalar_dense.default else func(*args, **(kwargs or {}))


@contextmanager
def _fake_ranks(world_size: int) -> Iterator[None]:
    """A process group whose collectives do nothing; this is its rank 0."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def _batch(config: Config) -> PolicyBatch:
    """Make a rank's rows of two micro-batches, as full and as wide as the recipe allows, or its part of them."""
    parts, tokens = config.trainer.mesh.context, config.trainer.micro_batch_tokens
    width = config.model.max_context // parts
    output = min(config.rollout.max_new_tokens // parts, width - 1)
    num_rows = 2 * max(1, tokens // config.model.max_context)
    part = config.trainer.model_copy(update={"micro_batch_tokens": tokens // parts})
    config = config.model_copy(update={"trainer": part})
    sample = Sample(
        token_ids=np.zeros(output, np.int32),
        logprobs=np.zeros(output, np.float32),
        spans=(VersionSpan(version=0, start=0, end=output),),
        stop_reason=StopReason.LENGTH,
    )
    prompt = (0,) * (width - output)
    rows = tuple(
        Row(group_index=0, sample_index=index, minibatch=0, prompt_token_ids=prompt, sample=sample)
        for index in range(num_rows)
    )
    rewards = np.zeros((1, num_rows), np.float32)
    shard = Shard(batch_id="estimate", rank=0, version=0, rewards=rewards, rows=rows)
    batch = PolicyBatch.from_shard(shard, config=config, device=torch.device("cpu"))
    if config.objective.kl != "none":
        batch.tokens.reference_logprobs_T = batch.tokens.behaviour_logprobs_T
    return batch


def num_parameters(model: Any) -> Counter[str]:
    """Count the parameters of a transformers model: `all`, `active` (see `RankSize`), and those of the `largest`.

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
    return Counter({"all": sum(sizes.values()), "active": active, "largest": max(sizes.values())})


def handover_bytes(size: RankSize, config: Config) -> float:
    """Return what a publication takes on rank 0 (`gathers.py`).

    Over nccl a layer, all that is not in layers (most of it waits for its turn), and the chunks that are packed and
    sent; over the others the whole model.
    """
    if config.weights.transport != "nccl":
        return size.num_parameters * _itemsize(config)
    return (size.outer_parameters + size.layer_parameters) * _itemsize(config) + _HANDOVER_BUFFERS


def engine_parts(architecture: Any, size: RankSize, config: Config, *, gib: float) -> dict[str, float]:
    """Return the bytes of each part of an engine's GPU; the cache for keys and values gets what is left.

    Args:
        gib: GPU memory; not read on the CPU.
    """
    rollout, itemsize, hidden = config.rollout, _itemsize(config), architecture.hidden_size
    width = getattr(architecture, "moe_intermediate_size", 0) * getattr(architecture, "num_experts_per_tok", 1)
    parts = {
        "parameters": size.num_parameters * itemsize / rollout.tensor_parallel,
        "activations": _BATCHED_TOKENS * (2 * max(width, architecture.intermediate_size) + 4 * hidden) * itemsize
        + 2 * rollout.slots * architecture.vocab_size * 4,
        # A chunk ends with the parameter that takes it over its size.
        "transfers": itemsize * (size.num_parameters if config.weights.staged else size.largest_parameter)
        + (0 if config.weights.staged else _HANDOVER_BUFFERS),
    }
    if config.run.device == "cpu":
        return parts | {"KV cache": rollout.kv_cache_mb * 2.0**20}
    return parts | {"KV cache": rollout.gpu_memory_fraction * gib * 2**30 - sum(parts.values())}


def kv_bytes_per_token(architecture: Any, config: Config) -> float:
    """Return the bytes of a token's keys and values on each GPU of an engine.

    Multi-head latent attention (arXiv 2405.04434 §2.1) keeps one latent vector and one rotary key for all heads.
    """
    if latent := getattr(architecture, "kv_lora_rank", None):
        return float(architecture.num_hidden_layers * (latent + architecture.qk_rope_head_dim) * _itemsize(config))
    heads = max(1.0, architecture.num_key_value_heads / config.rollout.tensor_parallel)
    return 2.0 * int(architecture.num_hidden_layers) * float(heads) * _head_dim(architecture) * _itemsize(config)


def trainer_tokens_per_s(architecture: Any, size: RankSize, config: Config, *, tflops: float) -> float:
    """Return how many tokens all ranks train at most, every pass of a step included, at the GPU's peak."""
    objective, minibatches = config.objective, config.trainer.minibatches
    passes = 3.0 + config.trainer.activation_checkpointing
    passes *= 2 if objective.baseline == "critic" else 1
    passes += (objective.kl != "none") + (objective.baseline == "critic")
    if objective.proximal == "recompute":
        passes += 1 if needs_proximal_first(objective) else 1 - 1 / minibatches
    return config.trainer.ranks * tflops * 1e12 / (passes * _forward_flops(architecture, size, config))


def engine_tokens_per_s(
    architecture: Any, size: RankSize, config: Config, *, gib: float, tflops: float, tb_per_s: float
) -> float:
    """Return how many tokens all engines decode at most: a step reads the weights and every sample's cache once.

    Samples are as long as the recipe allows, less half a completion.
    """
    parts, per_token = engine_parts(architecture, size, config, gib=gib), kv_bytes_per_token(architecture, config)
    length = config.model.max_context - config.rollout.max_new_tokens / 2
    running = min(config.rollout.slots, parts["KV cache"] / (per_token * length))
    read_s = (parts["parameters"] + running * per_token * length) / (tb_per_s * 1e12)
    work_s = running * _forward_flops(architecture, size, config) / (tflops * 1e12 * config.rollout.tensor_parallel)
    return max(0.0, config.rollout.workers * running / max(read_s, work_s))


def _forward_flops(architecture: Any, size: RankSize, config: Config) -> float:
    """Floating-point operations of a token's forward pass, attending to half the context."""
    attended = int(architecture.num_attention_heads) * _head_dim(architecture) * config.model.max_context / 2
    return 2.0 * size.num_active + 4 * int(architecture.num_hidden_layers) * attended


def _head_dim(architecture: Any) -> int:
    return int(getattr(architecture, "head_dim", None) or architecture.hidden_size // architecture.num_attention_heads)


def _itemsize(config: Config) -> int:
    return int(getattr(torch, config.compute_dtype).itemsize)
