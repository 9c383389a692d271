"""Which processes run on which node: printed when a run on several nodes begins, and added to its errors."""

import re
from collections.abc import Iterator, Sequence

from areal_lite.errors import ArealLiteError
from areal_lite.launch.run.plan import Bundle, Node
from areal_lite.network import listens

_ANSWER_TIMEOUT_S = 3.0


class Placement:
    """The node of each lane; the driver's node comes first."""

    def __init__(self, nodes: Sequence[Node], bundles: Sequence[Bundle]) -> None:
        self._nodes = {node.key: node for node in nodes}
        self.key_of = {lane: nodes[bundle.node].key for bundle in bundles for lane in bundle.lanes}
        """Ray's id of the node that a lane is on."""

    def settle(self, lane: str, node: Node) -> None:
        """Record that a lane is on a node from now on."""
        self._nodes.setdefault(node.key, node)
        self.key_of[lane] = node.key

    def _lanes(self) -> dict[Node, list[str]]:
        """Return the lanes of each node."""
        nodes = self._nodes.values()
        return {node: [lane for lane, key in self.key_of.items() if key == node.key] for node in nodes}

    def lines(self) -> Iterator[str]:
        """Yield a line for each node if there are several."""
        for node, lanes in self._lanes().items():
            if len(self._nodes) > 1:
                yield f"{_words(node)}: {', '.join(lanes) or 'nothing'}"

    def out_of_reach(self) -> list[Node]:
        """Nodes with processes of the run whose Ray does not answer."""
        return [
            node
            for node, lanes in self._lanes().items()
            if lanes and not listens(f"{node.address}:{node.port}", timeout_s=_ANSWER_TIMEOUT_S)
        ]

    def reaches(self, *lanes: str) -> bool:
        """Whether Ray answers on the nodes of lanes, and so can start processes there."""
        return not {self.key_of.get(lane) for lane in lanes}.intersection(node.key for node in self.out_of_reach())

    def with_nodes(self, error: BaseException) -> BaseException:
        """Return an error with the nodes of the processes that it names, and the unreachable nodes."""
        if not isinstance(error, ArealLiteError) or not self._nodes:
            return error
        here, lost = next(iter(self._nodes.values())), self.out_of_reach()
        if here in lost:
            return type(error)(
                f"Ray on this machine (its raylet) is down, with all processes that it ran; first error: {error}"
            )
        if len(self._nodes) < 2:
            return error
        parts, text = [], str(error)
        for node, lanes in self._lanes().items():
            named = [lane for lane in lanes if re.search(rf"\b{lane}(?!\d)", text)]
            if node in lost:
                parts.append(
                    f"{_words(node)} is unreachable from {_words(here)}: it, its link or its Ray is down; "
                    f"it ran {', '.join(lanes)}"
                )
            elif named:
                parts.append(f"{', '.join(named)}: on {_words(node)}")
        return type(error)("; ".join([text, *parts]))


def _words(node: Node) -> str:
    return f"{node.name} ({node.address})"
