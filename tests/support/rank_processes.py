"""Runs a function on several real trainer ranks: processes of their own, joined over gloo."""

from collections.abc import Callable
from typing import Any

import torch
from torch import multiprocessing

from areal_lite.config.sections import MeshConfig
from areal_lite.train.distributed import join_process_group, leave_process_group, open_store

PRELOADED = ["areal_lite.train.offline", "areal_lite.weights.publisher", "torch.distributed.checkpoint"]
"""Imported once, by the server that the ranks of all tests are forked from."""


def run_ranks(
    function: Callable[..., None], *arguments: Any, world_size: int = 2, mesh: dict[str, int] | None = None
) -> None:
    """Call `function(rank, world_size, *arguments)` on each rank; an error on any of them is raised here.

    A single rank runs in this process, which saves importing torch again.
    """
    store = open_store("127.0.0.1", range(20000, 22000))
    address = f"{store.host}:{store.port}"
    if world_size == 1:
        _rank(0, 1, address, {}, function, arguments)
        return
    multiprocessing.get_context("forkserver").set_forkserver_preload(PRELOADED)
    multiprocessing.start_processes(
        _rank, args=(world_size, address, mesh or {}, function, arguments), nprocs=world_size, start_method="forkserver"
    )


def _rank(
    rank: int,
    world_size: int,
    address: str,
    mesh: dict[str, int],
    function: Callable[..., None],
    arguments: tuple[Any, ...],
) -> None:
    torch.set_num_threads(1)
    join_process_group(
        address, rank=rank, world_size=world_size, device="cpu", timeout_s=120.0, mesh=MeshConfig(**mesh)
    )
    try:
        function(rank, world_size, *arguments)
    finally:
        leave_process_group()
