"""A whole reinforcement-learning run in this process: real controller and cluster, actors that answer at once."""

import io
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from fake_ray import FakeRay, Reference
from ledger_builders import FakeClock
from offline_runs import handlers_kept
from rich.console import Console
from run_folders import new_run_folder

from areal_lite import watchdog
from areal_lite.actors import calls as calls_module
from areal_lite.config.recipe import parse_config
from areal_lite.launch.run import cluster as cluster_module
from areal_lite.launch.run import controller as controller_module
from areal_lite.launch.run import ranks as ranks_module
from areal_lite.launch.run import restarts as restarts_module
from areal_lite.launch.run.online import OnlineController
from areal_lite.launch.run.placement import Placement
from areal_lite.launch.run.places import Places
from areal_lite.launch.run.view import View
from areal_lite.record.metrics import METRICS
from areal_lite.record.run_folder import RunFolder
from areal_lite.sample_queue.access import Role

STATS = {metric.name: 1 for metric in METRICS if metric.reduction} | {"age_histogram": {0: 30}, "age_max": 0}
COUNTS = dict.fromkeys(("waiting", "generated", "ready", "taken", "failed", "rejected", "stale", "trained"), 0)


class Actor:
    """Answers every method at once; `run` ends when the actor `dies_of` something, with every other call."""

    def __init__(self, lane: str, run: "OnlineRun") -> None:
        self._lane, self._run = lane, run
        self.dies_of: Exception | None = None

    def __getattr__(self, method: str) -> Any:
        def remote(*args: Any, **_: Any) -> Reference:
            name, begun = args[0] if method == "work" else method, self._run.clock.now
            if method not in ("collect", "ping", "progress", "memory_mb"):
                self._run.log.append((self._lane, name))

            def is_ready() -> bool:
                if method == "start":
                    return self._run.clock.now >= begun + self._run.starts_take_s
                return method != "run" or self.dies_of is not None

            return Reference(lambda: self._answer(name, args), is_ready=is_ready)

        return SimpleNamespace(remote=remote)

    def _answer(self, name: str, args: tuple[Any, ...]) -> Any:
        if self.dies_of is not None:
            raise self.dies_of
        if name in self._run.answers:
            return self._run.answers[name](*args)
        if name == "save":
            args[1].mkdir()
        usual = {
            "access": dict.fromkeys(Role),
            "collect": ([], {}),
            "step": dict(STATS),
            "progress": 1,
            "ping": "",
            "memory_mb": 100,
        }
        return usual.get(name, {})


class Everywhere(Places):
    """Starts actors in this process."""

    def __init__(self, run: "OnlineRun", config: Any) -> None:
        self.config, self.logs, self.placement, self._run = config, "logs", Placement([], []), run

    def spawn(self, kind: type, lane: str, **_: Any) -> Any:
        self._run.actors[lane] = Actor(lane, self._run)
        return self._run.actors[lane]

    def has_place(self, lane: str) -> bool:
        return True

    def head_is_lost(self) -> bool:
        return False


class OnlineRun:
    """Five steps with an engine, a verifier and a rank, whose queue always has a batch."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, **run: Any) -> None:
        settings = {"dir": str(folder / "run"), "steps": 5, "checkpoint_every": 0, "eval_every": 0, "report": False}
        config = parse_config({"run": settings | run, "weights": {"parity_every": 0}})
        self.log: list[Any] = []
        """Actors' lanes and methods, and requests of the queue, in order."""
        self.actors: dict[str, Actor] = {}
        self.answers: dict[str, Callable[..., Any]] = {}
        """Of actors, by method."""
        self.queue: dict[str, Callable[..., Any]] = {}
        """Answers of the queue, by request."""
        self.starts_take_s = 0.0
        self.clock, self.output, self.folder = FakeClock(), io.StringIO(), new_run_folder(config)
        clock = SimpleNamespace(monotonic=self.clock, time=self.clock, sleep=lambda _: None)
        monkeypatch.setattr(calls_module, "ray", FakeRay(self.clock))
        for module in (calls_module, ranks_module, controller_module, cluster_module, restarts_module):
            monkeypatch.setattr(module, "time", clock)
        monkeypatch.setattr(watchdog.Watchdog.__init__, "__kwdefaults__", {"clock": self.clock})
        monkeypatch.setattr(cluster_module, "QueueClient", lambda *_, **__: self)
        monkeypatch.setattr(ray, "kill", lambda _: None)
        view = View(config, console=Console(file=self.output))
        self.controller = OnlineController(
            prompts={}, eval_prompts=[], folder=self.folder, places=Everywhere(self, config), model_folder=folder,
            view=view,
        )  # fmt: skip

    def __getattr__(self, request: str) -> Any:
        """Be the client of the sample queue."""

        def ask(*_: Any, **fields: Any) -> Any:
            if request != "status":
                self.log.append(("queue", request))
            usual = {
                "take": {"rewards": {"reward_mean": 0.5}}, "batch_groups": [], "save": b"", "abandon": COUNTS,
                "status": {"refused": 0, "counts": COUNTS, "progress": 1, "missing": 4, "workers": {}},
            }  # fmt: skip
            return self.queue[request](**fields) if request in self.queue else usual.get(request)

        return ask

    def run(self, on_step: Callable[[Any], Any] | None = None) -> dict[str, Any]:
        """Run to the end."""
        with handlers_kept():
            return self.controller.run(on_step)

    @property
    def rows(self) -> list[dict[str, Any]]:
        """Rows of `metrics.jsonl`."""
        return RunFolder(self.folder.path).read("metrics.jsonl")
