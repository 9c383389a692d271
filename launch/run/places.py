"""Reserves a place in the Ray cluster for each process of a run, and starts processes there."""

import contextlib
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from areal_lite.actors.calls import Calls, death, has_died
from areal_lite.actors.process import log_path
from areal_lite.config.offline import OfflineConfig
from areal_lite.config.recipe import Config
from areal_lite.errors import ArealLiteError, ConfigError, EngineError, QueueError, RankDied, StallError
from areal_lite.events import clock_variables
from areal_lite.launch.run.placement import Placement
from areal_lite.launch.run.plan import NOWHERE, Bundle, Node, place_for, plan, table
from areal_lite.network import address_towards, interface_of, listens, local_address

_RETRY_S = 1.0
"""Between looks at the cluster while a run waits for GPUs."""
_RESERVE_TIMEOUT_S = 10.0
"""For GPUs that were free a moment ago."""
_LOOK_EVERY_S = 5.0
"""Between probes of Ray's head, and the longest duration of one."""


class Places:
    """What a run has reserved."""

    def __init__(
        self, config: Config | OfflineConfig, group: PlacementGroup, bundles: list[Bundle], nodes: list[Node], logs: str
    ) -> None:
        self.config: Any = config
        """The recipe with its network settled."""
        self.logs = logs
        """Folder of the actors' logs."""
        self.placement = Placement(nodes, bundles)
        self._head, self._looks_at, self._unanswered = ray.get_runtime_context().gcs_address, 0.0, 0
        self._place_of = {lane: (group, index) for index, bundle in enumerate(bundles) for lane in bundle.lanes}

    def spawn(self, kind: type, lane: str, **arguments: Any) -> Any:
        """Start the actor of a lane such as `rollout/0`; returns its handle without waiting."""
        strategy = PlacementGroupSchedulingStrategy(*self._place_of[lane])
        options = actor_options(self.config, lane.partition("/")[0])
        actor = ray.remote(kind).options(scheduling_strategy=strategy, **options)
        return actor.remote(self.config, log_folder=self.logs, **arguments)

    def wait_until_started(self, starting: Calls, report: Callable[[str], object]) -> dict[str, Any]:
        """Wait for starting actors, and return their answers by lane name.

        Raises:
            StallError: Actors are late; names them.
            ArealLiteError: Raised by the actor; with its name and log added.
        """
        timeout_s = self.config.run.start_timeout_s
        for name, error in starting.answers(timeout_s):
            if error is not None:
                raise _not_started(name, error, log=log_path(self.logs, name)) from error
            missing = ", ".join(sorted(starting.pending))
            report(f"{name} is ready" + (f", waiting for {missing}" if missing else ""))
        if starting.pending:
            raise StallError(
                f"actors did not start within run.start_timeout_s={timeout_s:g} s; still missing: "
                f"{', '.join(starting.pending)}. Fix: see {self.logs}"
            )
        return starting.values

    def has_place(self, lane: str) -> bool:
        """Whether a worker can start: on its node, or, if that is gone or the worker is new, on one with room."""
        alive = {node["NodeID"] for node in ray.nodes() if node["Alive"]}
        if self.placement.key_of.get(lane) in alive:
            return True  # on a node that is gone, Ray would wait for it
        if not isinstance(self.config, Config) or self.config.weights.transport == "ipc":
            return False  # an engine shares its rank's GPU
        nodes = _nodes()
        bundle = place_for(lane, self.config, nodes, lanes_at=Counter(self.placement.key_of.values()))
        if bundle.node == NOWHERE or (group := _reserved([bundle], nodes)) is None:
            return False
        self._place_of[lane] = group, 0
        self.placement.settle(lane, nodes[bundle.node])
        return True

    def head_is_lost(self) -> bool:
        """Whether Ray's head process (GCS) did not answer twice; without it Ray ends all processes after a minute."""
        if (now := time.monotonic()) > self._looks_at:
            self._looks_at = now + _LOOK_EVERY_S
            self._unanswered = 0 if listens(self._head, timeout_s=_LOOK_EVERY_S) else self._unanswered + 1
        return self._unanswered > 1

    def give_back(self) -> None:
        """Free all reservations, unless Ray's head is lost: Ray would wait for it."""
        if listens(self._head, timeout_s=_LOOK_EVERY_S):
            for group in {group.id: group for group, _ in self._place_of.values()}.values():
                remove_placement_group(group)


def actor_options(config: Config | OfflineConfig, kind: str) -> dict[str, Any]:
    """Return the `ray.remote(...).options` of one actor.

    An actor takes its GPUs from what is reserved for it. CPU cores are not reserved: the recipe's thread
    counts share them out, and a laptop has fewer cores than the run has processes.

    Args:
        kind: `queue`, `rollout`, `verifier` or `trainer`.
    """
    gpus, threads, calls_at_once = 0.0, 1, 1
    if kind == "trainer":  # One thread works, one writes checkpoints, one answers `progress`.
        gpus, threads, calls_at_once = 1, config.trainer.threads, 3
    elif kind != "queue":
        calls_at_once = 1000
    if isinstance(config, Config):
        if kind == "rollout":
            gpus, threads = config.engine_gpus, config.rollout.threads
        if config.weights.transport == "ipc":  # an engine and its rank share one
            gpus /= 2
    environment = {"TOKENIZERS_PARALLELISM": "false"} | clock_variables()
    if kind == "trainer":
        # Any of the three threads may get the next step. With an arena each, glibc kept the largest step's free memory
        # three times: 10.8 GB for SmolLM2-135M in place of 5.2.
        environment["MALLOC_ARENA_MAX"] = "1"
    elif kind == "rollout":
        # On a CPU, oneDNN keeps a kernel for each size of batch that an engine meets: 1,024 by default, +8 % of memory
        # within 20 minutes. A synchronous batch that shrinks from 64 samples to 1 needs some 320 in each trainer step.
        environment["ONEDNN_PRIMITIVE_CACHE_CAPACITY"] = "512"
        # glibc raises this limit to 32 MiB as large tensors are freed, and the holes that others leave stay with it: an
        # engine core without it grew by 7 % in 20 minutes. It costs about 3 % of a tiny model's step (docs/log.md).
        environment["MALLOC_MMAP_THRESHOLD_"] = str(2**20)
    return {
        "num_cpus": 0,
        "num_gpus": gpus if config.run.device == "cuda" else 0,
        "max_restarts": 0,
        "max_concurrency": calls_at_once,
        "runtime_env": {"env_vars": environment | {"OMP_NUM_THREADS": str(threads)} | config.run.given_env},
    }


def _not_started(name: str, error: Exception, *, log: str) -> Exception:
    if isinstance(error, ArealLiteError):
        return type(error)(f"{name} did not start: {error} (log: {log})")
    if has_died(error):
        kinds: dict[str, type[ArealLiteError]] = {"queue": QueueError, "trainer": RankDied}
        kind = kinds.get(name.partition("/")[0], EngineError)
        return kind(f"{name} did not start: {death(error)} (log: {log})")
    return error


@contextlib.contextmanager
def places_for(config: Config | OfflineConfig, *, logs: Path, report: Callable[[str], object]) -> Iterator[Places]:
    """Reserve what a run needs until the end of the block; actors write into the folder `logs`.

    Waits for GPUs that other runs hold, up to `run.start_timeout_s`.

    Raises:
        ConfigError: The cluster has too few GPUs, or too few on one node; or as `with_network`.
        StallError: Others held them too long.
    """
    settled = with_network(config)
    if settled.run.network is not None:
        address = local_address(settled.run.network)
        report(f"nodes connect over {interface_of(address)} (here {address}; run.network), ports {settled.run.ports}")
    group, bundles, nodes = _reserve(settled, report=report)
    places = Places(settled, group, bundles, nodes, str(logs))
    for line in places.placement.lines():
        report(line)
    try:
        yield places
    finally:
        places.give_back()


def _reserve(
    config: Config | OfflineConfig, *, report: Callable[[str], object]
) -> tuple[PlacementGroup, list[Bundle], list[Node]]:
    deadline, is_reported = time.monotonic() + config.run.start_timeout_s, False
    while True:
        nodes = _nodes()
        bundles, most = plan(config, nodes, only_free=True), plan(config, nodes)
        if any(bundle.node == NOWHERE for bundle in most):
            raise ConfigError(
                f"the run must fit into the cluster's GPUs, an engine on one node; it does not:\n{table(most, nodes)}\n"
                "lower rollout.workers, rollout.tensor_parallel or trainer.ranks, or join more nodes to the Ray cluster"
            )
        has_room = all(bundle.node != NOWHERE for bundle in bundles)
        if has_room and (group := _reserved(bundles, nodes)) is not None:
            return group, bundles, nodes
        if time.monotonic() > deadline:
            raise StallError(
                f"GPUs did not get free within run.start_timeout_s={config.run.start_timeout_s:g} s; other runs hold "
                f"them:\n{table(most, nodes)}\nFix: wait for them, or raise run.start_timeout_s"
            )
        if not is_reported:
            report(f"waiting for GPUs that other runs hold:\n{table(most, nodes)}")
            is_reported = True
        time.sleep(_RETRY_S)


def _reserved(bundles: list[Bundle], nodes: list[Node]) -> PlacementGroup | None:
    """Reserve bundles; None if another run was quicker."""
    group = placement_group(
        [{f"node:{nodes[bundle.node].address}": 0.001, "GPU": bundle.gpus} for bundle in bundles],
        bundle_label_selector=[{"ray.io/node-id": nodes[bundle.node].key} for bundle in bundles],
    )
    if group.wait(_RESERVE_TIMEOUT_S):
        return group
    remove_placement_group(group)
    return None


def _nodes() -> list[Node]:
    """Return the live nodes, the driver's first."""
    free = ray._private.state.available_resources_per_node()  # Ray has no public way to ask by node
    here = ray.get_runtime_context().get_node_id()
    alive = [node for node in ray.nodes() if node["Alive"]]
    return [
        Node(
            address=node["NodeManagerAddress"],
            name=node["NodeManagerHostname"],
            port=node["NodeManagerPort"],
            key=node["NodeID"],
            cores=int(node["Resources"].get("CPU", 0)),
            gpus=int(node["Resources"].get("GPU", 0)),
            free_gpus=int(free.get(node["NodeID"], {}).get("GPU", 0)),
        )
        for node in sorted(alive, key=lambda node: (node["NodeID"] != here, node["NodeManagerAddress"]))
    ]


def with_network(config: Config | OfflineConfig) -> Config | OfflineConfig:
    """Set `run.network`: the recipe's, or the route to Ray's head or a server; none on one node, which uses loopback.

    Raises:
        ConfigError: Other nodes could not reach the sockets of this one.
    """
    servers = config.rollout.servers if isinstance(config, Config) else ()
    is_alone = sum(node["Alive"] for node in ray.nodes()) < 2
    network = config.run.network if servers or not is_alone else None
    if network is None and servers:
        hosts = [urlsplit(server).hostname or "" for server in servers]
        network = next((host for host in hosts if not address_towards(host).startswith("127.")), None)
    if network is None and not is_alone:
        network = ray.get_runtime_context().gcs_address.rpartition(":")[0]
    config = config.model_copy(update={"run": config.run.model_copy(update={"network": network})})
    if network is None:
        return config
    if (address := local_address(config.run.network)).startswith("127."):
        raise ConfigError(
            f"with several nodes each must have an address that the others reach, got {address} on this one, where the "
            f"route to {config.run.network} starts: set run.network to a subnet or interface that all nodes share"
        )
    return config
