"""Gather whole parameters from sharded ones, for a publication or an export.

Parameters of one FSDP2 group travel in one batch of messages. Each rank casts its pieces before it sends them, to
rank 0 alone unless every rank needs them. They arrive at their place in the whole tensor, so nothing is copied twice.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import product
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from areal_lite.train.distributed import device_of
from areal_lite.train.lora import factors, merged, model_parameters

Place = tuple[tuple[int, int], ...]
"""A piece of a tensor: where it starts and stops in each dimension."""


def whole_parameters(model: nn.Module, dtype: torch.dtype, *, everywhere: bool = False) -> Iterator[tuple[str, Tensor]]:
    """Yield every parameter whole and cast, adapters merged into it, by its name in a model without; collective.

    All ranks iterate to the end. A group is gathered when the first of its parameters is due, and the others wait: at
    most those of one layer, and of the model itself (embeddings, last norm, output layer).

    Args:
        everywhere: Yield on every rank; otherwise ranks other than 0 send their pieces and yield nothing.
    """
    for module in _fsdp_modules(model):
        module.reshard()  # a forward pass leaves whole parameters in the compute dtype
    owners = {id(parameter): module for module in _fsdp_modules(model) for parameter in module.parameters()}
    groups = defaultdict[Any, dict[str, tuple[Tensor, torch.dtype]]](dict)
    parameters = [(name, layer, owners.get(id(value), name), value) for name, value, layer in model_parameters(model)]
    for name, layer, owner, value in parameters:
        if layer is None:
            groups[owner][name] = value, dtype
        else:  # merged in float32 once they are whole
            pieces = dict(zip(_names(name), (value, *factors(layer)), strict=True))
            groups[owner] |= {part: (piece, piece.dtype) for part, piece in pieces.items()}
    ready = dict[str, Tensor]()
    for name, layer, owner, _ in parameters:
        ready |= gathered(groups.pop(owner, {}), device=device_of(model), everywhere=everywhere)
        if name in ready and layer is None:
            yield name, ready.pop(name)
        elif name in ready:
            yield name, merged(layer, *map(ready.pop, _names(name))).to(dtype)


@torch.no_grad()
def gathered(
    shards: Mapping[str, tuple[Tensor, torch.dtype]], *, device: torch.device, everywhere: bool = False
) -> dict[str, Tensor]:
    """Gather tensors, sharded or not, in one batch of messages; collective.

    Args:
        shards: By name, a tensor and the dtype in which it is sent.
        device: Where the ranks' backend sends from.
        everywhere: Return them on every rank, otherwise on rank 0 alone.
    """
    rank = dist.get_rank() if dist.is_initialized() else 0
    whole, messages = dict[str, Tensor](), list[tuple[Any, Tensor | None]]()
    for name, (value, dtype) in shards.items():
        own = value.to_local() if isinstance(value, DTensor) else value.detach()
        if everywhere or rank == 0:
            has_all = own.shape == value.shape
            whole[name] = own.to(device, dtype) if has_all else own.new_empty(value.shape, device=device, dtype=dtype)
        if isinstance(value, DTensor):
            pieces = _pieces(value.shape, value.device_mesh, value.placements)
            messages += _messages(pieces, own, whole.get(name), dtype, device, rank=rank, everywhere=everywhere)
    for work in dist.batch_isend_irecv([message for message, _ in messages]) if messages else ():
        work.wait()
    for message, part in messages:
        if part is not None and message.tensor is not part:
            part.copy_(message.tensor)
    return whole


def _messages(
    pieces: Mapping[Place, list[int]],
    own: Tensor,
    whole: Tensor | None,
    dtype: torch.dtype,
    device: torch.device,
    *,
    rank: int,
    everywhere: bool,
) -> Iterator[tuple[Any, Tensor | None]]:
    """Yield the messages of this rank for one tensor, each with the part of the whole tensor that it fills, if any.

    The first rank that holds a piece sends it, cast, to those that need it and lack it.
    """
    ranks = sorted({holder for holders in pieces.values() for holder in holders})
    for place, holders in pieces.items():
        receivers = [one for one in ranks if (everywhere or one == 0) and one not in holders]
        if rank == holders[0] and receivers:
            sent = own.to(device, dtype).contiguous()
            yield from ((dist.P2POp(dist.isend, sent, receiver), None) for receiver in receivers)
        if whole is None or own.shape == whole.shape:
            continue
        part = whole[tuple(slice(*ends) for ends in place)]
        if rank in holders:
            part.copy_(own)
        elif rank in receivers:
            buffer = part if part.is_contiguous() else torch.empty_like(part, memory_format=torch.contiguous_format)
            yield dist.P2POp(dist.irecv, buffer, holders[0]), part


@lru_cache
def _pieces(shape: torch.Size, mesh: DeviceMesh, placements: Sequence[Any]) -> dict[Place, list[int]]:
    """Return the ranks that hold each piece of a tensor, without empty pieces; the same on all ranks of its mesh."""
    pieces = defaultdict[Place, list[int]](list)
    for coordinate in product(*map(range, mesh.shape)):
        place = [(0, size) for size in shape]
        # From the last dimension: FSDP2 splits the part that tensor parallelism gave to a rank.
        for index, number, placement in reversed(list(zip(coordinate, mesh.shape, placements, strict=True))):
            if (dim := getattr(placement, "dim", None)) is not None:
                start, stop = place[dim]
                size = -(-(stop - start) // number)
                place[dim] = min(start + index * size, stop), min(start + (index + 1) * size, stop)
        if all(start < stop for start, stop in place):
            pieces[tuple(place)].append(int(mesh.mesh[coordinate]))
    return dict(pieces)


def _fsdp_modules(model: nn.Module) -> Iterator[Any]:
    """Yield outer modules first: parameters of an inner one are gathered with the inner one."""
    return (module for module in model.modules() if isinstance(module, FSDPModule))


def _names(name: str) -> tuple[str, str, str]:
    """Return by what names the parts of an adapted weight are gathered."""
    return name, f"{name} A", f"{name} B"
