"""Starts an actor's process with its variables: what a Ray of ours runs in place of its own script of that name.

Ray's imports all of Ray, which the process then does once more. Run by its path, so that it imports next to nothing.
"""

import json
import os
import sys
from collections.abc import MutableMapping

_RAY_OPTION = "--serialized-runtime-env-context="


def command(arguments: list[str], environment: MutableMapping[str, str]) -> list[str]:
    """Set what Ray wants to have set, and return the worker's command; all but variables is left to Ray's script.

    Args:
        arguments: Ray's `default_worker.py`, its options, and among them the environment as Ray writes it.
        environment: What is changed.
    """
    context = json.loads(next((a.removeprefix(_RAY_OPTION) for a in arguments if a.startswith(_RAY_OPTION)), "{}"))
    variables, executable = context.pop("env_vars", {}), context.pop("py_executable", sys.executable)
    if executable != sys.executable or any(context.values()) or any("$" in value for value in variables.values()):
        return [sys.executable, os.path.join(os.path.dirname(arguments[0]), "setup_worker.py"), *arguments]
    environment.update(variables)
    return [sys.executable, *(a for a in arguments if not a.startswith((_RAY_OPTION, "--language=")))]


if __name__ == "__main__":
    os.execv(sys.executable, command(sys.argv[1:], os.environ))
