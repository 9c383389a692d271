"""Waiting for actors to start: by name, with a deadline, and with what they said when they failed."""

import time
from collections.abc import Callable, Mapping
from typing import Any

import ray

from areal_lite.errors import ArealLiteError, EngineError, StallError, TrainerError
from areal_lite.launch.run.remote import result

__all__ = ["log_path", "wait_until_started"]


def wait_until_started(
    references: Mapping[str, Any], *, timeout_s: float, logs: str, on_progress: Callable[[str], None]
) -> dict[str, Any]:
    """Wait for the answers of starting actors.

    Args:
        references: By lane name.
        timeout_s: `run.start_timeout_s`.
        logs: Folder of the actors' logs, for messages.
        on_progress: Told of every actor that is ready.

    Raises:
        StallError: Actors are late; names them.
        ArealLiteError: As the actor said, with its name and log.
    """
    deadline = time.monotonic() + timeout_s
    pending, results = dict(references), {}
    while pending:
        if time.monotonic() > deadline:
            raise StallError(
                f"actors must start within run.start_timeout_s={timeout_s:g} s; still missing: {', '.join(pending)}; "
                f"see {logs}"
            )
        ready, _ = ray.wait(list(pending.values()), timeout=0.5)
        for name in [name for name, reference in pending.items() if reference in ready]:
            results[name] = _started(name, pending.pop(name), logs=logs)
            on_progress(f"{name} is ready" + (f", waiting for {', '.join(sorted(pending))}" if pending else ""))
    return results


def log_path(logs: str, name: str) -> str:
    """Return the path of a lane's log."""
    return f"{logs}/{name.replace('/', '-')}.log"


def _started(name: str, reference: Any, *, logs: str) -> Any:
    log = log_path(logs, name)
    try:
        return result(reference)
    except ArealLiteError as error:
        raise type(error)(f"{name} did not start: {error} (log: {log})") from None
    except ray.exceptions.RayActorError as error:
        kind = TrainerError if name.startswith("trainer/") else EngineError
        raise kind(f"{name} did not start: its process ended (log: {log})") from error
