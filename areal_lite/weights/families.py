"""Fingerprints of parameters, to check that the trainer and an engine hold the same values.

The fingerprint of a parameter is the sum of the squares of its values' bits, as integers modulo 2**64. It is exact: it
changes if one value moves by one unit in the last place. Fusing, sharding, packing and padding with zeros keep the sum,
because both sides have the same numbers: vLLM makes one `qkv_proj` of `q_proj`, `k_proj` and `v_proj`, whose sums add
up to its own. Values in another order keep it as well; log-probabilities show those.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # the controller's process imports this module too, and does not need torch
    import torch
    from torch import Tensor

Sums = Mapping[str, int]
"""Fingerprints by parameter."""
Fused = Mapping[str, Sequence[str]]
"""The layers that vLLM has fused, by its name for the result."""

_CHUNK = 2**20
"""Values whose bits are widened at a time, 16 MiB beside the parameter."""
_BLOCK = 64
"""Columns of a packed layer's weights that are computed at a time."""
_OTHERS = "parameters with other names in the engine"


class ParameterSquares:
    """Mixed into vLLM's workers (`worker_extension_cls`)."""

    def parameter_squares(self: Any) -> list[Any]:
        """Return the fingerprint of this process's part of each parameter, and what vLLM has fused.

        A list of two, as a server's `/collective_rpc` returns nothing else as it is.
        """
        from vllm.model_executor.layers.linear import LinearBase
        from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

        model, dtype = self.get_model(), self.model_config.dtype
        # A parameter of the trainer may be a buffer here.
        held = {**dict(model.named_buffers()), **dict(model.named_parameters())}
        parts: dict[str, Iterable[Tensor]] = {name: [value] for name, value in held.items()}
        for name, layer in model.named_modules():
            if isinstance(layer, LinearBase | ParallelLMHead) and hasattr(layer, "cpu_linear"):
                parts[f"{name}.weight"] = _computed_weight(layer, getattr(layer, "params_dtype", None) or dtype)
            if (replicas := getattr(layer, "num_kv_head_replicas", 1)) > 1 and layer.tp_rank % replicas:
                # Another process has the same keys and values: in this one only queries count.
                own = layer.num_heads * layer.head_size
                parts |= {
                    one: [tensor[:own] for tensor in tensors]
                    for one, tensors in parts.items()
                    if one.startswith(f"{name}.")
                }
        # Quantised values differ from those that were sent: under another name they are not expected to be equal.
        narrow = {name for name, value in held.items() if value.numel() and value.dtype.itemsize < dtype.itemsize}
        sums = {
            f"{name}.quantised" if name in narrow else name: sum(int(bit_squares(part)) for part in tensors) % 2**64
            for name, tensors in parts.items()
        }
        return [sums, dict(getattr(model, "packed_modules_mapping", {}))]


def bit_squares(value: "Tensor") -> "Tensor":
    """Return a tensor's fingerprint, an int64 number modulo 2**64, computed chunk by chunk.

    Zeros do not count; nor do subnormal numbers, which some kernels flush to zero.
    """
    import torch

    rows = value.detach() if value.ndim else value.detach().view(1)
    total = torch.zeros((), dtype=torch.int64, device=value.device)
    for chunk in rows.split(max(1, _CHUNK * len(rows) // rows.numel())) if rows.numel() else ():
        # As float32, which holds the values of all narrower dtypes: a router may be wider in the engine.
        bits = chunk.float().view(torch.int32)
        total += (bits * ((bits & 0x7F800000) != 0)).long().square().sum()
    return total


class PublishedValues:
    """Keeps fingerprints of earlier publications, to find parameters that did not arrive in an engine.

    A parameter that was once equal, in any engine, must stay equal. One that an engine holds in another form
    (quantised, transformed, under another name) must change when the trainer's values do.
    """

    def __init__(self) -> None:
        self._before: dict[str, tuple[Sums, Sums]] = {}
        self._equal_once: set[str] = set()

    def missed(self, trainer: Sums, engines: Mapping[str, Sequence[tuple[Sums, Fused]]]) -> dict[str, list[str]]:
        """Return the parameters that did not arrive, by engine; only engines that miss any.

        Args:
            trainer: Fingerprints of what was published, by the trainer's names.
            engines: By engine, what each of its processes holds.
        """
        pairs = {name: _paired(trainer, processes) for name, processes in engines.items()}
        for sent, held in pairs.values():
            self._equal_once |= {name for name, value in sent.items() if value and value == held[name]}
        found = {}
        for engine, (sent, held) in pairs.items():
            sent_before, held_before = self._before.get(engine, (sent, held))
            found[engine] = [
                name
                for name in _unequal(sent, held)
                if name in self._equal_once
                or (sent[name] != sent_before.get(name) and held[name] == held_before.get(name))
            ]
        self._before |= pairs
        return {engine: names for engine, names in found.items() if names}

    def unequal(self, engine: str) -> list[str]:
        """Return the parameters that differed between an engine and the trainer in the last comparison."""
        return [name for name in _unequal(*self._before.get(engine, ({}, {}))) if name != _OTHERS]


def common_name(name: str, fused: Fused) -> str:
    """Return the name that a parameter has on both sides: from its layer's number on, fused layers by vLLM's name.

    >>> common_name("model.layers.11.self_attn.k_proj.weight", {"qkv_proj": ["q_proj", "k_proj", "v_proj"]})
    '11.self_attn.qkv_proj.weight'
    >>> common_name("model.layers.3.mlp.experts.w13_weight", {}), common_name("model.embed_tokens.weight", {})
    ('3.mlp.experts', 'embed_tokens.weight')
    """
    words = [next((whole for whole, parts in fused.items() if word in parts), word) for word in name.split(".")]
    own = words[next((i for i, word in enumerate(words) if word.isdigit()), -2) :]
    return ".".join(own[: own.index("experts") + 1] if "experts" in own else own)


def in_words(names: Iterable[str]) -> str:
    """Format common names, with the layers of a family together.

    >>> in_words(["0.mlp.up_proj.weight", "2.mlp.up_proj.weight", "norm.weight"])
    'mlp.up_proj.weight (layers 0, 2), norm.weight'
    """
    layers = defaultdict[str, list[str]](list)
    for name in names:
        first, _, family = name.partition(".")
        layers[family if first.isdigit() else name] += [first] * first.isdigit()
    return ", ".join(_family_in_words(family, numbers) for family, numbers in layers.items())


def _family_in_words(family: str, layers: Sequence[str]) -> str:
    if not layers:
        return family
    shown = ", ".join(sorted(layers, key=int)[:3]) + (f" and {len(layers) - 3} more" if len(layers) > 3 else "")
    return f"{family} (layer{'s' * (len(layers) > 1)} {shown})"


def _paired(trainer: Sums, processes: Sequence[tuple[Sums, Fused]]) -> tuple[Sums, Sums]:
    """Return the trainer's fingerprints and an engine's by common names; what only one side has is one entry."""
    fused = processes[0][1]
    sent, held = defaultdict[str, int](int), defaultdict[str, int](int)
    for name, value in trainer.items():
        sent[common_name(name, fused)] += value
    for name in processes[0][0]:
        parts = [own[name] for own, _ in processes]
        # Processes that hold equal values hold copies; unequal ones hold shards.
        held[common_name(name, fused)] += parts[0] if len(set(parts)) == 1 else sum(parts)
    both = sorted(sent.keys() & held.keys())

    def joined(sums: Sums) -> Sums:
        # The trainer lists a tied parameter under both names, the engine perhaps under one.
        known = {sums[name] for name in both}
        others = sum(value for name, value in sums.items() if name not in both and value not in known)
        return {name: value % 2**64 for name, value in [*((name, sums[name]) for name in both), (_OTHERS, others)]}

    return joined(sent), joined(held)


def _unequal(sent: Sums, held: Sums) -> list[str]:
    return [name for name, value in sent.items() if value != held[name]]


def _computed_weight(layer: Any, dtype: "torch.dtype") -> Iterator["Tensor"]:
    """Yield a CPU layer's packed weights, some columns at a time: its own parameter may be empty or outdated."""
    import torch

    widths = (getattr(layer, name, None) for name in ("input_size_per_partition", "input_size", "embedding_dim"))
    width = next(filter(None, widths))
    for start in range(0, width, _BLOCK):
        inputs = torch.zeros(min(_BLOCK, width - start), width, dtype=dtype)
        inputs.diagonal(start).fill_(1)
        yield layer.quant_method.apply(layer, inputs, None).t()
