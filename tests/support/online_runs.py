"""A whole reinforcement-learning run in this process: real controller and cluster, actors that answer at once."""

import io
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import ray
from fake_ray import FakePlaces, Reference, fake_time
from offline_runs import handlers_kept
from rich.console import Console
from run_folders import new_run_folder

from areal_lite import watchdog
from areal_lite.config.recipe import parse_config
from areal_lite.launch.run import cluster as cluster_module
from areal_lite.launch.run import controller as controller_module
from areal_lite.launch.run import ranks as ranks_module
from areal_lite.launch.run import restarts as restarts_module
from areal_lite.launch.run import signals
from areal_lite.launch.run.online import OnlineController
from areal_lite.launch.run.view import View
from areal_lite.record.metrics import METRICS
from areal_lite.record.run_folder import RunFolder
from areal_lite.sample_queue.access import Role

STATS = {metric.name: 1 for metric in METRICS if metric.reduction} | {"age_histogram": {0: 30}, "age_max": 0}
COUNTS = dict.fromkeys(("waiting", "generated", "ready", "taken", "failed", "rejected", "stale", "trained"), 0)


class Actor:
    """Answers every method at once; `run` ends when the actor `dies_of` something, with every other call."""

    def __init__(self, lane: str, actors: "Actors") -> None:
        self._lane, self._all = lane, actors
        self.dies_of: Exception | None = None
        self.calls: list[str] = []

    def __getattr__(self, method: str) -> Any:
        def remote(*args: Any, **_: Any) -> Reference:
            name, begun = args[0] if method == "work" else method, self._all.clock.now
            if method not in ("collect", "ping", "progress", "memory_mb"):
                self.calls.append(name)
                self._all.log.append((self._lane, name))

            def is_ready() -> bool:
                if method == "run":
                    return self.dies_of is not None
                return self._all.clock.now >= begun + self._all.takes_s.get(method, 0.0)

            return Reference(lambda: self._answer(name, args), is_ready=is_ready)

        return SimpleNamespace(remote=remote)

    def _answer(self, name: str, args: tuple[Any, ...]) -> Any:
        if self.dies_of is not None:
            raise self.dies_of
        if name in self._all.answers:
            return self._all.answers[name](*args)
        if name == "save":
            args[1].mkdir()
        usual = {
            "access": dict.fromkeys(Role), "collect": ([], {}), "step": dict(STATS), "progress": 1, "ping": "",
            "memory_mb": 100, "reconnect": (3, 1), "publish": ({}, {}),
        }  # fmt: skip
        return usual.get(name, {})


class Actors:
    """A run's actors and the client of its queue, which answer at once, on a clock that only a test moves."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *modules: ModuleType) -> None:
        self.log: list[Any] = []
        """Actors' lanes and methods, and requests of the queue, in order."""
        self.answers: dict[str, Callable[..., Any]] = {}
        """Of actors, by method."""
        self.queue: dict[str, Callable[..., Any]] = {}
        """Answers of the queue, by request."""
        self.requests: list[Any] = []
        """Of the queue, with their values."""
        self.takes_s: dict[str, float] = {}
        """How long the methods of actors take."""
        self.clock = fake_time(monkeypatch, ranks_module, cluster_module, restarts_module, *modules)
        monkeypatch.setattr(cluster_module, "QueueClient", lambda *_, **__: self)
        monkeypatch.setattr(ray, "kill", lambda _: None)

    def places(self, config: Any) -> FakePlaces:
        return FakePlaces(config, lambda lane: Actor(lane, self))

    def __getattr__(self, request: str) -> Any:
        """Be the client of the sample queue."""

        def ask(*values: Any, **fields: Any) -> Any:
            if request != "status":
                self.log.append(("queue", request))
                self.requests.append((request, *values, *fields.values()))
            usual = {
                "take": {"reward_mean": 0.5}, "batch_groups": [], "save": b"", "abandon": COUNTS,
                "status": {"refused": 0, "counts": COUNTS, "progress": 1, "missing": 4, "workers": {}},
            }  # fmt: skip
            return self.queue[request](*values, **fields) if request in self.queue else usual.get(request)

        return ask


class OnlineRun(Actors):
    """Five steps with an engine, a verifier and a rank, whose queue always has a batch."""

    def __init__(
        self,
        folder: Path,
        monkeypatch: pytest.MonkeyPatch,
        *,
        held_out: list[Any] | None = None,
        reward_watch: dict[str, Any] | None = None,
        **run: Any,
    ) -> None:
        super().__init__(monkeypatch, controller_module, signals)
        settings = {"dir": str(folder / "run"), "steps": 5, "checkpoint_every": 0, "eval_every": 0, "report": False}
        sections = {"weights": {"parity_every": 0}, "reward_watch": reward_watch or {}}
        config = parse_config({"run": settings | run, **sections})
        monkeypatch.setattr(watchdog.Watchdog.__init__, "__kwdefaults__", {"clock": self.clock})
        self.output, self.folder, places = io.StringIO(), new_run_folder(config), self.places(config)
        self.actors = places.actors
        view = View(config, console=Console(file=self.output))
        self.controller = OnlineController(
            prompts={}, eval_prompts=held_out or [], folder=self.folder, places=places, model_folder=folder, view=view
        )

    def run(self, on_step: Callable[[Any], Any] | None = None) -> dict[str, Any]:
        """Run to the end."""
        with handlers_kept():
            return self.controller.run(on_step)

    @property
    def rows(self) -> list[dict[str, Any]]:
        """Rows of `metrics.jsonl`."""
        return RunFolder(self.folder.path).read("metrics.jsonl")
