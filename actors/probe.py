"""The process that looks at one node before a run: `areal_lite/node.py`, where Ray puts it."""

import time
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from areal_lite.network import local_address
from areal_lite.node import NodeReport, look_at_node, measure_link, serve_link
from areal_lite.train.distributed import join_process_group, leave_process_group, open_store

_COLLECTIVE_BYTES = 16 * 2**20
_REPEATS = 3


class ProbeActor:
    """One per node; every answer is bounded by the time-out."""

    def __init__(self, *, network: str | None, ports: range, timeout_s: float) -> None:
        self._network, self._ports, self._timeout_s = network, ports, timeout_s

    def address(self) -> str:
        """Return the address that the run's sockets have on this node."""
        return local_address(self._network)

    def clock(self) -> float:
        """Return the wall clock, in seconds."""
        return time.time()

    def look(self, paths: Sequence[str], disk: str, environment: Sequence[str]) -> NodeReport:
        """Look at this node."""
        return look_at_node(paths, disk=disk, environment=environment)

    def serve_link(self) -> int:
        """Wait for one other node's `measure_link`; returns the port."""
        return serve_link(self.address(), self._ports, timeout_s=self._timeout_s)

    def measure_link(self, address: str, port: int) -> tuple[float, float]:
        """Return round trip (s) and bandwidth (MB/s) to another node."""
        return measure_link(address, port, timeout_s=self._timeout_s)

    def open_store(self) -> str:
        """Open the store at which all nodes meet; returns its address."""
        self._store = open_store(self.address(), self._ports)
        return f"{self._store.host}:{self._store.port}"

    def collectives(self, store: str, rank: int, world_size: int, device: str) -> tuple[float, float]:
        """Return the bandwidth (MB/s of payload) of an all-reduce and of a broadcast from rank 0, over all nodes."""
        join_process_group(store, rank=rank, world_size=world_size, device=device, timeout_s=self._timeout_s)
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
        torch.cuda.synchronize()
    return _REPEATS * _COLLECTIVE_BYTES / 1e6 / (time.perf_counter() - begun)
