"""All actors of a run: start them, ask them, stop them.

The controller owns one `Cluster`. Everything it starts it stops itself, by handle.
"""

import contextlib
import logging
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import ray

from areal_lite.actors.queue import QueueActor
from areal_lite.actors.rollout import RolloutActor
from areal_lite.actors.trainer import TrainerActor
from areal_lite.actors.verifier import VerifierActor
from areal_lite.config import Config
from areal_lite.errors import ArealLiteError, EngineError, StallError, TrainerError, VerifierError
from areal_lite.events import Event
from areal_lite.launch.engines import RayEngines
from areal_lite.launch.placement import actor_options
from areal_lite.launch.remote import Question, describe, result
from areal_lite.sample_queue.client import QueueClient

__all__ = ["Cluster"]

logger = logging.getLogger(__name__)

_STOP_TIMEOUT_S = 20.0
_REPORT_WAIT_S = 2.0
"""How long everybody waits for the reports of all workers; a late one is taken up the next time."""
_ANSWER_TIMEOUT_S = 5.0
"""How long a healthy trainer rank may take to say how far it is."""


class Cluster:
    """The actors of one run, by lane name: `queue`, `rollout/0`, `verifier/0`, `trainer/0` and so on."""

    def __init__(self, config: Config, *, model_folder: Path, log_folder: Path, queue_state: bytes | None) -> None:
        self._config = config
        self._logs = str(log_folder)
        self._model_folder = str(model_folder)
        self.lost: dict[str, str] = {}
        """Rollout workers given up, with the reason."""
        self._actors: list[Any] = []
        self._queue_actor = self._spawn(
            QueueActor, "queue", model_folder=self._model_folder, log_folder=self._logs, state=queue_state
        )
        self.trainers = {
            f"trainer/{rank}": self._spawn(TrainerActor, "trainer", rank=rank, log_folder=self._logs)
            for rank in range(config.trainer.ranks)
        }
        self._serving: dict[str, Any] = {}
        self._connected: set[str] = set()
        self._reports, self._trainer_progress = Question("collect"), Question("progress")
        self._trainer_readings: dict[str, int] = {}

    def start(self, *, checkpoint: Path | None, on_progress: Callable[[str], None]) -> int:
        """Start everything and connect it; returns the trainer's version.

        Raises:
            StallError: An actor did not start within `run.start_timeout_s`; names it.
            EngineError, VerifierError, CheckpointError: As the actor said.
        """
        config = self._config
        endpoint = self._wait({"queue": self._queue_actor.endpoint.remote()}, on_progress)["queue"]
        self.queue = QueueClient(endpoint, timeout_s=config.queue.lease_timeout_s)
        rollouts = self._spawn_many(
            RolloutActor, "rollout", config.rollout.workers, endpoint=endpoint, model_folder=self._model_folder
        )
        self.verifiers = self._spawn_many(VerifierActor, "verifier", config.verifier.workers, endpoint=endpoint)
        address = result(self.trainers["trainer/0"].free_address.remote(), timeout_s=config.run.start_timeout_s)
        starting = {
            name: trainer.start.remote(
                address=address,
                model_folder=self._model_folder,
                endpoint=endpoint,
                checkpoint=None if checkpoint is None else str(checkpoint / "trainer"),
            )
            for name, trainer in self.trainers.items()
        }
        workers = {**rollouts, **self.verifiers}
        starting |= {name: handle.start.remote() for name, handle in workers.items()}
        started = self._wait(starting, on_progress)
        self.engines = RayEngines(rollouts, timeout_s=config.run.stall_timeout_s, on_drop=self._note_lost)
        self.connect_weights()
        return int(started["trainer/0"])

    def connect_weights(self) -> None:
        """Form the transfer groups with the engines that are alive."""
        self._connected = set(self.engines.handles)
        failures, *_ = self.ask_trainers(
            "connect", dict(self.engines.handles), timeout_s=self._config.run.start_timeout_s
        )
        for name, failure in failures.items():
            if failure is not None:
                self.engines.drop(name, failure)

    def serve(self) -> None:
        """Let the workers ask for work."""
        workers = {**self.engines.handles, **self.verifiers}
        self._serving = {name: handle.run.remote() for name, handle in workers.items()}

    def check_workers(self) -> None:
        """Give up rollout workers that ended; raise when somebody indispensable did.

        Raises:
            HandoverError: No rollout worker is left.
            VerifierError: A verifier worker ended.
        """
        self.engines.raise_if_none()
        names = {reference: name for name, reference in self._serving.items()}
        ended, _ = ray.wait(list(names), num_returns=len(names), timeout=0)
        for reference in ended:
            name = names[reference]
            del self._serving[name]
            reason = _reason(reference)
            if name in self.verifiers:
                raise VerifierError(f"{name} ended: {reason}; log: {self._log(name)}")
            self.engines.drop(name, reason)
        self.engines.raise_if_none()

    def publish(self) -> dict[str, str | None]:
        """Have all ranks send the present weights, to the engines that are alive now."""
        if self._connected != set(self.engines.handles):
            self.connect_weights()
        # The engines' own deadlines (open, receive, load) come first, so that a late engine is blamed and not a rank.
        timeout_s = 3 * self._config.weights.timeout_s + self._config.run.stall_timeout_s
        failures, *_ = self.ask_trainers("publish", timeout_s=timeout_s)
        return dict(failures)

    def collect(self) -> tuple[list[Event], dict[str, dict[str, Any]]]:
        """Events of all workers since the last call, and their gauges by lane; the dead are left to `check_workers`."""
        workers = {**self.engines.handles, **self.verifiers}
        events: list[Event] = []
        gauges: dict[str, dict[str, Any]] = {}
        for name, reference in self._reports.ask(workers, wait_s=_REPORT_WAIT_S).items():
            try:
                lane_events, gauges[name] = result(reference)
            except EngineError as error:
                self.engines.drop(name, str(error))
            except ray.exceptions.RayActorError:
                logger.warning("%s did not report", name)
            else:
                events += lane_events
        return events, gauges

    def ask_trainers(self, method: str, *args: Any, timeout_s: float) -> list[Any]:
        """Have all ranks do something together and return their answers.

        Raises:
            StallError: A rank is late.
            TrainerError: A rank died or failed.
        """
        references = {name: getattr(trainer, method).remote(*args) for name, trainer in self.trainers.items()}
        if late := self.late_trainers(references, wait_s=timeout_s):
            raise StallError(f"the trainer ranks must {method} within {timeout_s:g} s; late: {', '.join(late)}")
        return [result(reference) for reference in references.values()]

    def late_trainers(self, references: dict[str, Any], *, wait_s: float) -> list[str]:
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
                    raise self._trainer_error(name, error) from error
        return list(pending)

    def trainer_progress(self) -> tuple[int, ...]:
        """One growing number per rank, as far as they answer.

        Raises:
            TrainerError: A rank is dead.
        """
        for name, reference in self._trainer_progress.ask(self.trainers, wait_s=0).items():
            try:
                self._trainer_readings[name] = result(reference)
            except ray.exceptions.RayError as error:
                raise self._trainer_error(name, error) from error
        return tuple(self._trainer_readings.values())

    def _trainer_error(self, name: str, error: Exception) -> TrainerError:
        """Name the rank that died, which need not be the one whose failure was seen first."""
        answers = {name: trainer.progress.remote() for name, trainer in self.trainers.items()}
        ray.wait(list(answers.values()), num_returns=len(answers), timeout=_ANSWER_TIMEOUT_S)
        for rank, answer in answers.items():
            try:
                result(answer, timeout_s=0)
            except ray.exceptions.RayActorError:
                return TrainerError(f"{rank} died: its process ended; log: {self._log(rank)}")
            except ray.exceptions.RayError:
                continue
        return TrainerError(f"{name} failed: {describe(error)}; log: {self._log(name)}")

    def stop(self) -> None:
        """Stop every actor in the order of the data, then end what did not stop by itself."""
        engines = self.engines.handles if hasattr(self, "engines") else {}
        verifiers = getattr(self, "verifiers", {})
        workers = (*engines.values(), *verifiers.values(), *self.trainers.values())
        stopping = [handle.stop.remote() for handle in workers]
        stopping.append(self._queue_actor.close.remote())
        with contextlib.suppress(Exception):
            ray.wait(stopping, num_returns=len(stopping), timeout=_STOP_TIMEOUT_S)
        self.kill()

    def kill(self) -> None:
        """End every actor at once."""
        for actor in self._actors:
            with contextlib.suppress(Exception):
                ray.kill(actor)
        if hasattr(self, "queue"):
            self.queue.close()

    def _note_lost(self, name: str, reason: str) -> None:
        logger.warning("rollout worker %s was lost: %s", name, reason)
        self.lost[name] = reason
        self._serving.pop(name, None)
        self.queue.forget(worker=name)

    def _spawn(self, kind: type, role: str, **arguments: Any) -> Any:
        remote = ray.remote(kind).options(**actor_options(self._config, role))
        actor = remote.remote(self._config, **arguments)
        self._actors.append(actor)
        return actor

    def _spawn_many(self, kind: type, role: str, count: int, **arguments: Any) -> dict[str, Any]:
        names = [f"{role}/{index}" for index in range(count)]
        return {name: self._spawn(kind, role, name=name, log_folder=self._logs, **arguments) for name in names}

    def _wait(self, references: dict[str, Any], on_progress: Callable[[str], None]) -> dict[str, Any]:
        """Wait for actors to start; a failed start is raised as it came, a late one by name."""
        deadline = time.monotonic() + self._config.run.start_timeout_s
        pending, results = dict(references), {}
        while pending:
            if time.monotonic() > deadline:
                raise StallError(
                    f"actors must start within run.start_timeout_s={self._config.run.start_timeout_s:g} s; still "
                    f"missing: {', '.join(pending)}; see {self._logs}"
                )
            ready, _ = ray.wait(list(pending.values()), timeout=0.5)
            for name in [name for name, reference in pending.items() if reference in ready]:
                results[name] = self._started(name, pending.pop(name))
                on_progress(f"{name} is ready" + (f", waiting for {_names(pending)}" if pending else ""))
        return results

    def _started(self, name: str, reference: Any) -> Any:
        try:
            return result(reference)
        except ArealLiteError as error:
            raise type(error)(f"{name} did not start: {error} (log: {self._log(name)})") from None
        except ray.exceptions.RayActorError as error:
            raise EngineError(f"{name} did not start: its process ended (log: {self._log(name)})") from error

    def _log(self, name: str) -> str:
        return f"{self._logs}/{name.replace('/', '-')}.log"


def _names(pending: Iterable[str]) -> str:
    return ", ".join(sorted(pending))


def _reason(reference: Any) -> str:
    try:
        ray.get(reference)
    except Exception as error:
        return describe(error)
    return "its loop ended"
