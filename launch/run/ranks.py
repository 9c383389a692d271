"""The trainer ranks as one: every question goes to all of them, and whoever dies or is late is named."""

import time
from collections.abc import Callable, Mapping
from typing import Any

import ray

from areal_lite.errors import StallError, TrainerError
from areal_lite.launch.run.remote import Question, describe, result

__all__ = ["Ranks"]

_ANSWER_TIMEOUT_S = 5.0
"""How long a healthy rank may take to say how far it is."""


class Ranks:
    """Trainer actors by lane name; each has `progress`, which it answers beside its work."""

    def __init__(self, handles: Mapping[str, Any], *, log_of: Callable[[str], str]) -> None:
        """Take the actors.

        Args:
            handles: By name, such as `trainer/0`.
            log_of: Path of a lane's log, for messages.
        """
        self.handles = dict(handles)
        self._log_of = log_of
        self._question = Question("progress")
        self._readings: dict[str, int] = {}

    def ask(self, method: str, *args: Any, timeout_s: float) -> list[Any]:
        """Have all ranks do something together and return their answers.

        Raises:
            StallError: A rank is late.
            TrainerError: A rank died or failed.
        """
        references = self.begin(method, *args)
        if late := self.late(references, wait_s=timeout_s):
            raise StallError(f"the trainer ranks must {method} within {timeout_s:g} s; late: {', '.join(late)}")
        return [result(reference) for reference in references.values()]

    def begin(self, method: str, *args: Any) -> dict[str, Any]:
        """Ask all ranks without waiting; returns what to wait for, by name."""
        return {name: getattr(handle, method).remote(*args) for name, handle in self.handles.items()}

    def late(self, references: Mapping[str, Any], *, wait_s: float) -> list[str]:
        """Wait for an answer of every rank; returns the names of those that owe it still.

        Raises:
            TrainerError: A rank died or failed; the others then fail too, or wait for it in vain.
        """
        deadline, pending = time.monotonic() + wait_s, dict(references)
        while pending:
            ready, _ = ray.wait(list(pending.values()), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for name in [name for name, reference in pending.items() if reference in ready]:
                try:
                    result(pending.pop(name))
                except ray.exceptions.RayError as error:
                    raise self._error(name, error) from error
        return list(pending)

    def progress(self) -> tuple[int, ...]:
        """One growing number per rank, as far as they answer.

        Raises:
            TrainerError: A rank is dead.
        """
        for name, reference in self._question.ask(self.handles, wait_s=0).items():
            try:
                self._readings[name] = result(reference)
            except ray.exceptions.RayError as error:
                raise self._error(name, error) from error
        return tuple(self._readings.values())

    def _error(self, name: str, error: Exception) -> TrainerError:
        """Name the rank that died, which need not be the one whose failure was seen first."""
        answers = {name: handle.progress.remote() for name, handle in self.handles.items()}
        ray.wait(list(answers.values()), num_returns=len(answers), timeout=_ANSWER_TIMEOUT_S)
        for rank, answer in answers.items():
            try:
                result(answer, timeout_s=0)
            except ray.exceptions.RayActorError:
                return TrainerError(f"{rank} died: its process ended; log: {self._log_of(rank)}")
            except ray.exceptions.RayError:
                continue
        return TrainerError(f"{name} failed: {describe(error)}; log: {self._log_of(name)}")
