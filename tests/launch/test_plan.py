"""Which node each process goes to: a pure function of the recipe and of what the nodes have."""

from typing import Any

import pytest

from areal_lite.config.recipe import Config, parse_config
from areal_lite.launch.run.plan import NOWHERE, Bundle, Node, place_for, plan


def nodes_of(*gpus: int, cores: int = 16, free: tuple[int, ...] | None = None) -> list[Node]:
    return [
        Node(address=f"10.0.0.{number + 1}", cores=cores, gpus=there, free_gpus=unused)
        for number, (there, unused) in enumerate(zip(gpus, free or gpus, strict=True))
    ]


def recipe(*, ranks: int, engines: int, tensor_parallel: int = 1, transport: str = "nccl", **more: Any) -> Config:
    raw: dict[str, Any] = {
        "run": {"device": "cuda"},
        "weights": {"transport": transport},
        "trainer": {"ranks": ranks},
        "rollout": {"workers": engines, "tensor_parallel": tensor_parallel},
    }
    return parse_config(raw | more)


def cpu_recipe(*, ranks: int, engines: int, tensor_parallel: int = 1) -> Config:
    rollout = {"workers": engines, "tensor_parallel": tensor_parallel}
    return parse_config({"trainer": {"ranks": ranks}, "rollout": rollout})


def where(bundles: list[Bundle], role: str) -> list[int]:
    """The node of each process of a role."""
    return [bundle.node for bundle in bundles for lane in bundle.lanes if lane.partition("/")[0] == role]


@pytest.mark.parametrize(
    ("config", "nodes", "ranks", "engines"),
    [
        (recipe(ranks=4, engines=3, tensor_parallel=2), nodes_of(8, 8), [0] * 4, [1, 1, 0]),
        (recipe(ranks=6, engines=1, tensor_parallel=8), nodes_of(8, 6), [1] * 6, [0]),
        (recipe(ranks=9, engines=1, tensor_parallel=4), nodes_of(8, 8), [0] * 8 + [1], [1]),
        (recipe(ranks=2, engines=2, tensor_parallel=2), nodes_of(3, 3), [0, 1], [0, 1]),
        (cpu_recipe(ranks=4, engines=3), nodes_of(0, cores=2), [0] * 4, [0] * 3),
        (cpu_recipe(ranks=2, engines=2), nodes_of(0, 0, cores=2), [0, 0], [1, 1]),
        (cpu_recipe(ranks=2, engines=2, tensor_parallel=2), nodes_of(0, 0, cores=4), [0, 0], [1, 0]),
    ],
    ids=[
        "ranks together, engines whole",
        "a whole node is left to an engine",
        "more ranks than a node has GPUs",
        "ranks are split where engines find no room otherwise",
        "a laptop holds everything",
        "on CPUs engines have the rest",
        "on CPUs an engine of two processes takes two cores",
    ],
)
def test_ranks_lie_together_and_engines_are_whole(
    config: Config, nodes: list[Node], ranks: list[int], engines: list[int]
) -> None:
    """Seen failing with processes dealt out in turn, with one order alone, and with cores that cannot be shared."""
    bundles = plan(config, nodes)
    assert where(bundles, "trainer") == ranks
    assert where(bundles, "rollout") == engines
    parallel = config.rollout.tensor_parallel if config.run.device == "cuda" else 0
    assert {bundle.gpus for bundle in bundles if bundle.lanes[0].startswith("rollout")} == {parallel}


def test_over_ipc_an_engine_and_a_rank_share_a_bundle_of_one_gpu() -> None:
    """So that they share a GPU, and not just a node. Seen failing with bundles of their own."""
    bundles = plan(recipe(ranks=3, engines=2, transport="ipc"), nodes_of(2, 2))
    on_gpu = [bundle.lanes for bundle in bundles if bundle.gpus]
    assert on_gpu == [("trainer/0", "rollout/0"), ("trainer/1", "rollout/1"), ("trainer/2",)]
    assert where(bundles, "trainer") == [0, 0, 1]


def test_what_others_hold_is_passed_over_if_asked() -> None:
    nodes = nodes_of(8, 8, free=(1, 8))
    config = recipe(ranks=4, engines=2, tensor_parallel=2)
    assert where(plan(config, nodes, only_free=True), "trainer") == [1] * 4
    assert where(plan(config, nodes, only_free=False), "trainer") == [0] * 4


def test_the_queue_is_with_the_driver_and_verifiers_are_spread_over_nodes_with_cores() -> None:
    """A head without cores is not meant to compute. Seen failing with Ray's own choice: five of six on one node."""
    nodes = [Node(address="head", cores=0, gpus=0, free_gpus=0), *nodes_of(1, 1)]
    config = recipe(ranks=1, engines=1, verifier={"workers": 3})
    bundles = plan(config, nodes)
    assert where(bundles, "queue") == [0]
    assert where(bundles, "verifier") == [1, 2, 1]


@pytest.mark.parametrize(("ranks", "engines", "parallel"), [(1, 1, 8), (9, 4, 2), (1, 9, 2)])
def test_what_does_not_fit_is_nowhere(ranks: int, engines: int, parallel: int) -> None:
    """The first has GPUs enough, but an engine is not split. Seen failing with a sum over the nodes."""
    bundles = plan(recipe(ranks=ranks, engines=engines, tensor_parallel=parallel), nodes_of(4, 4, 8 * (parallel < 8)))
    assert NOWHERE in where(bundles, "rollout") + where(bundles, "trainer")


@pytest.mark.parametrize(("free", "node"), [((0, 2), 1), ((4, 2), 0), ((1, 1), NOWHERE)])
def test_one_more_engine_goes_where_its_gpus_are_free(free: tuple[int, ...], node: int) -> None:
    config = recipe(ranks=1, engines=1, tensor_parallel=2)
    assert place_for("rollout/1", config, nodes_of(8, 8, free=free), lanes_at={}).node == node


def test_one_more_verifier_or_engine_without_gpus_goes_where_most_cores_are_left() -> None:
    """A node without cores works for nobody, as crowded as others may be. Seen failing with the head of a cluster."""
    nodes = [
        Node(address=key, key=key, cores=cores, gpus=8, free_gpus=8) for key, cores in [("head", 0), ("a", 4), ("b", 6)]
    ]
    for config, lane in [(recipe(ranks=1, engines=1), "verifier/1"), (cpu_recipe(ranks=1, engines=1), "rollout/1")]:
        for lanes_at, node in [({}, 2), ({"b": 3}, 1), ({"a": 9, "b": 9}, 2)]:
            assert place_for(lane, config, nodes, lanes_at=lanes_at) == Bundle(node=node, gpus=0, lanes=(lane,))
