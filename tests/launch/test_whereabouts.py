"""Errors of a run on several nodes say where its processes are, and which nodes are out of reach."""

import socket
from collections.abc import Iterator

import pytest

from areal_lite.errors import StallError, TrainerError
from areal_lite.launch.run.plan import Bundle, Node
from areal_lite.launch.run.whereabouts import Whereabouts


def node(name: str, port: int) -> Node:
    return Node(name=name, address="127.0.0.1", port=port, cores=1, gpus=0, free_gpus=0)


@pytest.fixture
def where() -> Iterator[Whereabouts]:
    """The second node listens, the third does not; the driver's is not asked."""
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        nodes = [node("one", 0), node("two", server.getsockname()[1]), node("three", closed.getsockname()[1])]
        lanes = [("queue",), ("trainer/0",), ("trainer/1",), ("trainer/10",), ("rollout/0",)]
        at = [0, 0, 1, 1, 2]
        yield Whereabouts(nodes, [Bundle(node=n, gpus=0, lanes=names) for n, names in zip(at, lanes, strict=True)])


def test_what_is_where(where: Whereabouts) -> None:
    assert list(where.lines()) == [
        "one (127.0.0.1): queue, trainer/0",
        "two (127.0.0.1): trainer/1, trainer/10",
        "three (127.0.0.1): rollout/0",
    ]


def test_an_error_names_nodes(where: Whereabouts) -> None:
    """Seen failing with a search that finds trainer/1 in trainer/10."""
    error = where.located(StallError("late: trainer/10"))
    assert isinstance(error, StallError)
    assert str(error) == (
        "late: trainer/10; trainer/10: on two (127.0.0.1); three (127.0.0.1) is not reached from one (127.0.0.1): it, "
        "its link or its Ray is down; there: rollout/0"
    )


def test_one_node_and_errors_of_others_stay_as_they_are(where: Whereabouts) -> None:
    error, other = TrainerError("trainer/0 died"), KeyError("trainer/0")
    assert Whereabouts([node("one", 0)], [Bundle(node=0, gpus=0, lanes=("trainer/0",))]).located(error) is error
    assert where.located(other) is other
