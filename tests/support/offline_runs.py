"""A whole offline run in this process: the real controller, and one trainer rank that answers as a test says."""

import io
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fake_ray import FakePlaces, Reference, failing, fake_time
from offline_builders import offline_config
from rich.console import Console
from run_folders import new_run_folder

from areal_lite.launch.run import controller as controller_module
from areal_lite.launch.run import ranks as ranks_module
from areal_lite.launch.run import signals
from areal_lite.launch.run.offline import OfflineController
from areal_lite.launch.run.view import View
from areal_lite.record.run_folder import RunFolder

FIGURES = {"loss": 0.5, "accuracy": 0.9, "tokens": 12.0, "lr": 1e-3, "grad_norm": 1.0, "step_skipped": 0.0}


class Rank:
    """The handle of trainer rank 0. Hooks by method get the call's arguments before it is answered.

    A hook may raise, which is the rank's answer, or return a function: the answer is then ready once that is true. A
    `Reference` that it returns is the answer itself.
    """

    def __init__(self) -> None:
        self.hooks: dict[str, Callable[..., Any]] = {}
        self.calls: list[str] = []
        """Methods in the order in which they were called."""
        self.log: list[Any] = []
        """Beginnings and steps: `start` or the checkpoint's name, then the number of each step that is tried."""
        self.copied: list[bool] = []
        """Of each snapshot, whether the state was copied."""
        self.doing = ""
        self._version = 0
        for name, answer in {"progress": 1, "open_store": "host:1", "stop": None, "memory_mb": 1}.items():
            setattr(self, name, SimpleNamespace(remote=lambda answer=answer: Reference(lambda: answer)))
        self.ping = SimpleNamespace(remote=lambda: Reference(lambda: self.doing))
        self.work = SimpleNamespace(remote=self._work)

    def _work(self, method: str, *args: Any, **_: Any) -> Reference:
        self.calls.append(method)
        self._note(method, *args)
        try:
            found = self.hooks[method](*args) if method in self.hooks else None
        except Exception as error:  # what the hook raises is the answer
            return failing(error)
        if isinstance(found, Reference):
            return found
        return Reference(lambda: self._answer(method, *args), is_ready=found or (lambda: True))

    def _note(self, method: str, *args: Any) -> None:
        if method == "start":
            self.log.append("start")
            self._version = 0
        elif method == "load":
            self._version = _step_of(args[0].parent)
            self.log[-1] = args[0].parent.name
        elif method == "step":
            self.log.append(self._version + 1)

    def _answer(self, method: str, *args: Any) -> Any:
        if method == "step":
            self._version += 1
            return FIGURES
        if method == "snapshot":
            self.copied.append(args[0])
        if method == "save":
            args[0].mkdir()
        if method == "evaluate":
            return {"figures": {"loss": 0.5}}
        return self._version if method == "load" else {}


def _step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix("step-"))


class OfflineRun:
    """Six steps, saved at every second, with restarts from a checkpoint; `run` settings change that."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, **run: Any) -> None:
        settings = {"eval_every": 0, "keep_checkpoints": 9, "max_restarts": 2, "dir": str(folder / "run")}
        config = offline_config(folder, run=settings | run)
        self.rank, self.folder, self.output = Rank(), new_run_folder(config), io.StringIO()
        self.places = FakePlaces(config, lambda lane: self.rank)
        self.clock = fake_time(monkeypatch, ranks_module, controller_module, signals)
        self.controller = self._controller()

    def _controller(self) -> OfflineController:
        view = View(self.places.config, console=Console(file=self.output))
        model = self.folder.path / "model"
        return OfflineController(folder=self.folder, places=self.places, model_folder=model, view=view)

    def run(self, on_step: Callable[[Any], Any] | None = None) -> dict[str, Any]:
        """Run to the end; handlers of signals are as before afterwards."""
        with handlers_kept():
            return self.controller.run(on_step)

    def resume(self, **run: Any) -> None:
        """Have `run` resume the run, with other settings, by a rank without hooks."""
        config = self.places.config
        changed = config.run.model_copy(update={"resume": str(self.folder.path), **run})
        self.places.config = config = config.model_copy(update={"run": changed})
        assert self.folder.finished(config) is None
        self.rank.hooks, self.folder = {}, RunFolder.resume(config)
        self.folder.go_on(config)
        self.controller = self._controller()

    @property
    def saved(self) -> list[int]:
        """Steps of the checkpoints."""
        return [_step_of(path) for path in sorted(self.folder.checkpoints.iterdir())]

    @property
    def steps(self) -> list[int]:
        """Steps of the rows in `metrics.jsonl`."""
        return [row["step"] for row in RunFolder(self.folder.path).read("metrics.jsonl")]


@contextmanager
def handlers_kept() -> Iterator[None]:
    """Restore the handlers of notices, which a process that was given one, or runs under nohup, ignores."""
    before = {number: signal.signal(number, signal.SIG_DFL) for number in signals.NOTICES}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
