"""Where a run's sockets are, with one node and with several; Ray's view of the nodes is faked."""

from types import SimpleNamespace
from typing import Any

import pytest

from areal_lite import network
from areal_lite.config.recipe import parse_config
from areal_lite.errors import ConfigError
from areal_lite.launch.run import places
from areal_lite.launch.run.places import Places, with_network
from areal_lite.launch.run.plan import Bundle, Node


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
