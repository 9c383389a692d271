"""Become a command once a Ray cluster has all of its nodes.

A process of its own: `python -m areal_lite.launch.clusters.joined NODES SECONDS COMMAND...`, with RAY_ADDRESS set.
"""

import os
import sys
import time
from collections.abc import Callable

from areal_lite.errors import ArealLiteError, StallError

_POLL_S = 1.0


def wait_for_nodes(nodes: int, timeout_s: float, *, alive: Callable[[], int]) -> None:
    """Wait until as many nodes are alive; a `StallError` with how many there are, where they are too few by then."""
    deadline = time.monotonic() + timeout_s
    while (there := alive()) < nodes:
        if time.monotonic() > deadline:
            raise StallError(
                f"the Ray cluster must have nodes={nodes} within start_timeout_s={timeout_s:g}, got {there} alive: "
                "start Ray on the others, or correct nodes in the profile"
            )
        time.sleep(_POLL_S)


def _main(nodes: str, timeout_s: str, *command: str) -> None:
    import ray

    try:
        ray.init(address="auto", log_to_driver=False, logging_level="ERROR")
        wait_for_nodes(int(nodes), float(timeout_s), alive=lambda: sum(node["Alive"] for node in ray.nodes()))
        ray.shutdown()
    except (ArealLiteError, ConnectionError, RuntimeError) as error:
        sys.exit(f"{type(error).__name__}: {error}")
    except KeyboardInterrupt:
        sys.exit(130)
    os.execvp(command[0], command)


if __name__ == "__main__":
    _main(*sys.argv[1:])
