"""The trainer ranks' process group, and the few sums and maxima they share.

Called by the trainer actors (joining, leaving) and by the training code (the rest). Without a process
group a rank is alone, and every sum is its own.
"""

import datetime
from collections.abc import Mapping
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # missing from torch's stubs
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from areal_lite.config.sections import MeshConfig
from areal_lite.errors import ConfigError
from areal_lite.network import address_towards, listen, use_interface_of

T = TypeVar("T")

_rows: dist.ProcessGroup | None = None
"""Ranks that differ in their rows; None = all."""
_context: dist.ProcessGroup | None = None
"""Ranks that have parts of the same rows' tokens; None = each has whole rows."""
_beside: dist.ProcessGroup | None = None
"""All ranks, for a thread that works beside the training."""
_timeout: datetime.timedelta | None = None
"""Of a collective; a new group would take torch's default, half an hour."""


def open_store(host: str, ports: range, *, timeout_s: float = 300.0) -> TCPStore:
    """Open a store at which processes meet; it listens as long as the returned object lives.

    Args:
        host: The address of this machine to listen on.
        ports: Candidates; the first free one is used.
        timeout_s: Seconds that a wait at the store may take.

    Raises:
        ConfigError: No port is free.
    """
    listener = listen(host, ports)
    port, timeout = listener.getsockname()[1], datetime.timedelta(seconds=timeout_s)
    descriptor = listener.detach()  # the store closes it
    return TCPStore(host, port, is_master=True, wait_for_workers=False, timeout=timeout, master_listen_fd=descriptor)


def join_process_group(
    address: str, *, rank: int, world_size: int, device: str, timeout_s: float, mesh: MeshConfig | None = None
) -> None:
    """Join the trainer's process group: NCCL for what is on GPUs, gloo for what is not.

    Waits until all ranks have joined, at most `timeout_s`.

    Args:
        address: `host:port` of an open store (`open_store`), the same on all ranks.
        device: `cpu` or `cuda`; a rank uses the only GPU that it sees, or the one with its number.
        timeout_s: Seconds that joining, and later any collective, may take.
        mesh: Which ranks have the same rows; one of these counts in sums and maxima.

    Raises:
        ConfigError: This rank sees no GPU.
        RuntimeError: A rank did not join in time (torch's own error types).
    """
    if device == "cuda":
        if not (num_gpus := torch.cuda.device_count()):
            raise ConfigError(
                f"trainer rank {rank} needs a GPU with run.device=cuda, but torch sees none on its node. Fix: see "
                "areal-lite doctor there"
            )
        torch.cuda.set_device(rank % num_gpus)
    host, _, port = address.rpartition(":")
    timeout = datetime.timedelta(seconds=timeout_s)
    use_interface_of(address_towards(host))
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo",
        store=TCPStore(host, int(port), is_master=False, timeout=timeout),
        rank=rank,
        world_size=world_size,
        timeout=timeout,
    )
    if device == "cuda":
        # NCCL connects all ranks in a group's first call, and a batch of messages (`gathers.py`) may skip some.
        dist.all_reduce(torch.zeros(1, device=device))
    global _rows, _context, _timeout
    _timeout = timeout
    if mesh is not None and (same := mesh.same_rows) > 1:
        groups = [list(range(first, world_size, same)) for first in range(same)]
        _rows = _own_group(groups)
    if mesh is not None and mesh.context > 1:
        _context = _own_group(torch.arange(world_size).view(-1, mesh.context).tolist())


def make_mesh(device: str, sizes: Mapping[str, int]) -> DeviceMesh:
    """Arrange all ranks in named dimensions, each with groups of its own; collective.

    Torch's `init_device_mesh` would give groups of several dimensions its default time-out.
    """
    names = tuple(sizes)
    if len(names) == 1:  # its group is that of all ranks
        return init_device_mesh(device, tuple(sizes.values()), mesh_dim_names=names)
    ranks = torch.arange(dist.get_world_size()).view(*sizes.values())
    lines = [ranks.movedim(dim, -1).reshape(-1, size).tolist() for dim, size in enumerate(ranks.shape)]
    return DeviceMesh.from_group([*map(_own_group, lines)], device, ranks, mesh_dim_names=names)


def _own_group(groups: list[list[int]]) -> dist.ProcessGroup:
    own, _ = dist.new_subgroups_by_enumeration(groups, timeout=_timeout)  # type: ignore[no-untyped-call]
    return cast(dist.ProcessGroup, own)


def device_of(model: nn.Module) -> torch.device:
    """Return where a model computes; between passes its weights may be in the host's memory."""
    parameter = next(model.parameters())
    return torch.device(parameter.device_mesh.device_type) if isinstance(parameter, DTensor) else parameter.device


def leave_process_group() -> None:
    """Leave the process group; does nothing when there is none."""
    global _rows, _context, _beside
    _rows = _context = _beside = None
    if dist.is_initialized():
        dist.destroy_process_group()


def context_group() -> dist.ProcessGroup | None:
    """Return the ranks that have other tokens of the same rows; None = each rank has whole rows."""
    return _context


def new_group_beside() -> dist.ProcessGroup | None:
    """Make a gloo group of all ranks for what a thread does beside the training; None without a process group.

    Collective. It replaces the previous one: a single late collective closes a group's connections for good.
    """
    global _beside
    if _beside is not None:
        dist.destroy_process_group(_beside)
    _beside = dist.new_group(backend="gloo", timeout=_timeout) if dist.is_initialized() else None
    return _beside


def sum_over_ranks(values: Tensor) -> Tensor:
    """Return the element-wise sum of every rank's tensor; collective."""
    return _all_reduce(values, dist.ReduceOp.SUM)


def max_over_ranks(values: Tensor) -> Tensor:
    """Return the element-wise maximum of every rank's tensor; collective."""
    return _all_reduce(values, dist.ReduceOp.MAX)


def gather_over_ranks(values: Tensor) -> tuple[Tensor, slice]:
    """Return the vectors of all ranks in order, and the place of this rank's own; collective.

    The vectors may differ in length.
    """
    if not dist.is_initialized():
        return values, slice(None)
    rank = dist.get_rank(_rows)
    lengths = torch.zeros(dist.get_world_size(_rows), dtype=torch.int64, device=values.device)
    lengths[rank] = len(values)
    ends = sum_over_ranks(lengths).cumsum(dim=0).tolist()
    mine = slice(ends[rank] - len(values), ends[rank])
    everyones = values.new_zeros(ends[-1])
    everyones[mine] = values
    return sum_over_ranks(everyones), mine


def gather_objects(own: T) -> list[T]:
    """Return every rank's object, which must be picklable; collective."""
    if not dist.is_initialized():
        return [own]
    objects: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(objects, own)
    return objects


def _all_reduce(values: Tensor, operation: dist.ReduceOp.RedOpType) -> Tensor:
    if not dist.is_initialized():
        return values
    reduced = values.clone()
    dist.all_reduce(reduced, op=operation, group=_rows)
    return reduced
