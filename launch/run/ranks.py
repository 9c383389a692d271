"""The trainer ranks as one: each call goes to all of them, and errors name the rank that died or is late."""

import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import ray

from areal_lite.actors.calls import Calls, Poller, call_all, death, describe, has_died, kill, stop_all
from areal_lite.actors.process import log_path
from areal_lite.errors import RankDied, StallError, TrainerError
from areal_lite.launch.run.places import Places

POLL_S = 0.25
"""Longest time between two polls of a wait."""
_ANSWER_TIMEOUT_S = 5.0
"""How long a healthy rank may take to report its progress."""


class Ranks:
    """Trainer actors by lane name; each answers `progress` and `ping` beside its work."""

    meanwhile: Callable[[], object] = staticmethod(lambda: None)
    """Called at each poll of `ask`, so that Ctrl-C is answered during a hand-over or a save that hangs, too."""

    def __init__(self, kind: type, places: Places) -> None:
        """Start the processes."""
        self._places, num_ranks = places, places.config.trainer.ranks
        self.handles = {
            f"trainer/{rank}": places.spawn(kind, f"trainer/{rank}", rank=rank) for rank in range(num_ranks)
        }
        self._progress = Poller("progress")

    def start(self, **arguments: Any) -> Calls:
        """Form the process group and load models; returns the pending calls.

        Raises:
            StallError: The first rank's process does not come up.
        """
        opening = call_all({"trainer/0": self.handles["trainer/0"]}, "open_store")
        opened = self._places.wait_until_started(opening, lambda _: None)
        return call_all(self.handles, "work", "start", address=opened["trainer/0"], **arguments)

    def load(self, checkpoint: Path) -> int:
        """Load a checkpoint, a long read without progress; returns the version."""
        version, *_ = self.ask("load", checkpoint / "trainer", timeout_s=self._places.config.run.start_timeout_s)
        return int(version)

    def ask(self, method: str, *args: Any, timeout_s: float) -> list[Any]:
        """Call a method of all ranks and return their answers.

        Raises:
            StallError: A rank is late.
            TrainerError: A rank died or failed.
        """
        asking = self.asking(method, *args, timeout_s=timeout_s, wait_s=POLL_S)
        while not (answers := next(asking)):
            self.meanwhile()
        return answers

    def asking(self, method: str, *args: Any, timeout_s: float, wait_s: float = 0.0) -> Iterator[list[Any]]:
        """Call a method as `ask` does; every `wait_s` seconds yield [], and at last the answers."""
        calls, deadline = call_all(self.handles, "work", method, *args), time.monotonic() + timeout_s
        while late := self.wait(calls, min(wait_s, deadline - time.monotonic())):
            if time.monotonic() >= deadline:
                raise StallError(f"the trainer ranks must {method} within {timeout_s:g} s; late: {self.describe(late)}")
            yield []
        yield [calls.values[name] for name in self.handles]

    def wait(self, calls: Calls, timeout_s: float) -> list[str]:
        """Wait for an answer of every rank; returns the names of those that still owe one.

        Raises:
            TrainerError: A rank died or failed; the others then fail too, or wait for it in vain.
        """
        for name, error in calls.answers(timeout_s):
            if error is not None:
                raise self.blame(name, error) from error
        return list(calls.pending)

    def busy(self) -> dict[str, str]:
        """Return what each busy rank is doing, by name; free ranks are left out."""
        calls = call_all(self.handles, "ping")
        calls.failures(_ANSWER_TIMEOUT_S)
        doing = {name: calls.values.get(name, "does not answer") for name in self.handles}
        return {name: text for name, text in doing.items() if text}

    def describe(self, late: Iterable[str]) -> str:
        """Describe what each late rank is doing."""
        busy = self.busy()
        return "; ".join(f"{name} {busy.get(name, 'is free')}" for name in late)

    def progress(self) -> tuple[int, ...]:
        """Return the last known progress of each rank, a growing number.

        Raises:
            TrainerError: A rank is dead.
        """
        _, failed = self._progress.poll(self.handles, wait_s=0)
        for name, error in failed.items():
            raise self.blame(name, error) from error
        return tuple(self._progress.latest.values())

    def stop(self) -> None:
        """Have every rank leave the process group."""
        stop_all(self.handles)

    def kill(self) -> None:
        """Kill every rank."""
        kill(*self.handles.values())

    def blame(self, name: str, error: Exception) -> Exception:
        """Name the rank that died, which need not be the one whose failure was seen first."""
        if not isinstance(error, ray.exceptions.RayError):
            return error
        for rank, problem in call_all(self.handles, "progress").failures(_ANSWER_TIMEOUT_S).items():
            if has_died(problem):
                log = log_path(self._places.logs, rank)
                return RankDied(f"{rank} died: {death(problem)}; log: {log}")
        return TrainerError(f"{name} failed: {describe(error)}; log: {log_path(self._places.logs, name)}")
