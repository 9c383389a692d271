"""Split layers over ranks that work on the same rows, by the plan that transformers has for the model's family.

Projections into heads and hidden units are split by columns, those back by rows; between them a rank computes its own
heads and units. Every rank computes everything else, the output layer too.
"""

from collections.abc import Mapping
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
"""A norm of each head. A rank has some heads, so it computes a part of the gradient to the norm's weight."""
_DIVIDED = ("num_attention_heads", "num_key_value_heads", "intermediate_size")


def split_layers(model: Any, mesh: DeviceMesh) -> None:
    """Split a model's layers over a mesh of one dimension, in place, before it is sharded; errors as `check_plan`."""
    plan = check_plan(model, mesh.size())
    apply_tensor_parallelism(model, mesh, {name: kind for name, kind in plan.items() if kind in _SPLIT})
    for module in planned(model, plan, _PER_HEAD):
        _sum_gradient(module, mesh)


def check_plan(model: Any, num_ranks: int) -> dict[str, str]:
    """Return transformers' plan for the layers of a model, which may be on the meta device.

    Raises:
        ConfigError: There is no plan for the model, its plan has layers of other kinds, or it cannot be divided evenly.
    """
    # Only decoder layers, which are numbered: embeddings may be tied to the output layer, which stays whole.
    plan = {name: kind for name, kind in model.tp_plan.items() if "*" in name}
    architecture = model.config.get_text_config()
    sizes = {name: getattr(architecture, name, 0) for name in _DIVIDED}
    others = sorted(set(plan.values()) - _SPLIT - {_PER_HEAD})
    if not plan or others or any(size % num_ranks for size in sizes.values()):
        raise ConfigError(
            f"trainer.mesh.tensor={num_ranks} needs layers that transformers splits colwise and rowwise, and "
            f"sizes that it divides, got {type(model).__name__} with "
            f"{', '.join(others) or ('these' if plan else 'no plan')} and {sizes}. Fix: set it to 1, or to a divisor"
        )
    return plan


def planned(model: Any, plan: Mapping[str, str], kind: str) -> list[Any]:
    """Return the modules that a plan of transformers, which writes `*` for the number of a layer, gives a kind."""
    named = model.named_modules()
    return [module for name, module in named if plan.get(replace_layer_number_by_wildcard(name)) == kind]


def _sum_gradient(module: Any, mesh: DeviceMesh) -> None:
    """Sum a weight's gradient over the ranks in each backward pass: transformers' own hook would sum sums again."""
    forward = module.forward

    def with_whole_gradient(*args: Any) -> Any:
        weight = module.weight
        module._parameters["weight"] = _AllReduceBackward.apply(weight, mesh.get_group())
        try:
            return forward(*args)
        finally:
            module._parameters["weight"] = weight

    module.forward = with_whole_gradient
