"""All actors of a run: start them, ask them, stop them.

The controller owns one `Cluster`. Everything it starts it stops itself, by handle. Actors of an earlier run that are
handed in are its own from then on, until it releases them.
"""

import contextlib
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import ray

from areal_lite.actors.queue import QueueActor
from areal_lite.actors.rollout import RolloutActor
from areal_lite.actors.trainer import TrainerActor
from areal_lite.actors.verifier import VerifierActor
from areal_lite.config.recipe import Config
from areal_lite.errors import ArealLiteError, EngineError, VerifierError
from areal_lite.events import Event
from areal_lite.launch.run.engines import RayEngines
from areal_lite.launch.run.placement import actor_options
from areal_lite.launch.run.ranks import Ranks
from areal_lite.launch.run.remote import Question, describe, result
from areal_lite.launch.run.starting import log_path, wait_until_started
from areal_lite.sample_queue.client import QueueClient
from areal_lite.types import Prompt

__all__ = ["Cluster"]

logger = logging.getLogger(__name__)

_STOP_TIMEOUT_S = 20.0
_REPORT_WAIT_S = 2.0
"""How long everybody waits for the reports of all workers; a late one is taken up the next time."""


class Cluster:
    """The actors of one run, by lane name: `queue`, `rollout/0`, `verifier/0`, `trainer/0` and so on."""

    def __init__(
        self,
        config: Config,
        *,
        model_folder: Path,
        log_folder: Path,
        queue_state: bytes | None,
        prompts: Mapping[str, list[Prompt]] | None = None,
        kept: Mapping[str, Any] | None = None,
    ) -> None:
        """Start the queue and the trainer ranks.

        Args:
            config: The recipe.
            model_folder: Hugging Face folder with the initial weights and the tokenizer.
            log_folder: Gets a log per actor.
            queue_state: Of the checkpoint to go on from.
            prompts: To train on, by source; None = the queue loads them, for which it needs seconds more.
            kept: Actors that an earlier run of this session released, by lane name; they are taken before new ones.
        """
        self._config = config
        self._kept = dict(kept or {})
        self.is_new = not kept
        """No process of an earlier run is used."""
        self._logs = str(log_folder)
        self._model_folder = str(model_folder)
        self.lost: dict[str, str] = {}
        """Rollout workers given up, with the reason."""
        self._actors: list[Any] = list(self._kept.values())
        self._beginning: dict[str, Any] = {}
        self._queue_actor = self._spawn(
            QueueActor,
            "queue",
            model_folder=self._model_folder,
            log_folder=self._logs,
            state=queue_state,
            prompts=prompts,
        )
        self.trainers = {
            f"trainer/{rank}": self._spawn(TrainerActor, f"trainer/{rank}", rank=rank, log_folder=self._logs)
            for rank in range(config.trainer.ranks)
        }
        self._serving: dict[str, Any] = {}
        self._connected: set[str] = set()
        self.ranks = Ranks(self.trainers, log_of=self._log)
        self._reports = Question("collect")

    def start(self, *, checkpoint: Path | None, on_progress: Callable[[str], None]) -> int:
        """Start everything and connect it; returns the trainer's version.

        Raises:
            StallError: An actor did not start within `run.start_timeout_s`; names it.
            EngineError, VerifierError, CheckpointError: As the actor said.
        """
        config = self._config
        self._wait_for_kept()
        endpoint = self._wait({"queue": self._queue_actor.endpoint.remote()}, on_progress)["queue"]
        self.queue = QueueClient(endpoint, timeout_s=config.queue.lease_timeout_s)
        rollouts = self._spawn_many(
            RolloutActor, "rollout", config.rollout.workers, endpoint=endpoint, model_folder=self._model_folder
        )
        self.verifiers = self._spawn_many(
            VerifierActor, "verifier", config.verifier.workers, endpoint=endpoint, model_folder=self._model_folder
        )
        self._wait_for_kept()
        address = result(self.trainers["trainer/0"].open_store.remote(), timeout_s=config.run.start_timeout_s)
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
        return self.ranks.ask(method, *args, timeout_s=timeout_s)

    def release(self) -> dict[str, Any]:
        """End the run in every actor and hand the actors out, by lane name: the caller owns them from now on.

        One that is dead, or does not let go of its run, is not among them.
        """
        actors = {**self.engines.handles, **self.verifiers, **self.trainers, "queue": self._queue_actor}
        references = {name: actor.release.remote() for name, actor in actors.items()}
        for name, reference in references.items():
            try:
                result(reference, timeout_s=_STOP_TIMEOUT_S)
            except (ArealLiteError, ray.exceptions.RayError) as error:
                logger.warning("%s did not let go of its run: %s", name, describe(error))
                del actors[name]
        self._actors = [actor for actor in self._actors if actor not in actors.values()]
        self.kill()
        return actors

    def stop(self) -> None:
        """Stop every actor in the order of the data, then end what did not stop by itself."""
        engines = self.engines.handles if hasattr(self, "engines") else {}
        others = (*getattr(self, "verifiers", {}).values(), *self.trainers.values(), self._queue_actor)
        stopping = [handle.stop.remote() for handle in engines.values()]
        stopping += [handle.release.remote() for handle in others]
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

    def _spawn(self, kind: type, lane: str, **arguments: Any) -> Any:
        """Start an actor, or begin with a kept one."""
        if (kept := self._kept.pop(lane, None)) is not None:
            self._beginning[lane] = kept.begin.remote(self._config, **arguments)
            return kept
        remote = ray.remote(kind).options(**actor_options(self._config, lane.partition("/")[0]))
        actor = remote.remote(self._config, **arguments)
        self._actors.append(actor)
        return actor

    def _spawn_many(self, kind: type, role: str, count: int, **arguments: Any) -> dict[str, Any]:
        names = [f"{role}/{index}" for index in range(count)]
        return {name: self._spawn(kind, name, name=name, log_folder=self._logs, **arguments) for name in names}

    def _wait_for_kept(self) -> None:
        self._wait(self._beginning, lambda _: None)
        self._beginning = {}

    def _wait(self, references: dict[str, Any], on_progress: Callable[[str], None]) -> dict[str, Any]:
        timeout_s = self._config.run.start_timeout_s
        return wait_until_started(references, timeout_s=timeout_s, logs=self._logs, on_progress=on_progress)

    def _log(self, name: str) -> str:
        return log_path(self._logs, name)


def _reason(reference: Any) -> str:
    try:
        ray.get(reference)
    except Exception as error:
        return describe(error)
    return "its loop ended"
