"""Which node each process of a run goes to. Pure: `places.py` gets the nodes from Ray and reserves the plan there.

Trainer ranks share a node if they fit, an engine is never split over nodes, verifiers are spread, and the queue is on
the driver's node. Ray's own strategies do not give this: PACK places large bundles first, and so may split the ranks,
and it reserves cores, of which a laptop has fewer than a run has processes. The profile of a job is checked by the same
plan, before there is a cluster.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from areal_lite.config.offline import OfflineConfig
from areal_lite.config.recipe import Config

NOWHERE = -1
"""Stands for the number of a node if no node has room."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """What a node has; the driver's is number 0."""

    address: str
    name: str = ""
    """Host name."""
    port: int = 0
    """Port of its raylet."""
    key: str = ""
    """Ray's id of the node."""
    cores: int
    gpus: int
    free_gpus: int
    """GPUs that no run has reserved."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bundle:
    """Processes that share a reservation, by lane name: one process, or an engine and its rank over IPC."""

    node: int
    gpus: int
    lanes: tuple[str, ...]


def plan(config: Config | OfflineConfig, nodes: Sequence[Node], *, only_free: bool = False) -> list[Bundle]:
    """Assign a node to every process; bundles without room are at `NOWHERE`.

    Args:
        only_free: Skip GPUs that other runs have reserved.
    """
    on_gpu = config.run.device == "cuda"
    ranks: list[tuple[str, ...]] = [(f"trainer/{index}",) for index in range(config.trainer.ranks)]
    engines, others, engine_size = list[tuple[str, ...]](), list[Bundle](), 0
    if isinstance(config, Config):
        if not config.rollout.servers:  # a worker of theirs takes neither a GPU nor cores
            engine_size = config.rollout.tensor_parallel * (1 if on_gpu else config.rollout.threads)
        engines = [(f"rollout/{index}",) for index in range(config.rollout.workers)]
        if config.weights.transport == "ipc":  # an engine sees the weights of a rank on its own GPU alone
            pairs = [rank + engine for rank, engine in zip(ranks, engines, strict=False)]
            ranks, engines = pairs + ranks[len(pairs) :], []
        working = [number for number, node in enumerate(nodes) if node.cores] or [0]
        verifiers = [f"verifier/{index}" for index in range(config.verifier.workers)]
        others = [Bundle(node=0, gpus=0, lanes=("queue",))]
        others += [Bundle(node=working[i % len(working)], gpus=0, lanes=(name,)) for i, name in enumerate(verifiers)]
    rank_size = 1 if on_gpu else config.trainer.threads
    # Packing the ranks first may leave no node with room for an engine; the other order finds room if there is any.
    for engines_first in (False, True):
        space = [(node.free_gpus if only_free else node.gpus) if on_gpu else node.cores for node in nodes]
        steps = [(ranks, rank_size, True), (engines, engine_size, False)]
        bundles = list(others)
        for lanes, size, together in reversed(steps) if engines_first else steps:
            at = _nodes_for(len(lanes), size, space, together=together, crowded=not on_gpu)
            bundles += [
                Bundle(node=node, gpus=size * on_gpu, lanes=names) for node, names in zip(at, lanes, strict=True)
            ]
        if all(bundle.node != NOWHERE for bundle in bundles):
            break
    return bundles


def place_for(lane: str, config: Config, nodes: Sequence[Node], *, lanes_at: Mapping[str, int]) -> Bundle:
    """Assign a node, or `NOWHERE`, to one more worker of an active run.

    Args:
        lanes_at: Number of the run's processes by node id; without GPUs, the node with most cores left wins.
    """
    gpus = config.engine_gpus if lane.startswith("rollout") else 0
    space = [node.free_gpus if gpus else node.cores - lanes_at.get(node.key, 0) for node in nodes]
    working = [number for number, node in enumerate(nodes) if gpus or node.cores] or [0]
    (index,) = _nodes_for(1, gpus or 1, [space[number] for number in working], together=False, crowded=not gpus)
    return Bundle(node=index if index == NOWHERE else working[index], gpus=gpus, lanes=(lane,))


def _nodes_for(count: int, size: int, space: list[int], *, together: bool, crowded: bool) -> list[int]:
    """Take `size` from `space` `count` times, and return the nodes; the first of equal nodes wins."""
    found: list[int] = []
    for _ in range(count):
        roomiest = max(range(len(space)), key=lambda node: space[node])
        if together and found and found[-1] != NOWHERE and space[found[-1]] >= size:
            node = found[-1]
        else:
            node = roomiest if crowded or space[roomiest] >= size else NOWHERE
        found.append(node)
        if node != NOWHERE:
            space[node] -= size
    return found


def table(bundles: Sequence[Bundle], nodes: Sequence[Node]) -> str:
    """Draw a table of GPUs by node: needed, there and free."""
    names = {number: node.address for number, node in enumerate(nodes)} | {NOWHERE: "no node"}
    rows = [("node", "needed", "there", "free", "for")]
    for number, name in names.items():
        here = [bundle for bundle in bundles if bundle.node == number and bundle.gpus]
        kinds = Counter(f"{'+'.join(lane.partition('/')[0] for lane in b.lanes)} of {b.gpus}" for b in here)
        needed, why = str(sum(b.gpus for b in here)), ", ".join(f"{n} x {kind}" for kind, n in kinds.items())
        if number != NOWHERE:
            rows.append((name, needed, str(nodes[number].gpus), str(nodes[number].free_gpus), why))
        elif here:
            rows.append((name, needed, "", "", why))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)
