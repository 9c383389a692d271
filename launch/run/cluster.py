"""All actors of a run: start them, ask them, stop them.

The controller owns one `Cluster`. Everything it starts it stops itself, by handle.
"""

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import ray

from areal_lite.actors.calls import Calls, Question, call_all, describe
from areal_lite.actors.process import log_path
from areal_lite.actors.queue import QueueActor
from areal_lite.actors.rollout import RolloutActor
from areal_lite.actors.trainer import OnlineTrainerActor
from areal_lite.actors.verifier import VerifierActor
from areal_lite.config.recipe import Config
from areal_lite.errors import EngineError, VerifierError
from areal_lite.events import Event
from areal_lite.launch.run.engines import RayEngines
from areal_lite.launch.run.lifetime import kill_all, stop_all, wait_until_started
from areal_lite.launch.run.places import Places
from areal_lite.launch.run.ranks import Ranks
from areal_lite.sample_queue.access import QueueAccess, Role
from areal_lite.sample_queue.client import QueueClient
from areal_lite.types import Prompt

logger = logging.getLogger(__name__)

_REPORT_WAIT_S = 2.0
"""How long everybody waits for the reports of all workers; a late one is taken up the next time."""


class Cluster:
    """The actors of one run, by lane name: `queue`, `rollout/0`, `verifier/0`, `trainer/0` and so on."""

    def __init__(
        self,
        config: Config,
        *,
        places: Places,
        model_folder: Path,
        log_folder: Path,
        queue_state: bytes | None,
        prompts: Mapping[str, list[Prompt]],
        rollout_actor: type = RolloutActor,
    ) -> None:
        """Start the queue and the trainer ranks.

        Args:
            places: Reserved for this run.
            model_folder: Hugging Face folder with the initial weights and the tokenizer.
            queue_state: Of the checkpoint to go on from.
            prompts: To train on, by source.
            rollout_actor: What a benchmark measures may be more than a run needs.
        """
        self._config, self._places, self._rollout_actor = config, places, rollout_actor
        self._logs, self._model_folder = str(log_folder), str(model_folder)
        self.lost: dict[str, str] = {}
        """Rollout workers given up, with the reason."""
        queue = {"log_folder": self._logs, "state": queue_state, "prompts": prompts}
        self._queue_actor = places.spawn(QueueActor, "queue", **queue)
        self.ranks = Ranks(OnlineTrainerActor, config, places=places, log_folder=log_folder)
        self.verifiers: dict[str, Any] = {}
        self.engines = RayEngines({}, timeout_s=config.run.stall_timeout_s, on_drop=self._note_lost)
        self._serving = Calls({})
        self._connected: set[str] = set()
        self._reports = Question("collect")

    def start(self, *, checkpoint: Path | None, on_progress: Callable[[str], None]) -> int:
        """Start everything and connect it; returns the trainer's version.

        Raises:
            StallError: An actor did not start within `run.start_timeout_s`; names it.
            EngineError, VerifierError, CheckpointError: As the actor said.
        """
        config = self._config
        access = self._wait(Calls({"queue": self._queue_actor.access.remote()}), on_progress)["queue"]
        self.queue = QueueClient(access[Role.CONTROLLER], timeout_s=config.queue.lease_timeout_s)
        self.engines.handles |= self._spawn_workers(self._rollout_actor, Role.ROLLOUT, config.rollout.workers, access)
        self.verifiers |= self._spawn_workers(VerifierActor, Role.VERIFIER, config.verifier.workers, access)
        ranks = self.ranks.start(model_folder=self._model_folder, access=access[Role.TRAINER])
        self._wait(Calls(ranks.pending | call_all(self._workers, "start").pending), on_progress)
        version = 0 if checkpoint is None else self.ranks.load(checkpoint)
        for name, failure in self._connect().items():
            if failure is not None:
                self.engines.drop(name, failure)
        return version

    def serve(self) -> None:
        """Let the workers ask for work."""
        self._serving = call_all(self._workers, "run")

    def check_workers(self) -> None:
        """Give up rollout workers that ended; raise when somebody indispensable did.

        Raises:
            HandoverError: No rollout worker is left.
            VerifierError: A verifier worker ended.
        """
        for name, error in self._serving.answers(0.0):
            reason = "its loop ended" if error is None else describe(error)
            if name in self.verifiers:
                raise VerifierError(f"{name} ended: {reason}; log: {log_path(self._logs, name)}")
            self.engines.drop(name, reason)
        self.engines.raise_if_none()

    def publish(self) -> dict[str, str | None]:
        """Have all ranks send the present weights, to the engines that are alive now.

        Returns:
            Per engine None or why it failed: to join, or in the transfer.
        """
        failures: dict[str, str | None] = {}
        if self._connected != set(self.engines.handles):
            failures = self._connect()
            if any(failures.values()) and not self._config.weights.staged:
                return failures  # There is no group to send to.
        # The engines' own deadlines (open, receive, load) come first, so that a late engine is blamed and not a rank.
        timeout_s = 3 * self._config.weights.timeout_s + self._config.run.stall_timeout_s
        sent, *_ = self.ranks.ask("publish", timeout_s=timeout_s)
        return {**failures, **sent}

    def _connect(self) -> dict[str, str | None]:
        """Form the transfer groups with the engines that are alive; returns per engine None or why it failed."""
        self._connected = set(self.engines.handles)
        timeout_s = self._config.run.start_timeout_s + 2 * self._config.weights.join_timeout_s
        failures, *_ = self.ranks.ask("connect", dict(self.engines.handles), timeout_s=timeout_s)
        return dict(failures)

    def collect(self) -> tuple[list[Event], dict[str, dict[str, Any]]]:
        """Events of all workers since the last call, and their gauges by lane; the dead are left to `check_workers`."""
        reports, failed = self._reports.ask(self._workers, wait_s=_REPORT_WAIT_S)
        for name, error in failed.items():
            if isinstance(error, EngineError):
                self.engines.drop(name, str(error))
            elif isinstance(error, ray.exceptions.RayActorError):
                logger.warning("%s did not report", name)
            else:
                raise error
        return [event for events, _ in reports.values() for event in events], {
            name: gauges for name, (_, gauges) in reports.items()
        }

    def stop(self) -> None:
        """Stop every actor, then end what did not stop by itself."""
        stop_all({**self._workers, **self.ranks.handles, "queue": self._queue_actor})
        self.kill()

    def kill(self) -> None:
        """End every actor at once."""
        self.ranks.kill()
        kill_all([*self._workers.values(), self._queue_actor])
        if hasattr(self, "queue"):
            self.queue.close()

    @property
    def _workers(self) -> dict[str, Any]:
        return {**self.engines.handles, **self.verifiers}

    def _note_lost(self, name: str, reason: str) -> None:
        logger.warning("rollout worker %s was lost: %s", name, reason)
        self.lost[name] = reason
        self._serving.pending.pop(name, None)
        self.queue.forget(worker=name)

    def _spawn_workers(self, kind: type, role: Role, count: int, access: Mapping[Role, QueueAccess]) -> dict[str, Any]:
        common = {"access": access[role], "model_folder": self._model_folder, "log_folder": self._logs}
        names = [f"{role}/{index}" for index in range(count)]
        return {name: self._places.spawn(kind, name, name=name, **common) for name in names}

    def _wait(self, starting: Calls, on_progress: Callable[[str], None]) -> dict[str, Any]:
        timeout_s = self._config.run.start_timeout_s
        return wait_until_started(starting, timeout_s=timeout_s, logs=self._logs, on_progress=on_progress)
