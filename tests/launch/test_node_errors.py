"""Errors of a run on several nodes say where its processes are, and which nodes are out of reach."""

import socket
from collections.abc import Iterator

import pytest

from areal_lite.errors import StallError, TrainerError
from areal_lite.launch.run.placement import Placement
from areal_lite.launch.run.plan import Bundle, Node


def node(name: str, port: int) -> Node:
    return Node(name=name, key=name, address="127.0.0.1", port=port, cores=1, gpus=0, free_gpus=0)


@pytest.fixture
def nodes() -> Iterator[list[Node]]:
    """Two nodes listen, the third does not."""
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        port = server.getsockname()[1]
        yield [node("one", port), node("two", port), node("three", closed.getsockname()[1])]


@pytest.fixture
def where(nodes: list[Node]) -> Placement:
    lanes = [("queue",), ("trainer/0",), ("trainer/1",), ("trainer/10",), ("rollout/0",)]
    return Placement(
        nodes, [Bundle(node=n, gpus=0, lanes=names) for n, names in zip([0, 0, 1, 1, 2], lanes, strict=True)]
    )


def test_an_error_names_nodes(where: Placement) -> None:
    """Seen failing with a search that finds trainer/1 in trainer/10."""
    error = where.with_nodes(StallError("late: trainer/10"))
    assert isinstance(error, StallError)
    assert str(error) == (
        "late: trainer/10; trainer/10: on two (127.0.0.1); three (127.0.0.1) is unreachable from one (127.0.0.1): it, "
        "its link or its Ray is down; it ran rollout/0"
    )


def test_one_node_and_errors_of_others_stay_as_they_are(nodes: list[Node], where: Placement) -> None:
    error, other = TrainerError("trainer/0 died"), KeyError("trainer/0")
    assert alone(nodes[0]).with_nodes(error) is error
    assert where.with_nodes(other) is other


def test_a_dead_raylet_is_named_before_what_died_of_it(nodes: list[Node], where: Placement) -> None:
    """Seen failing with a trainer rank that is blamed, and waited for in vain."""
    closed = nodes[2]
    error = alone(closed).with_nodes(TrainerError("trainer/0 died"))
    assert (
        str(error)
        == "Ray on this machine (its raylet) is down, with all processes that it ran; first error: trainer/0 died"
    )
    assert isinstance(error, TrainerError)
    assert alone(closed).out_of_reach() == [closed]
    assert [where.reaches(lane) for lane in ("queue", "trainer/10", "rollout/0")] == [True, True, False]


def alone(single: Node) -> Placement:
    return Placement([single], [Bundle(node=0, gpus=0, lanes=("trainer/0",))])
