"""The process that checks one node before a run, and measures collectives with those of other nodes."""

import time
from collections.abc import Callable
from typing import Any

_COLLECTIVE_BYTES = 16 * 2**20
_REPEATS = 3


class ProbeActor:
    """One per node; each call has time-outs of its own."""

    def __init__(self) -> None:
        # Here, as the first answer may take the time of a start; the controller imports this module without torch.
        from areal_lite.train import distributed

        self._distributed = distributed

    def call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a function in this process."""
        return function(*args, **kwargs)

    def open_store(self, address: str, ports: range) -> str:
        """Open the store of the process group; returns its address."""
        self._store = self._distributed.open_store(address, ports)
        return f"{self._store.host}:{self._store.port}"


def measure_collectives(
    store: str, rank: int, world_size: int, device: str, *, timeout_s: float
) -> tuple[float, float]:
    """Return the bandwidth (MB/s of payload) of an all-reduce and of a broadcast from rank 0, over all nodes."""
    import torch
    import torch.distributed as dist

    from areal_lite.train.distributed import join_process_group, leave_process_group

    join_process_group(store, rank=rank, world_size=world_size, device=device, timeout_s=timeout_s)
    payload = torch.ones(_COLLECTIVE_BYTES // 4, device=device)
    try:
        dist.all_reduce(payload)  # the first one makes the connections
        reduced = _rate(lambda: dist.all_reduce(payload), device)
        return reduced, _rate(lambda: dist.broadcast(payload, src=0), device)
    finally:
        leave_process_group()


def _rate(collective: Callable[[], object], device: str) -> float:
    begun = time.perf_counter()
    for _ in range(_REPEATS):
        collective()
    if device == "cuda":
        import torch

        torch.cuda.synchronize()
    return _REPEATS * _COLLECTIVE_BYTES / 1e6 / (time.perf_counter() - begun)
