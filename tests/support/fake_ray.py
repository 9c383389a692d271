"""A run's actors without Ray: answers that are ready at a moment of a clock, and places that start what a test says."""

from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import ray
from ledger_builders import FakeClock

from areal_lite.actors import calls as calls_module
from areal_lite.launch.run.placement import Placement
from areal_lite.launch.run.places import Places


class Reference:
    """A call under way."""

    def __init__(self, answer: Callable[[], Any], *, is_ready: Callable[[], bool] = lambda: True) -> None:
        self.answer, self.is_ready = answer, is_ready


def failing(error: Exception, *, is_ready: Callable[[], bool] = lambda: True) -> Reference:
    """Make the answer of a call that fails."""

    def answer() -> None:
        raise error

    return Reference(answer, is_ready=is_ready)


class FakeRay(SimpleNamespace):
    """Knows who has answered; waiting for nobody but the late takes all the time that was given."""

    def __init__(self, clock: FakeClock) -> None:
        super().__init__(exceptions=ray.exceptions, clock=clock)

    def wait(self, references: list[Reference], *, timeout: float) -> tuple[list[Reference], list[Reference]]:
        """Return who has answered, and nobody else."""
        ready = [reference for reference in references if reference.is_ready()]
        if not ready:
            self.clock.now += timeout
        return ready, []

    def get(self, reference: Reference) -> Any:
        """Return or raise the answer."""
        return reference.answer()


def fake_time(monkeypatch: pytest.MonkeyPatch, *modules: ModuleType) -> FakeClock:
    """Answer the calls of actors without Ray; they and these modules tell the time by the clock that is returned."""
    clock = FakeClock()
    monkeypatch.setattr(calls_module, "ray", FakeRay(clock))
    for module in (calls_module, *modules):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=clock, time=clock, sleep=lambda _: None))
    return clock


class FakePlaces(Places):
    """Where `start` makes the actor of each lane, in this process."""

    def __init__(self, config: Any, start: Callable[[str], Any] = SimpleNamespace) -> None:
        self.config, self.logs, self.placement = config, "logs", Placement([], [])
        self.is_head_lost = False
        self.actors: dict[str, Any] = {}
        self._start = start

    def spawn(self, kind: type, lane: str, **_: Any) -> Any:
        self.actors[lane] = self._start(lane)
        return self.actors[lane]

    def has_place(self, lane: str) -> bool:
        return True

    def head_is_lost(self) -> bool:
        return self.is_head_lost
