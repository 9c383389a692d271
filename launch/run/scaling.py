"""`areal-lite scale`: a request in the run folder, which the run picks up."""

import shlex
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

from pydantic import Field, TypeAdapter, ValidationError

from areal_lite.config.recipe import Config
from areal_lite.errors import ConfigError, StallError
from areal_lite.record.run_files import write_whole
from areal_lite.record.run_folder import RunFolder
from areal_lite.sample_queue.access import Role

_ROLES = (Role.ROLLOUT, Role.VERIFIER)
_MOST = 1024
_REQUEST = TypeAdapter(dict[Role, Annotated[int, Field(ge=1, le=_MOST)]])
_POLL_S = 0.25


def parse_counts(words: Sequence[str]) -> dict[Role, int]:
    """Read `rollout=8 verifier=2`.

    Raises:
        ConfigError: It is something else.
    """
    try:
        counts = _REQUEST.validate_python(dict(word.split("=", 1) for word in words))
    except (ValueError, ValidationError):
        counts = {}
    if not counts or not set(counts) <= set(_ROLES):
        raise ConfigError(
            f"workers must be given as rollout=N or verifier=N, N from 1 to {_MOST}, got {' '.join(words) or 'nothing'}"
        )
    return counts


def request(folder: Path, counts: Mapping[Role, int], *, timeout_s: float) -> None:
    """Write a request into the folder of an active run, and wait until the run picks it up.

    Raises:
        ConfigError: The folder is not that of a run with such workers.
        StallError: The run did not pick it up; the request is withdrawn.
    """
    config = RunFolder(folder).recipe()
    found = "no workers"
    if isinstance(config, Config):
        shared = "weights.transport=ipc" if config.weights.transport == "ipc" else ""
        found = ("rollout.servers" if config.rollout.servers else shared) if Role.ROLLOUT in counts else ""
    if found:
        raise ConfigError(
            f"{folder} must be the run of a recipe with rollout workers on GPUs of their own, to have more or fewer: "
            f"got command: {config.command}, {found}"
        )
    path, until = folder / "scale.json", time.monotonic() + timeout_s
    write_whole(path, _REQUEST.dump_json(dict(counts)).decode())
    try:
        while path.exists():
            if time.monotonic() > until:
                raise StallError(
                    f"the request was not picked up: expected an active run in {folder}, got no answer in "
                    f"{timeout_s:g} s. Fix: wait until it has started, or resume it: areal-lite resume "
                    f"{shlex.quote(str(folder))} "
                    + " ".join(f"{role}.workers={count}" for role, count in counts.items())
                )
            time.sleep(_POLL_S)
    finally:
        path.unlink(missing_ok=True)


def take(folder: Path) -> dict[Role, int]:
    """Remove and return the request; empty if there is none."""
    path = folder / "scale.json"
    try:
        content = path.read_bytes()
        path.unlink()
        return _REQUEST.validate_json(content)
    except (OSError, ValidationError):
        return {}
