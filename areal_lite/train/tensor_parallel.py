"""Layers split over ranks that work on the same rows, by the plan that transformers has for the model's family.

Projections into heads and hidden units are split by columns, those back by rows; between them a rank computes its heads
and units alone. All else, the output layer too, every rank computes whole.
"""

from typing import Any

from torch.distributed.device_mesh import DeviceMesh
from transformers.distributed.tensor_parallel import (
    _AllReduceBackward,
    apply_tensor_parallelism,
    replace_layer_number_by_wildcard,
)

from areal_lite.errors import ConfigError

_SPLIT = {"colwise", "rowwise"}
_PER_HEAD = "replicated_with_grad_allreduce"
"""A norm of each head, of which a rank sees some: a part of the gradient to its weight."""
_DIVIDED = ("num_attention_heads", "num_key_value_heads", "intermediate_size")


def split_layers(model: Any, mesh: DeviceMesh) -> None:
    """Split a model's layers over a mesh of one dimension, in place, before anything else is spread.

    Raises:
        ConfigError: There is no plan for the model, its plan has layers of other kinds, or it cannot be divided evenly.
    """
    # Of decoder layers, which are numbered: embeddings may be tied to the output layer, in front of which tokens wait.
    plan = {name: kind for name, kind in model.tp_plan.items() if "*" in name}
    architecture = model.config.get_text_config()
    sizes = {name: getattr(architecture, name, 0) for name in _DIVIDED}
    others = sorted(set(plan.values()) - _SPLIT - {_PER_HEAD})
    if not plan or others or any(size % mesh.size() for size in sizes.values()):
        raise ConfigError(
            f"trainer.mesh.tensor={mesh.size()} needs a model whose layers transformers plans to split by "
            f"{' and '.join(sorted(_SPLIT))}, and whose sizes it divides, got {type(model).__name__} with "
            f"{', '.join(others) or ('these' if plan else 'no plan')} and {sizes}: set it to 1, or to a divisor"
        )
    apply_tensor_parallelism(model, mesh, {name: kind for name, kind in plan.items() if kind in _SPLIT})
    for name, module in model.named_modules():
        if plan.get(replace_layer_number_by_wildcard(name)) == _PER_HEAD:
            _add_up_gradient(module, mesh)


def _add_up_gradient(module: Any, mesh: DeviceMesh) -> None:
    """Add a weight's gradient up over the ranks as it arises: transformers' own hook adds up sums anew."""
    forward = module.forward

    def with_whole_gradient(*args: Any) -> Any:
        weight = module.weight
        module._parameters["weight"] = _AllReduceBackward.apply(weight, mesh.get_group())
        try:
            return forward(*args)
        finally:
            module._parameters["weight"] = weight

    module.forward = with_whole_gradient
