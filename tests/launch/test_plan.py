"""Which node each process goes to: a pure function of the recipe and of what the nodes have."""

from collections import Counter
from typing import Any

import pytest

from areal_lite.config.recipe import Config, parse_config
from areal_lite.launch.run.plan import NOWHERE, Bundle, Node, place_for, plan, table


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


def cpu_recipe(*, ranks: int, engines: int, verifiers: int = 1) -> Config:
    raw = {"trainer": {"ranks": ranks}, "rollout": {"workers": engines}, "verifier": {"workers": verifiers}}
    return parse_config(raw)


def where(bundles: list[Bundle], role: str) -> list[int]:
    """The node of each process of a role."""
    return [bundle.node for bundle in bundles for lane in bundle.lanes if lane.partition("/")[0] == role]


def gpus_at(bundles: list[Bundle]) -> Counter[int]:
    taken: Counter[int] = Counter()
    for bundle in bundles:
        taken[bundle.node] += bundle.gpus
    return taken


def test_ranks_lie_together_and_engines_are_whole() -> None:
    """4 ranks and 3 engines of 2 GPUs on two nodes of 8. Seen failing with processes dealt out in turn."""
    bundles = plan(recipe(ranks=4, engines=3, tensor_parallel=2), nodes_of(8, 8))
    assert where(bundles, "trainer") == [0, 0, 0, 0]
    assert where(bundles, "rollout") == [1, 1, 0]
    assert gpus_at(bundles) == {0: 6, 1: 4}
    assert [bundle.gpus for bundle in bundles if bundle.lanes[0].startswith("rollout")] == [2, 2, 2]


def test_ranks_leave_a_whole_node_to_an_engine_that_needs_it() -> None:
    """Seen failing with one order alone: the ranks took the roomiest node."""
    bundles = plan(recipe(ranks=6, engines=1, tensor_parallel=8), nodes_of(8, 6))
    assert where(bundles, "trainer") == [1] * 6
    assert where(bundles, "rollout") == [0]


def test_more_ranks_than_a_node_has_gpus_fill_one_and_go_on_with_the_next() -> None:
    bundles = plan(recipe(ranks=9, engines=1, tensor_parallel=4), nodes_of(8, 8))
    assert where(bundles, "trainer") == [0] * 8 + [1]
    assert where(bundles, "rollout") == [1]


def test_ranks_are_split_where_engines_find_no_room_otherwise() -> None:
    """Two nodes of 3: with both ranks on one, only one engine of 2 fits. Seen failing with one order alone."""
    bundles = plan(recipe(ranks=2, engines=2, tensor_parallel=2), nodes_of(3, 3))
    assert sorted(where(bundles, "rollout")) == sorted(where(bundles, "trainer")) == [0, 1]


def test_over_ipc_an_engine_and_a_rank_share_a_bundle_of_one_gpu() -> None:
    """So that they share a GPU, and not just a node. Seen failing with bundles of their own."""
    bundles = plan(recipe(ranks=3, engines=2, transport="ipc"), nodes_of(2, 2))
    on_gpu = [bundle.lanes for bundle in bundles if bundle.gpus]
    assert on_gpu == [("trainer/0", "rollout/0"), ("trainer/1", "rollout/1"), ("trainer/2",)]
    assert gpus_at(bundles) == {0: 2, 1: 1}


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


def test_a_laptop_holds_everything() -> None:
    """More processes than cores. Seen failing with cores that cannot be shared."""
    bundles = plan(cpu_recipe(ranks=4, engines=3), nodes_of(0, cores=2))
    assert {bundle.node for bundle in bundles} == {0}
    assert {bundle.gpus for bundle in bundles} == {0}


def test_on_cpu_nodes_ranks_lie_together_and_engines_have_the_rest() -> None:
    bundles = plan(cpu_recipe(ranks=2, engines=2), nodes_of(0, 0, cores=2))
    assert where(bundles, "trainer") == [0, 0]
    assert where(bundles, "rollout") == [1, 1]


def test_on_a_cpu_an_engine_of_two_processes_takes_two_cores() -> None:
    """Seen failing with the threads of one of them."""
    config = parse_config({"trainer": {"ranks": 2}, "rollout": {"workers": 2, "tensor_parallel": 2}})
    assert where(plan(config, nodes_of(0, 0, cores=4)), "rollout") == [1, 0]


@pytest.mark.parametrize(("ranks", "engines", "parallel"), [(1, 1, 8), (9, 4, 2), (1, 9, 2)])
def test_what_does_not_fit_is_nowhere(ranks: int, engines: int, parallel: int) -> None:
    """The first has GPUs enough, but an engine is not split. Seen failing with a sum over the nodes."""
    bundles = plan(recipe(ranks=ranks, engines=engines, tensor_parallel=parallel), nodes_of(4, 4, 8 * (parallel < 8)))
    assert NOWHERE in where(bundles, "rollout") + where(bundles, "trainer")


def test_the_table_has_a_row_per_node_and_one_for_what_fits_on_none() -> None:
    nodes = nodes_of(8, 8, free=(8, 3))
    lines = table(plan(recipe(ranks=4, engines=7, tensor_parallel=2), nodes), nodes).splitlines()
    assert [line.split() for line in lines] == [
        ["node", "needed", "there", "free", "for"],
        ["10.0.0.1", "8", "8", "8", "4", "x", "rollout", "of", "2"],
        ["10.0.0.2", "8", "8", "3", "3", "x", "rollout", "of", "2,", "2", "x", "trainer", "of", "1"],
        ["no", "node", "2", "2", "x", "trainer", "of", "1"],
    ]


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
