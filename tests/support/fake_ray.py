"""What `actors/calls.py` needs of Ray, with answers that are ready at a moment of a clock."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import ray
from ledger_builders import FakeClock


class Reference:
    """A call under way."""

    def __init__(self, answer: Callable[[], Any], *, is_ready: Callable[[], bool] = lambda: True) -> None:
        self.answer, self.is_ready = answer, is_ready


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
