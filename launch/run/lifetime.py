"""How actors begin and end: placed, started by name, waited for with a deadline, stopped by handle."""

import contextlib
from collections.abc import Callable, Mapping
from typing import Any

import ray

from areal_lite.actors.calls import Calls, call_all
from areal_lite.actors.process import log_path
from areal_lite.config.offline import OfflineConfig
from areal_lite.config.recipe import Config
from areal_lite.errors import ArealLiteError, EngineError, QueueError, RankDied, StallError
from areal_lite.node import out_of_memory

_STOP_TIMEOUT_S = 20.0


def actor_options(config: Config | OfflineConfig, kind: str) -> dict[str, Any]:
    """Return the `ray.remote(...).options` of one actor.

    An actor takes its GPUs from what is reserved for it (`places.py`). CPU cores are not reserved: the recipe's thread
    counts share them out, and a laptop has fewer cores than the run has processes.

    Args:
        kind: `queue`, `rollout`, `verifier` or `trainer`.
    """
    gpus, threads, calls_at_once = 0.0, 1, 1
    if kind == "trainer":  # One thread works, one writes checkpoints, one answers `progress`.
        gpus, threads, calls_at_once = 1, config.trainer.threads, 3
    elif kind != "queue":
        calls_at_once = 1000
    if isinstance(config, Config):
        if kind == "rollout":
            gpus, threads = config.rollout.tensor_parallel, config.rollout.threads
        if config.weights.transport == "ipc":  # an engine and its rank share one
            gpus /= 2
    environment = {"TOKENIZERS_PARALLELISM": "false", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}
    return {
        "num_cpus": 0,
        "num_gpus": gpus if config.run.device == "cuda" else 0,
        "max_restarts": 0,
        "max_concurrency": calls_at_once,
        "runtime_env": {"env_vars": environment | {"OMP_NUM_THREADS": str(threads)} | config.run.env},
    }


def wait_until_started(
    starting: Calls, *, timeout_s: float, logs: str, on_progress: Callable[[str], object]
) -> dict[str, Any]:
    """Wait for the answers of starting actors, and return them by lane name.

    Args:
        logs: Folder of the actors' logs, for messages.

    Raises:
        StallError: Actors are late; names them.
        ArealLiteError: As the actor said, with its name and log.
    """
    for name, error in starting.answers(timeout_s):
        if error is not None:
            raise _not_started(name, error, log=log_path(logs, name)) from error
        missing = ", ".join(sorted(starting.pending))
        on_progress(f"{name} is ready" + (f", waiting for {missing}" if missing else ""))
    if starting.pending:
        raise StallError(
            f"actors must start within run.start_timeout_s={timeout_s:g} s; still missing: "
            f"{', '.join(starting.pending)}; see {logs}"
        )
    return starting.values


def stop_all(handles: Mapping[str, Any]) -> None:
    """Have actors stop in good order; one that is late or fails is not waited for."""
    call_all(handles, "stop").failures(_STOP_TIMEOUT_S)


def kill(*handles: Any) -> None:
    """End actors at once; None, in the place of one, and those that are dead are passed over."""
    for handle in handles:
        with contextlib.suppress(Exception):
            ray.kill(handle)


def _not_started(name: str, error: Exception, *, log: str) -> Exception:
    if isinstance(error, ArealLiteError):
        return type(error)(f"{name} did not start: {error} (log: {log})")
    if isinstance(error, ray.exceptions.RayActorError):
        kinds: dict[str, type[ArealLiteError]] = {"queue": QueueError, "trainer": RankDied}
        kind = kinds.get(name.partition("/")[0], EngineError)
        return kind(f"{name} did not start: its process ended{out_of_memory()} (log: {log})")
    return error
