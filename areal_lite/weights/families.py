"""Which families of parameters an engine has otherwise than the trainer: asked when their log-probabilities differ.

A family is a parameter of all decoder layers together, by the engine's name: vLLM makes one `qkv_proj` of `q_proj`,
`k_proj` and `v_proj`. Compared are sums of squares, which neither fusing nor padding nor packing changes: both sides
have the same numbers in the same dtype.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # the controller's process imports this module too, and has no use for torch
    import torch
    from torch import Tensor

Fused = Mapping[str, Sequence[str]]
"""By what vLLM calls a fused layer, the layers it is made of."""


class ParameterSquares:
    """Becomes a part of vLLM's workers (`worker_extension_cls`)."""

    def parameter_squares(self: Any) -> tuple[dict[str, float], Fused]:
        """Return the sum of squares of what this process has of each parameter, and what vLLM has fused."""
        from vllm.model_executor.layers.linear import LinearBase
        from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

        model = self.get_model()
        parameters = dict(model.named_parameters())
        for name, layer in model.named_modules():
            if isinstance(layer, LinearBase | ParallelLMHead):
                dtype = getattr(layer, "params_dtype", None) or self.model_config.dtype
                parameters[f"{name}.weight"] = _weight(layer, dtype)
            if getattr(layer, "num_kv_head_replicas", 1) > 1:
                # Parts of it are in several processes: no sum says whether they are right.
                parameters = {one: value for one, value in parameters.items() if not one.startswith(f"{name}.")}
        return squares(parameters.items()), dict(getattr(model, "packed_modules_mapping", {}))


def squares(parameters: Iterable[tuple[str, "Tensor"]]) -> dict[str, float]:
    """Return each parameter's sum of squares."""
    return {name: float(value.detach().double().square().sum()) for name, value in parameters}


def differing(trainer: Mapping[str, float], engine: Sequence[tuple[Mapping[str, float], Fused]]) -> str:
    """Say which families differ, as the end of a sentence.

    Args:
        trainer: Sums of squares by the trainer's names.
        engine: What each process of the engine says.
    """
    fused = engine[0][1]
    expected, got = defaultdict[str, float](float), defaultdict[str, float](float)
    for name, value in trainer.items():
        expected[family(name, fused)] += value
    for name in engine[0][0]:
        parts = [own[name] for own, _ in engine]
        # What all processes have alike is not spread over them.
        got[family(name, fused)] += parts[0] if len(set(parts)) == 1 else sum(parts)
    both = sorted(expected.keys() & got.keys())
    names = [name for name in both if not math.isclose(expected[name], got[name], rel_tol=1e-7)]
    if names:
        return f"the parameter families that differ are {', '.join(names)}"
    return f"all {len(both)} parameter families that both have by one name are equal"


def family(name: str, fused: Fused) -> str:
    """Return the family of a parameter.

    >>> family("model.layers.11.self_attn.k_proj.weight", {"qkv_proj": ["q_proj", "k_proj", "v_proj"]})
    'self_attn.qkv_proj.weight'
    >>> family("model.layers.3.mlp.experts.w13_weight", {}), family("model.embed_tokens.weight", {})
    ('mlp.experts', 'embed_tokens.weight')
    """
    words = [next((whole for whole, parts in fused.items() if word in parts), word) for word in name.split(".")]
    own = words[next((i + 1 for i, word in enumerate(words) if word.isdigit()), -2) :]
    return ".".join(own[: own.index("experts") + 1] if "experts" in own else own)


def _weight(layer: Any, dtype: "torch.dtype") -> "Tensor":
    """Return what a layer computes with: on a CPU a packed copy, beside which the parameter may be empty or old."""
    import torch

    widths = (getattr(layer, name, None) for name in ("input_size_per_partition", "input_size", "embedding_dim"))
    identity = torch.eye(next(filter(None, widths)), dtype=dtype, device=next(layer.parameters()).device)
    weight: torch.Tensor = layer.quant_method.apply(layer, identity, None)
    return weight
