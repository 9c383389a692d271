"""A user's program: imports every module of areal-lite, runs a recipe, and starts a Ray of its own afterwards.

    python host_program.py RECIPE.json

Prints as JSON what areal-lite has changed in this process, and what the second Ray has started.
"""

import gc
import importlib
import json
import os
import pkgutil
import signal
import sys
from pathlib import Path
from types import FunctionType
from typing import Any

LIBRARIES = ("ray", "vllm", "torch", "transformers")


def functions() -> dict[tuple[str, ...], FunctionType]:
    """Return every function and method of the libraries, by module and name."""
    found: dict[tuple[str, ...], FunctionType] = {}
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] not in LIBRARIES:
            continue
        for key, value in list(vars(module).items()):
            if not isinstance(value, FunctionType | type) or value.__module__ != name:
                continue
            if isinstance(value, FunctionType):
                found[name, key] = value
            else:
                for part, method in vars(value).items():
                    if isinstance(method, FunctionType):
                        found[name, key, part] = method
    return found


def state() -> dict[str, Any]:
    """Return what a program would notice."""
    return {
        "gc": gc.get_threshold(),
        "streams": (sys.stdout, sys.stderr, getattr(sys.stdout.write, "__func__", None)),
        "files": [os.readlink(f"/proc/self/fd/{number}") for number in range(3)],
        "handlers": {number: signal.getsignal(number) for number in signal.valid_signals()},
        "excepthook": sys.excepthook,
        "ray": {name: value for name, value in os.environ.items() if name.startswith("RAY_")},
    }


def main() -> None:
    """Run the recipe named on the command line."""
    for name in ("ray._private.node", "ray._private.ray_constants", "transformers", "vllm.v1.engine.async_llm"):
        importlib.import_module(name)
    import ray

    import areal_lite

    before, known = state(), functions()
    for module in pkgutil.walk_packages(areal_lite.__path__, "areal_lite."):
        importlib.import_module(module.name)
    imported = state()
    run = areal_lite.run(areal_lite.load_recipe(json.loads(Path(sys.argv[1]).read_text())), quiet=True)
    done, now = state(), functions()
    ray.init(address="local", num_cpus=1)
    worker = ray._private.worker
    result = {
        "status": run.summary["status"],
        "changed by imports": [name for name in before if before[name] != imported[name]],
        "changed by the run": [name for name in before if before[name] != done[name]],
        "patched": [name for name in known if now[name] is not known[name]],
        "started": sorted(worker._global_node.all_processes),
        "prints": worker.global_worker.listener_thread.is_alive(),
    }
    ray.shutdown()
    print(json.dumps(result))


if __name__ == "__main__":
    main()
