"""Become a command once a Ray cluster has all of its nodes.

A process of its own: `python -m areal_lite.launch.clusters.joined NODES SECONDS COMMAND...`, with RAY_ADDRESS set.
"""

import os
import sys
import time

_POLL_S = 1.0


def main(nodes: str, timeout_s: str, *command: str) -> None:
    """Wait for the nodes; exits with a sentence where there are too few by then, or no cluster."""
    import ray

    deadline = time.monotonic() + float(timeout_s)
    try:
        ray.init(address="auto", log_to_driver=False, logging_level="ERROR")
        while (there := sum(node["Alive"] for node in ray.nodes())) < int(nodes):
            if time.monotonic() > deadline:
                sys.exit(
                    f"StallError: the Ray cluster must have nodes={nodes} within start_timeout_s={timeout_s}, got "
                    f"{there} alive: start Ray on the others, or correct nodes in the profile"
                )
            time.sleep(_POLL_S)
        ray.shutdown()
    except (ConnectionError, RuntimeError) as error:
        sys.exit(f"{type(error).__name__}: {error}")
    except KeyboardInterrupt:
        sys.exit(130)
    os.execvp(command[0], command)


if __name__ == "__main__":
    main(*sys.argv[1:])
