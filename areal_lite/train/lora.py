"""LoRA with peft: low-rank adapters in a frozen model, merged weights, and the adapters' own folder.

Per adapted layer `y = W x + s B A x`, with `s = alpha / rank` and B = 0 at the start. peft replaces each linear layer
by one of its own, and wraps experts that transformers stacks once for each of their parameters. Source: arXiv
2106.09685, section 4.1.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers.pytorch_utils import Conv1D

from areal_lite.config.sections import LoraConfig
from areal_lite.config.suggestion import suggestion
from areal_lite.errors import ConfigError

_NAME = "default"
"""What peft calls an adapter; no parameter but an adapter's has it in its path."""


def add_adapters(model: Any, settings: LoraConfig, *, base_dtype: torch.dtype, seed: int) -> None:
    """Freeze a float32 model, cast it, and give it float32 adapters, the same on all ranks."""
    import peft  # takes a second

    config = peft.LoraConfig(
        r=settings.rank,
        lora_alpha=settings.alpha,
        target_modules=list(settings.targets) or "all-linear",
        task_type="CAUSAL_LM",
        base_model_name_or_path=model.name_or_path,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        peft.inject_adapter_in_model(config, model)
    for parameter in model.parameters():
        if not parameter.requires_grad:
            parameter.data = parameter.data.to(base_dtype)


def check_targets(settings: LoraConfig, model: Any) -> None:
    """Check that every target is a linear layer of a model, which may be empty, but not its output layer.

    Raises:
        ConfigError: There is no such layer.
    """
    output = model.get_output_embeddings()
    linear = [
        name for name, layer in model.named_modules() if isinstance(layer, nn.Linear | Conv1D) and layer != output
    ]
    known = sorted({name.rpartition(".")[2] for name in linear})
    for target in settings.targets:
        if not any(f".{name}".endswith(f".{target}") for name in linear):
            raise ConfigError(
                f"trainer.lora.targets must name linear layers of the model, {', '.join(known)}, got {target!r}"
                f"{suggestion(target, known) or '.'} Fix: correct it, or leave targets out for all of them"
            )


@contextmanager
def adapters_off(model: nn.Module) -> Iterator[None]:
    """Switch a model's adapters off; a model without any is left alone."""
    layers: list[Any] = [layer for layer in model.modules() if hasattr(layer, "base_layer")]
    for layer in layers:
        # Not `enable_adapters`, which also freezes the adapters: FSDP2 would remember that.
        layer._disable_adapters = True
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False


def model_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter, Any]]:
    """Yield every parameter but the adapters', named as in a model without, and the layer that adapts it or None."""
    for name, parameter in model.named_parameters():
        if f".{_NAME}." not in name:
            owner, _, own_name = name.rpartition(".base_layer.")
            # Stacked experts have several parameters: the adapter of one is the base layer of the next one's.
            while owner and getattr(model.get_submodule(owner), "parameter_name", "weight") != own_name:
                owner = owner.rpartition(".base_layer")[0]
            yield plain_name(name), parameter, model.get_submodule(owner) if owner else None


def plain_name(name: str) -> str:
    """Return what a parameter is called in a model without adapters."""
    return name.replace(".base_layer", "")


def saved_buffers(model: nn.Module) -> list[tuple[str, Tensor]]:
    """Return the buffers that a checkpoint holds, such as a router's bias; those of the widest dtype first.

    Sent in this order before the parameters, as bytes, every value arrives aligned.
    """
    saved = model.state_dict().keys()
    buffers = [(name, buffer) for name, buffer in model.named_buffers() if name in saved]
    return sorted(buffers, key=lambda pair: -pair[1].element_size())


def factors(layer: Any) -> tuple[nn.Parameter, nn.Parameter]:
    """Return A and B of a layer of `model_parameters`."""
    return layer.lora_A[_NAME].weight, layer.lora_B[_NAME].weight


@torch.no_grad()
def merged(layer: Any, weight: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Return a layer's weight `W + s B A` in float32, from whole W, A and B; of stacked experts, that of each."""
    if weight.ndim == 3:  # as peft lays out E experts: A [E * rank, in], B [out, rank * E]
        a = a.reshape(len(weight), -1, a.shape[1])
        b = b.reshape(len(b), -1, len(weight)).permute(2, 0, 1)
    change: Tensor = layer.scaling[_NAME] * (b @ a)
    return weight.float() + (change.T if layer.fan_in_fan_out else change)


def bit_sum(value: Tensor) -> Tensor:
    """Sum a tensor's bits as integers, the same in any order; collective if it is sharded."""
    bits = torch.int32 if value.element_size() == 4 else torch.int16
    total = value.detach().view(bits).sum(dtype=torch.int64)
    return total.full_tensor() if isinstance(total, DTensor) else total


def adapter_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield the adapters' parameters, under the names of peft's files."""
    for name, parameter in model.named_parameters():
        if f".{_NAME}." in name:
            yield f"base_model.model.{name.replace(f'.{_NAME}.', '.')}", parameter


def save_adapter(folder: Path, model: Any, adapter: dict[str, Tensor]) -> None:
    """Write whole adapters on the CPU in peft's format."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file(adapter, folder / "adapter_model.safetensors")
    model.peft_config[_NAME].save_pretrained(folder)
