"""Wait until a Ray cluster has all of its nodes and each of them answers, then become the command.

A process of its own: `python -m areal_lite.launch.clusters.joined NODES SECONDS NAME,... COMMAND...`, with RAY_ADDRESS
set. Ray gives the named variables to every process that the command starts on the cluster, whose nodes do not have
them; their values are in the environment alone, which no other user can list.
"""

import json
import os
import sys
import time
from collections.abc import Mapping
from typing import Any

from areal_lite.network import listens

_POLL_S = 1.0


def main(nodes: str, timeout_s: str, names: str, *command: str) -> None:
    """Wait for the nodes and become the command; exits with a sentence if there is no cluster, or it lacks nodes."""
    import ray
    from ray._private.runtime_env.constants import RAY_JOB_CONFIG_JSON_ENV_VAR

    deadline = time.monotonic() + float(timeout_s)
    try:
        ray.init(address="auto", log_to_driver=False, logging_level="ERROR")
        while True:
            # Ray counts a node whose power failed as alive for up to a minute.
            alive = {f"{node['NodeManagerHostname']} ({_address(node)})": node for node in ray.nodes() if node["Alive"]}
            silent = [name for name, node in alive.items() if not listens(_address(node), timeout_s=_POLL_S)]
            if not silent and len(alive) >= int(nodes):
                break
            if time.monotonic() > deadline:
                lost = f", no answer from {', '.join(silent)}" if silent else ""
                sys.exit(
                    f"StallError: the Ray cluster must have nodes={nodes} within start_timeout_s={timeout_s}, got "
                    f"{len(alive) - len(silent)} that answer{lost}. Fix: type `ray start --address="
                    f"{ray.get_runtime_context().gcs_address}` on the missing nodes, or correct nodes in the profile"
                )
            time.sleep(_POLL_S)
        ray.shutdown()
    except (ConnectionError, RuntimeError) as error:
        sys.exit(f"{type(error).__name__}: {error}")
    except KeyboardInterrupt:
        sys.exit(130)
    if names:  # as Ray's job server does it, which may have set this already
        settings = json.loads(os.environ.get(RAY_JOB_CONFIG_JSON_ENV_VAR, "{}"))
        variables = settings.setdefault("runtime_env", {}).setdefault("env_vars", {})
        variables |= {name: os.environ[name] for name in names.split(",")}
        os.environ[RAY_JOB_CONFIG_JSON_ENV_VAR] = json.dumps(settings)
    os.execvp(command[0], command)


def _address(node: Mapping[str, Any]) -> str:
    return f"{node['NodeManagerAddress']}:{node['NodeManagerPort']}"


if __name__ == "__main__":
    main(*sys.argv[1:])
