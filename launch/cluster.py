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
from areal_lite.errors import ArealLiteError, EngineError, StallError, VerifierError
from areal_lite.events import Event
from areal_lite.launch.engines import RayEngines
from areal_lite.launch.placement import actor_options
from areal_lite.launch.remote import describe, result
from areal_lite.sample_queue.client import QueueClient

__all__ = ["Cluster"]

logger = logging.getLogger(__name__)

_STOP_TIMEOUT_S = 20.0


class Cluster:
    """The actors of one run, by lane name: `queue`, `rollout/0`, `verifier/0`, `trainer/0` and so on."""

    def __init__(self, config: Config, *, model_folder: Path, log_folder: Path, queue_state: bytes | None) -> None:
        self._config = config
        self._logs = str(log_folder)
        self._model_folder = str(model_folder)
        self.lost: dict[str, str] = {}
        """Rollout workers given up, with the reason."""
        self._queue_actor = self._spawn(
            QueueActor, "queue", model_folder=self._model_folder, log_folder=self._logs, state=queue_state
        )
        self.trainers = [
            self._spawn(TrainerActor, "trainer", rank=rank, log_folder=self._logs)
            for rank in range(config.trainer.ranks)
        ]
        self._serving: dict[str, Any] = {}

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
        address = result(self.trainers[0].free_address.remote(), timeout_s=config.run.start_timeout_s)
        starting = {
            f"trainer/{rank}": trainer.start.remote(
                address=address,
                model_folder=self._model_folder,
                endpoint=endpoint,
                checkpoint=None if checkpoint is None else str(checkpoint / "trainer"),
            )
            for rank, trainer in enumerate(self.trainers)
        }
        workers = {**rollouts, **self.verifiers}
        starting |= {name: handle.start.remote() for name, handle in workers.items()}
        started = self._wait(starting, on_progress)
        self.pids = {name: started[name] for name in rollouts}
        self.engines = RayEngines(rollouts, timeout_s=config.run.stall_timeout_s, on_drop=self._note_lost)
        self.connect_weights()
        return int(started["trainer/0"])

    def connect_weights(self) -> None:
        """Form the transfer groups with the engines that are alive."""
        references = [trainer.connect.remote(dict(self.engines.handles)) for trainer in self.trainers]
        failures, *_ = [result(item, timeout_s=self._config.run.start_timeout_s) for item in references]
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
        if not self._serving:
            return
        names = {reference: name for name, reference in self._serving.items()}
        ended, _ = ray.wait(list(names), num_returns=len(names), timeout=0)
        for reference in ended:
            name = names[reference]
            del self._serving[name]
            reason = _reason(reference)
            if name in self.verifiers:
                raise VerifierError(f"{name} ended: {reason}; log: {self._log(name)}")
            self.engines.drop(name, reason)

    def publish(self) -> dict[str, str | None]:
        """Have all ranks send the present weights."""
        references = [trainer.publish.remote() for trainer in self.trainers]
        failures, *_ = [result(item, timeout_s=self._config.run.stall_timeout_s) for item in references]
        return dict(failures)

    def collect(self) -> tuple[list[Event], dict[str, dict[str, float]]]:
        """Events of all workers since the last call, and their gauges by lane; the dead are left to `check_workers`."""
        workers = {**self.engines.handles, **self.verifiers}
        references = {name: handle.collect.remote() for name, handle in workers.items()}
        events: list[Event] = []
        gauges: dict[str, dict[str, float]] = {}
        for name, reference in references.items():
            try:
                lane_events, gauges[name] = result(reference, timeout_s=self._config.run.stall_timeout_s)
            except EngineError as error:
                self.engines.drop(name, str(error))
            except (ray.exceptions.RayActorError, ray.exceptions.GetTimeoutError):
                logger.warning("%s did not report", name)
            else:
                events += lane_events
        return events, gauges

    def trainer_progress(self) -> tuple[int, ...]:
        """One growing number per rank.

        Raises:
            RayActorError: A rank is dead.
        """
        references = [trainer.progress.remote() for trainer in self.trainers]
        return tuple(result(item, timeout_s=_STOP_TIMEOUT_S) for item in references)

    def stop(self) -> None:
        """Stop every actor in the order of the data, then end what did not stop by itself."""
        engines = self.engines.handles if hasattr(self, "engines") else {}
        verifiers = getattr(self, "verifiers", {})
        stopping = [handle.stop.remote() for handle in (*engines.values(), *verifiers.values(), *self.trainers)]
        stopping.append(self._queue_actor.close.remote())
        with contextlib.suppress(Exception):
            ray.wait(stopping, num_returns=len(stopping), timeout=_STOP_TIMEOUT_S)
        self.kill()

    def kill(self) -> None:
        """End every actor at once."""
        engines = self.engines.handles if hasattr(self, "engines") else {}
        actors = [*engines.values(), *getattr(self, "verifiers", {}).values(), *self.trainers, self._queue_actor]
        for actor in actors:
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
        return remote.remote(self._config, **arguments)

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
