"""Actor processes between two runs: an engine takes ten seconds to start, the imports of a trainer as long.

A row of short runs shares them, one run at a time.
"""

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Self

import ray

from areal_lite.config.recipe import Config
from areal_lite.config.rollout import engine_settings
from areal_lite.launch.run.placement import actor_options

__all__ = ["ActorKeeper"]


class ActorKeeper:
    """Owns the actors that no run has; a context manager, at whose end they end.

    A run that is lent actors ends them when it fails or is interrupted; the next run then starts its own.
    """

    def __init__(self) -> None:
        self._handles: dict[str, Any] = {}
        self._asked: dict[str, dict[str, Any]] = {}
        self._are_lent = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def lend(self, config: Config, *, model_folder: Path, say: Callable[[str], None]) -> dict[str, Any]:
        """Hand out the actors that are just what a recipe asks for, by lane name; the others end."""
        asked = {name: _asked(config, name, model_folder=model_folder) for name in self._handles}
        for name, handle in list(self._handles.items()):
            if self._are_lent or asked[name] != self._asked[name]:
                if not self._are_lent:
                    say(f"{name} is started anew: {_difference(self._asked[name], asked[name])}")
                del self._handles[name]
                _end(handle)
        self._are_lent = True
        return dict(self._handles)

    def keep(self, handles: Mapping[str, Any], *, config: Config, model_folder: Path) -> None:
        """Take over the actors that a finished run has released."""
        self._handles, self._are_lent = dict(handles), False
        self._asked = {name: _asked(config, name, model_folder=model_folder) for name in handles}

    def close(self) -> None:
        """End the actors, lent ones too: whoever had them has ended."""
        handles, self._handles = self._handles, {}
        for handle in handles.values():
            _end(handle)


def _end(handle: Any) -> None:
    with contextlib.suppress(Exception):
        ray.kill(handle)


def _asked(config: Config, name: str, *, model_folder: Path) -> dict[str, Any]:
    """Everything that a run asks of an actor's process, flat."""
    role, _, index = name.partition("/")
    counts = {"rollout": config.rollout.workers, "trainer": config.trainer.ranks, "verifier": config.verifier.workers}
    asked = {"is there": not index or int(index) < counts[role], **actor_options(config, role)}
    if role == "rollout":
        settings = asdict(engine_settings(config, model_folder=str(model_folder)))
        asked |= {**settings.pop("environment"), **settings.pop("arguments"), **settings}
    return asked


def _difference(before: dict[str, Any], after: dict[str, Any]) -> str:
    changed = [name for name in {**before, **after} if before.get(name) != after.get(name)]
    return ", ".join(f"{name} was {before.get(name)}, is {after.get(name)}" for name in changed)
