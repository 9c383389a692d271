"""Spread the experts of a mixture over ranks, by the dispatch plan that transformers has for the model's family.

Each rank has some experts of every layer, whole. It sends its tokens to the ranks that have their experts, and gets
back what they computed (two all-to-alls); ranks keep rows of their own. Ranks that have the same experts shard them.
"""

from dataclasses import replace
from typing import Any

from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers.distributed.tensor_parallel import apply_expert_parallelism

from areal_lite.config.sections import TrainerConfig
from areal_lite.errors import ConfigError
from areal_lite.train.distributed import make_mesh
from areal_lite.train.tensor_parallel import planned

_DISPATCH = "ep_dispatch_experts"


def shard_experts(
    model: Any, settings: TrainerConfig, *, device: str, mp_policy: MixedPrecisionPolicy, **options: Any
) -> None:
    """Split a model's experts over `trainer.mesh.expert` ranks, in place, and shard them, before the rest is sharded.

    Example: of 8 experts on 8 ranks with `expert: 4`, ranks 0 and 4 have experts 0 and 1, and each stores one of them.

    Args:
        mp_policy: Of the other weights, as `options` are; but routers may weigh experts in float32.
    """
    copies, number = settings.mesh.replicate, settings.mesh.expert
    layers = layers_of_experts(model, number)
    mesh = make_mesh(device, {"replicate": copies, "shard": settings.ranks // (copies * number), "expert": number})
    apply_expert_parallelism(model, mesh["expert"], None, model.ep_plan)
    policy = replace(mp_policy, cast_forward_inputs=False)
    for experts in layers:
        fully_shard(experts, mesh=mesh[("replicate", "shard") if copies > 1 else "shard"], mp_policy=policy, **options)
        # A gradient has the tokens of all ranks, though few of them have the expert. gloo cannot scale while it sums;
        # where there is nothing to sum, torch 2.13 would divide twice.
        experts.set_gradient_divide_factor(float(settings.ranks))
        experts.set_force_sum_reduction_for_comms(mesh["shard"].size() > 1)


def layers_of_experts(model: Any, num_ranks: int) -> list[Any]:
    """Return the modules that hold a layer's experts each; the model may be on the meta device.

    Raises:
        ConfigError: There are none, transformers cannot send tokens to them, or they cannot be divided evenly.
    """
    plan = getattr(model, "ep_plan", None) or {}
    layers = planned(model, plan, _DISPATCH)
    counts = {len(weight) for layer in layers for weight in layer.parameters(recurse=False)}
    if not layers or any(count % num_ranks for count in counts):
        got = f"{', '.join(map(str, counts))} experts" if layers else "no layer of experts" if plan else "no plan"
        raise ConfigError(
            f"trainer.mesh.expert={num_ranks} must divide the experts of a mixture to which transformers' plan sends "
            f"tokens, got {type(model).__name__} with {got}. Fix: set it to 1, or to a divisor"
        )
    return layers
