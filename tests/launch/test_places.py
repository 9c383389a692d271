"""Where a run's sockets and processes are, with one node and with several, and what actors ask of Ray.

Ray's view of the nodes is faked; the plan is a pure function of the recipe and of what the nodes have.
"""

from types import SimpleNamespace
from typing import Any

import pytest
from warm_workers import OF_ACTORS, seen

from areal_lite import network
from areal_lite.config.recipe import Config, load_config, parse_config
from areal_lite.errors import ConfigError
from areal_lite.events import clock_variables
from areal_lite.launch.run import places
from areal_lite.launch.run.places import Places, actor_options, with_network
from areal_lite.launch.run.plan import NOWHERE, Bundle, Node, place_for, plan
from areal_lite.rollout.engine_settings import engine_arguments


@pytest.fixture
def fake_ray(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Two nodes that are alive; the way to 10.0.0.1 starts here at 10.0.0.2, that to any other at 127.0.0.1."""
    fake = SimpleNamespace(
        alive=[True, True, False],
        nodes=lambda: [{"Alive": alive} for alive in fake.alive],
        get_runtime_context=lambda: SimpleNamespace(gcs_address="10.0.0.1:6379"),
    )
    monkeypatch.setattr(places, "ray", fake)
    monkeypatch.setattr(network, "_addresses", lambda: {"127.0.0.1": "lo", "10.0.0.2": "eth0"})
    monkeypatch.setattr(network, "address_towards", lambda peer: "10.0.0.2" if peer == "10.0.0.1" else "127.0.0.1")
    return fake


@pytest.mark.parametrize(
    ("alive", "network", "settled"),
    [([True, False], "10.0.0.0/24", None), ([True, True], None, "10.0.0.1"), ([True, True], "eth0", "eth0")],
    ids=["one node stays on loopback", "several use the way to Ray's head", "the recipe's comes first"],
)
def test_the_network_of_a_run(
    fake_ray: SimpleNamespace, alive: list[bool], network: str | None, settled: str | None
) -> None:
    """Seen failing with the address of the only node, and with loopback, where the second node found nobody."""
    fake_ray.alive = alive
    assert with_network(parse_config({"run": {"network": network}})).run.network == settled


def test_a_way_that_starts_on_loopback_is_refused_with_several_nodes(fake_ray: SimpleNamespace) -> None:
    """As that to a host name which is this machine's own."""
    with pytest.raises(ConfigError, match=r"got 127\.0\.0\.1 on this one, .* to other starts: set run\.network"):
        with_network(parse_config({"run": {"network": "other"}}))


def test_a_worker_whose_node_is_gone_and_a_new_one_get_a_place_where_there_is_room(
    fake_ray: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray would wait for the node. Seen failing with nodes that Ray only remembers.

    All is given back at the end, but to a head that is lost: Ray would wait for it until it ends the process. Seen
    failing without the look at it.
    """
    alive = [Node(address="10.0.0.2", key="one", cores=4, gpus=0, free_gpus=0)]
    gone = Node(address="10.0.0.3", key="two", cores=4, gpus=0, free_gpus=0)
    fake_ray.nodes = lambda: [{"NodeID": node.key, "Alive": node in alive} for node in (*alive, gone)]
    reserved, freed = list[Bundle](), list[Any]()

    def reserve(bundles: list[Bundle], _: list[Node]) -> Any:
        reserved.extend(bundles)
        return SimpleNamespace(id=len(reserved)) if len(reserved) < 4 else None

    monkeypatch.setattr(places, "_nodes", lambda: alive)
    monkeypatch.setattr(places, "_reserved", reserve)
    monkeypatch.setattr(places, "remove_placement_group", lambda group: freed.append(group.id))
    bundles = [Bundle(node=index, gpus=0, lanes=(f"rollout/{index}",)) for index in (0, 1)]
    first: Any = SimpleNamespace(id=0)
    settled = Places(parse_config({}), first, bundles, [*alive, gone], "logs")
    assert settled.has_place("rollout/0")
    assert reserved == []
    assert settled.has_place("rollout/1")
    alive.append(Node(address="10.0.0.4", key="three", cores=4, gpus=0, free_gpus=0))
    assert settled.has_place("rollout/2")
    assert settled.has_place("rollout/1"), "it has one now"
    assert [(bundle.lanes, bundle.node) for bundle in reserved] == [(("rollout/1",), 0), (("rollout/2",), 1)]
    assert list(settled.placement.lines()) == [
        " (10.0.0.2): rollout/0, rollout/1", " (10.0.0.3): nothing", " (10.0.0.4): rollout/2"
    ]  # fmt: skip
    assert settled.has_place("rollout/3")
    assert not settled.has_place("rollout/4"), "others were quicker"
    monkeypatch.setattr(places, "listens", lambda *_, **__: False)
    settled.give_back()
    assert freed == []
    monkeypatch.setattr(places, "listens", lambda address, **_: address == "10.0.0.1:6379")
    settled.give_back()
    assert freed == [0, 1, 2, 3]


def test_over_ipc_an_engine_stays_with_its_rank(fake_ray: SimpleNamespace) -> None:
    fake_ray.nodes = list
    group: Any = None
    config = parse_config({"weights": {"transport": "ipc"}, "run": {"device": "cuda"}})
    settled = Places(config, group, [], [], "logs")
    assert not settled.has_place("rollout/0")


def test_the_head_is_lost_when_it_gave_no_answer_twice(
    fake_ray: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A moment without an answer stops no run. Seen failing with one look."""
    group: Any = None
    settled = Places(parse_config({}), group, [], [], "logs")
    clock, answers = SimpleNamespace(now=0.0), [False, True, False, False]
    monkeypatch.setattr(places, "time", SimpleNamespace(monotonic=lambda: clock.now))
    monkeypatch.setattr(places, "listens", lambda address, **_: address == "10.0.0.1:6379" and answers.pop(0))
    seen = []
    for _ in range(20):
        clock.now += 1
        seen.append(settled.head_is_lost())
    assert seen == [False] * 18 + [True] * 2
    assert answers == []


# --- which node each process goes to ---


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


# --- what each kind of actor asks of Ray ---


KINDS = ["queue", "rollout", "verifier", "trainer"]


def gpu_config(**sections: dict[str, Any]) -> Config:
    return parse_config({"run": {"device": "cuda"}, "weights": {"transport": "nccl"}} | sections)


@pytest.mark.parametrize("kind", KINDS)
def test_a_laptop_reserves_nothing(kind: str) -> None:
    """A run has more processes than a laptop has cores. Seen failing with one CPU reserved per actor."""
    options = actor_options(load_config("arith_cpu"), kind)
    assert options["num_cpus"] == 0
    assert options.get("num_gpus", 0) == 0
    assert options["max_restarts"] == 0, "a restarted engine would hold the initial weights"


@pytest.mark.parametrize(
    ("sections", "gpus"),
    [({"rollout": {"tensor_parallel": 2}}, [0, 2, 0, 1]), ({"weights": {"transport": "ipc"}}, [0, 0.5, 0, 0.5])],
)
def test_engines_and_ranks_reserve_gpus_and_the_others_none(sections: dict[str, Any], gpus: list[float]) -> None:
    """Over ipc they share each. Seen failing with whole GPUs there: a rank would wait for a second GPU forever."""
    config = gpu_config(**sections)
    assert [actor_options(config, kind).get("num_gpus", 0) for kind in KINDS] == gpus


@pytest.mark.parametrize("kind", KINDS)
def test_the_recipes_environment_reaches_every_actor_and_comes_first(kind: str) -> None:
    """Seen failing without it: a raylet inherits the environment of the process that started it."""
    config = parse_config({"run": {"env": {"HF_HOME": "/data", "TOKENIZERS_PARALLELISM": "true"}}})
    environment = actor_options(config, kind)["runtime_env"]["env_vars"]
    assert {key: environment[key] for key in config.run.env} == config.run.env
    assert clock_variables().items() <= environment.items()


@pytest.mark.parametrize("kind", KINDS)
def test_the_tests_own_ray_can_copy_every_actor(kind: str) -> None:
    """Otherwise each imports vLLM for itself: runs pass, twice as slow. Seen failing with `MALLOC_ARENA_MAX`."""
    assert seen(actor_options(load_config("arith_cpu"), kind)["runtime_env"]["env_vars"]) == OF_ACTORS


def test_an_engine_of_several_gpus_starts_its_processes_itself() -> None:
    """In a placement group vLLM would ask Ray for actors. Seen failing with vLLM's own choice."""
    arguments = {n: engine_arguments(gpu_config(rollout={"tensor_parallel": n}), model_folder="m") for n in (1, 2)}
    assert {n: found["distributed_executor_backend"] for n, found in arguments.items()} == {1: "uni", 2: "mp"}


def test_thread_counts_are_the_recipes() -> None:
    """Seen failing with the trainer's threads for all."""
    config = parse_config({"rollout": {"threads": 3}, "trainer": {"threads": 5}})
    threads = {kind: actor_options(config, kind)["runtime_env"]["env_vars"]["OMP_NUM_THREADS"] for kind in KINDS}
    assert threads == {"queue": "1", "rollout": "3", "verifier": "1", "trainer": "5"}
    owners = {
        "MALLOC_ARENA_MAX": "trainer",
        "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "rollout",
        "MALLOC_MMAP_THRESHOLD_": "rollout",
    }
    for name, owner in owners.items():
        assert [kind for kind in KINDS if name in actor_options(config, kind)["runtime_env"]["env_vars"]] == [owner]


def test_a_rank_can_tell_its_progress_while_it_works() -> None:
    """I6: the watchdog asks beside a running step. Seen failing with a concurrency of 1."""
    config = load_config("arith_cpu")
    assert actor_options(config, "trainer")["max_concurrency"] == 3
    assert all(actor_options(config, kind)["max_concurrency"] >= 100 for kind in ("rollout", "verifier"))
