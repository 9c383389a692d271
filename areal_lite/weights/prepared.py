"""New weights prepared beside a model that keeps generating, so that the pause only has to swap them in.

vLLM's own reload takes a model's layers apart, loads them, and has each pack its weights: 17 ms for the smallest model,
most of it book-keeping, in which no token can be generated. Here the same loaders and the same packing run on a second
set of layers, in the thread that received the weights; the live ones are untouched until `swap`.

For models of plain, unquantised layers (`is_plain`); `gloo.py` reloads the others as vLLM does.
"""

from collections.abc import Iterable, Iterator, Sequence, Set
from typing import Any, cast

import torch
from torch import nn
from vllm.model_executor.layers.attention import Attention, is_deferred_attention_layer
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
from vllm.model_executor.model_loader.reload.layerwise import _get_original_loader, get_layerwise_info
from vllm.model_executor.model_loader.reload.meta import materialize_meta_tensor, to_meta_tensor
from vllm.model_executor.model_loader.reload.sanitize import restore_layer_refs

from areal_lite.errors import HandoverError

_PACKING = (UnquantizedLinearMethod, UnquantizedEmbeddingMethod, UnquantizedFusedMoEMethod)


def is_plain(model: nn.Module) -> bool:
    """Return whether only the packed form of linear, embedding and expert layers is derived from the weights."""
    return all(
        type(getattr(layer, "quant_method", None)) in (type(None), *_PACKING)
        and (type(layer) is Attention or not is_deferred_attention_layer(layer))
        for layer in model.modules()
    )


def check_covered(expected: Set[str], loaded: Iterable[str]) -> None:
    """Compare the names of an engine's parameters with those that were loaded.

    Raises:
        HandoverError: Some were not.
    """
    if missing := sorted(expected - set(loaded)):
        raise HandoverError(
            f"weight sync failed: expected a value for all {len(expected)} parameters of vLLM's model, got none for "
            f"{len(missing)}: {', '.join(missing[:5])}. Fix: use a model whose parameters and saved buffers in "
            "transformers cover vLLM's, or versions of the two that agree on it"
        )


class PreparedWeights:
    """A full set of weights in the form that a model's layers keep."""

    @torch.no_grad()
    def __init__(self, model: nn.Module, weights: Sequence[tuple[str, torch.Tensor]]) -> None:
        """Load and pack without changing the model.

        Args:
            model: A vLLM model of plain layers.
            weights: Checkpoint names and tensors, each of a full shape.

        Raises:
            HandoverError: They do not cover the model.
        """
        pairs = _twins(model)
        try:
            loaded = pairs[0][1].load_weights(weights)
            check_covered({name for name, _ in model.named_parameters()}, loaded)
            self._layers = [(layer, _pack(twin), twin._parameters) for layer, twin in pairs]
        finally:
            # A parameter's loader is bound to its layer's twin: a cycle, which would keep the old embedding and its
            # packed copy after the next swap until a full garbage collection, and an engine seldom has one.
            for _, twin in pairs:
                vars(twin).clear()

    @torch.no_grad()
    def swap(self) -> None:
        """Copy them into the model, whose parameters keep their place in memory."""
        for layer, packed, new in self._layers:
            for name, parameter in _parameters(layer):
                parameter.data.copy_(new[name])
            vars(layer).update(packed)


def _twins(model: nn.Module) -> list[tuple[nn.Module, Any]]:
    """Pair every layer with a twin that shares all but its parameters; parameters that layers share stay shared."""
    twins: dict[nn.Module | None, Any] = {layer: object.__new__(type(layer)) for layer in model.modules()}
    new: dict[int, torch.Tensor] = {}
    for layer in model.modules():
        twin = twins[layer]
        vars(twin).update(
            vars(layer),
            _modules={name: twins.get(child) for name, child in layer._modules.items()},
            _parameters=dict(layer._parameters),
            _buffers=dict(layer._buffers),
        )
        for name, parameter in _parameters(layer):
            if id(parameter) not in new:
                new[id(parameter)] = _unloaded(layer, twin, name, parameter)
            twin._parameters[name] = new[id(parameter)]
    return [(layer, twins[layer]) for layer in model.modules()]


def _parameters(layer: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    return ((name, parameter) for name, parameter in layer._parameters.items() if parameter is not None)


def _unloaded(layer: nn.Module, twin: nn.Module, name: str, parameter: torch.Tensor) -> torch.Tensor:
    """Return memory for a parameter in the form in which it is loaded, with the loader that vLLM gave it."""
    recorded = get_layerwise_info(layer).restore_metadata[0]
    # vLLM records no biases: they are not repacked.
    meta = to_meta_tensor(recorded.get(name, parameter))
    tensor: Any = materialize_meta_tensor(restore_layer_refs(meta, twin))
    # A reload by vLLM leaves its own loaders in what it recorded.
    tensor.weight_loader = _get_original_loader(tensor)
    return cast("torch.Tensor", tensor)


def _pack(twin: Any) -> dict[str, Any]:
    """Pack a layer's weights; returns the attributes that hold them."""
    quant_method = getattr(twin, "quant_method", None)
    if not isinstance(quant_method, _PACKING):
        return {}
    if isinstance(quant_method, UnquantizedFusedMoEMethod):
        # If it has a kernel it leaves weights unpacked, but the CPU's kernel expects packed ones: nats off.
        quant_method.moe_kernel = None  # the twin's own: it is a module below the layer
    before = dict(vars(twin))
    quant_method.process_weights_after_loading(twin)
    return {name: value for name, value in vars(twin).items() if value is not before.get(name)}
