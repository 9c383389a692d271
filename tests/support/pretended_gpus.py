"""A program: places of runs on two real Ray nodes that pretend to have 8 GPUs each; prints what came of them."""

import json
import logging
import os
import sys
from pathlib import Path
from typing import Any

os.environ["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "0"

import ray
from ray.cluster_utils import Cluster

from areal_lite.config.recipe import Config, parse_config
from areal_lite.errors import ArealLiteError
from areal_lite.launch.run.places import places_for


class Process:
    """Says where it is."""

    def __init__(self, config: Config, *, log_folder: str) -> None:
        pass

    def where(self) -> tuple[str, str | None]:
        """Node and GPUs."""
        return ray.get_runtime_context().get_node_id(), os.environ.get("CUDA_VISIBLE_DEVICES")


def recipe(network: str, *, start_timeout_s: float = 60, transport: str = "nccl", **sections: Any) -> Config:
    """A recipe on GPUs; both nodes are this machine, so that any of its networks will do."""
    run = {"device": "cuda", "network": network, "start_timeout_s": start_timeout_s}
    return parse_config({"run": run, "weights": {"transport": transport}, "verifier": {"workers": 2}} | sections)


def found(config: Config) -> Any:
    """Where the processes of a run came to lie, or why they did not."""
    lanes = [f"trainer/{index}" for index in range(config.trainer.ranks)]
    lanes += [f"rollout/{index}" for index in range(config.rollout.workers)]
    lanes += ["queue", "verifier/0", "verifier/1"]
    try:
        with places_for(config, logs=Path("logs"), report=lambda _: None) as places:
            handles = {lane: places.spawn(Process, lane) for lane in lanes}
            return {lane: ray.get(handle.where.remote(), timeout=120) for lane, handle in handles.items()}
    except ArealLiteError as error:
        return f"{type(error).__name__}: {error}"


def main() -> None:
    """Run every case on one pair of nodes."""
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "num_gpus": 8, "include_dashboard": False})
    cluster.add_node(num_cpus=1, num_gpus=8)
    try:
        ray.init(address=cluster.address, logging_level=logging.ERROR, log_to_driver=False)
        network = cluster.address.rpartition(":")[0]
        ranks, engines = {"ranks": 4}, {"workers": 3, "tensor_parallel": 2}
        results = {
            "driver": ray.get_runtime_context().get_node_id(),
            "mixed": found(recipe(network, trainer=ranks, rollout=engines)),
            "ipc": found(recipe(network, trainer={"ranks": 2}, rollout={"workers": 2}, transport="ipc")),
            "impossible": found(recipe(network, trainer=ranks, rollout={"workers": 3, "tensor_parallel": 8})),
        }
        others = recipe(network, trainer=ranks, rollout={"workers": 4, "tensor_parallel": 2})
        with places_for(others, logs=Path("logs"), report=print):
            late = recipe(network, trainer=ranks, rollout=engines, start_timeout_s=2)
            results["busy"] = found(late)
    finally:
        ray.shutdown()
        cluster.shutdown()
    sys.stdout.write("\n" + json.dumps(results) + "\n")


if __name__ == "__main__":
    main()
