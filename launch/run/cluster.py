"""All actors of a run: sample queue, rollout and verifier workers, trainer ranks.

The controller owns one `Cluster`, and calls `watch_workers` beside each of its waits. There a dead or hung worker is
given up and restarted, and a dead queue replaced; a dead rank raises, as only a checkpoint brings the ranks back. A
restarted verifier gets work at once, a restarted engine after the next publication, which gives it the weights.
"""

import logging
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import psutil
import ray

from areal_lite.actors.calls import Calls, Poller, call_all, describe, has_died, kill, stop_all
from areal_lite.actors.process import log_path, resident_mb
from areal_lite.actors.queue import QueueActor
from areal_lite.actors.rollout import RolloutActor
from areal_lite.actors.trainer import OnlineTrainerActor
from areal_lite.actors.verifier import VerifierActor
from areal_lite.config.recipe import Config
from areal_lite.errors import ArealLiteError, EngineError, QueueError, QueueTimeout, VerifierError
from areal_lite.events import Event, now
from areal_lite.launch.run.engines import RayEngines
from areal_lite.launch.run.places import Places
from areal_lite.launch.run.ranks import Ranks
from areal_lite.launch.run.restarts import Restarts, State
from areal_lite.sample_queue.access import Role
from areal_lite.sample_queue.client import QueueClient
from areal_lite.types import Prompt

logger = logging.getLogger(__name__)

_COPY_EVERY_S = 1.0
"""Shortest time between copies of the queue's state; 20 times the duration of a copy is added."""
_LONG_COPY_S = 5.0
"""A copy that takes longer is not made for every batch: it would delay every step."""
_REPORT_WAIT_S = 2.0
"""Longest wait for the reports of workers; a worker that is late is not waited for again until it has answered."""


class Cluster:
    """The actors of one run, by lane name: `queue`, `rollout/0`, `verifier/0`, `trainer/0` and so on."""

    _config: Config

    def __init__(
        self,
        places: Places,
        *,
        model_folder: Path,
        queue_state: bytes | None,
        prompts: Mapping[str, list[Prompt]],
        rollout_actor: type = RolloutActor,
    ) -> None:
        """Start the processes of the queue and the trainer ranks.

        Args:
            places: Reserved for this run.
            model_folder: Hugging Face folder with the initial weights and the tokenizer.
            queue_state: From the checkpoint to resume; None for a new run.
            prompts: Training prompts by source.
            rollout_actor: Another class for the benchmarks.
        """
        self._config, self._places, self._logs = places.config, places, places.logs
        self._rollout_actor = rollout_actor
        self._model_folder, self._prompts = str(model_folder), prompts
        self.verifiers: dict[str, Any] = {}
        run = self._config.run
        self.engines = RayEngines({}, timeout_s=run.stall_timeout_s, on_drop=self._note_lost)
        self.restarts = Restarts(self._respawn, most=run.max_worker_restarts, start_timeout_s=run.start_timeout_s)
        self._reports, self._memory_polls = Poller("collect"), Poller("memory_mb")
        self.publish_mb_s = dict[str, float]()
        """The speed at which each engine received the last weights, where each has a connection of its own."""
        self._has_started = False
        self._spawn_core(queue_state)

    def _spawn_queue(self, state: bytes | None, *, keep_batch: bool = False) -> None:
        queue = {"state": state, "prompts": self._prompts, "keep_batch": keep_batch}
        self._queue_actor = self._places.spawn(QueueActor, "queue", **queue)
        self._queue_pings = Poller("ping")

    def _spawn_core(self, queue_state: bytes | None) -> None:
        self._taken, self._copy, self.trained = "", b"", ""
        self._copy_due = self._copy_took_s = 0.0
        self.replaced: dict[str, Any] | None = None
        """What was kept and lost when the queue was replaced; the controller reports it and sets this to None."""
        self._spawn_queue(queue_state)
        self.ranks = Ranks(OnlineTrainerActor, self._places)
        self._serving = Calls({})
        self._connected: dict[str, Any] = {}

    def replace_core(self, queue_state: bytes | None) -> None:
        """Replace the queue and the ranks, which depend on each other; call `start` afterwards."""
        self.ranks.kill()
        kill(self._queue_actor)
        self.queue.close()
        self.restarts.restart_pending()
        self._spawn_core(queue_state)

    def start(self, *, checkpoint: Path | None, on_progress: Callable[[str], object]) -> int:
        """Start and connect whatever is missing; returns the trainer's version.

        Workers from before `replace_core` drop their work and move to the new queue; one that cannot is lost.

        Raises:
            StallError: An actor did not start within `run.start_timeout_s`; names it.
            EngineError, VerifierError, CheckpointError: Raised by the actor.
        """
        config, self._print = self._config, on_progress
        self._wait_for_queue()
        access, timeout_s = self._access, config.queue.lease_timeout_s
        self.queue = QueueClient(access[Role.CONTROLLER], timeout_s=timeout_s, check=self._check_queue)
        moving = self._send_to_queue(self._workers, "move_to")
        if not self._has_started:
            self.engines.handles |= {name: self._spawn(name) for name in _names(Role.ROLLOUT, config.rollout.workers)}
            self.verifiers |= {name: self._spawn(name) for name in _names(Role.VERIFIER, config.verifier.workers)}
        starting = call_all({} if self._has_started else self._workers, "start")
        if config.weights.transport == "ipc":
            # A starting engine measures what its GPU's memory loses: it would count a rank's share as its own.
            self._places.wait_until_started(starting, on_progress)
        ranks = self.ranks.start(model_folder=self._model_folder, access=access[Role.TRAINER])
        self._places.wait_until_started(Calls(ranks.pending | starting.pending), on_progress)
        self._has_started = True
        version = 0 if checkpoint is None else self.ranks.load(checkpoint)
        # An engine in the middle of a transfer needs up to one time-out to end it, and another to leave.
        failed = {name: describe(error) for name, error in moving.failures(2 * config.weights.timeout_s).items()}
        for name, why in (failed | dict.fromkeys(moving.pending, "it is late")).items():
            self._lose(name, f"it could not leave the dead queue: {why}")
        for name, failure in self._connect().items() if self.engines.handles else ():
            if failure is not None:
                self.engines.drop(name, failure)
        return version

    def serve(self) -> None:
        """Have all workers ask the queue for work."""
        idle = {name: handle for name, handle in self._workers.items() if name not in self._serving.pending}
        self._serving.pending |= call_all(idle, "run").pending
        self.engines.expects_more = lambda: self.restarts.awaits(Role.ROLLOUT)

    def watch_workers(self) -> None:
        """Give up workers that ended, restart them when due, and give restarted verifiers work.

        Raises:
            QueueError, RankDied: The sample queue or a trainer rank died.
        """
        self._check_queue()
        for name, error in self._serving.answers(0.0):
            reason = "its loop ended" if error is None else describe(error)
            if name in self.verifiers and not has_died(error):
                self.restarts.give_up(name, reason)  # its process works; the verifier would fail again
            else:
                self._lose(name, reason)
        self.restarts.poll()
        self.verifiers |= (ready := self.restarts.take(Role.VERIFIER))
        self.activate(ready)

    def _check_queue(self) -> None:
        self.ranks.progress()
        _, failed = self._queue_pings.poll({"queue": self._queue_actor}, wait_s=0.0)
        if died := failed.get("queue"):
            log = log_path(self._logs, "queue")
            failure = QueueError(f"the sample queue died: {describe(died)}; log: {log}")
            may_replace = self._taken and self._copy and self._config.run.max_restarts
            if not (may_replace and self._places.placement.reaches("queue")):
                raise failure
            try:
                self._replace_queue(failure)
            except (ArealLiteError, ray.exceptions.RayError) as error:
                raise failure from error

    def mark_batch_taken(self, batch_id: str = "") -> None:
        """Drop copies of the queue from before this batch; without a batch, the queue is not replaced any more."""
        self._taken, self._copy = batch_id, b""
        if self._copy_took_s < _LONG_COPY_S:
            self._copy_due = 0.0

    def copy_queue(self) -> None:
        """Copy the queue's state if a batch is taken and the last copy is old enough."""
        begun = time.monotonic()
        if self._taken and begun > self._copy_due:
            try:
                self._copy = self.queue.save()
            except QueueTimeout as error:
                logger.warning("the queue gave no copy of its state: %s", error)
            self._copy_took_s = time.monotonic() - begun
            self._copy_due = time.monotonic() + _COPY_EVERY_S + 20 * self._copy_took_s

    def _replace_queue(self, failure: QueueError) -> None:
        """Start a new queue from the copy, once for each batch; workers keep their leases and ranks their batch."""
        noticed, batch_id, copy = now(), self._taken, self._copy
        self.mark_batch_taken()
        kill(self._queue_actor)
        self._print(f"{failure}; restarting it from a copy of its state")
        self._spawn_queue(copy, keep_batch=True)
        self._wait_for_queue()
        self.queue.move_to(self._access[Role.CONTROLLER])
        if self.trained == batch_id:
            self.queue.complete_step(batch_id=batch_id)
        else:
            self.queue.take(batch_id=batch_id, wait_s=0.0)
        moving = self._send_to_queue(self._workers | self.ranks.handles, "reconnect")
        for name in {**moving.failures(self._config.run.stall_timeout_s), **moving.pending}:
            if name in self.ranks.handles:
                raise failure
            self._lose(name, "it did not connect to the new queue")
        self.restarts.restart_pending()
        self.queue.open_admission()
        kept = [moving.values[name] for name in self._workers]
        counts = self.queue.status()["counts"]
        self.replaced = {
            "noticed": noticed,
            "reason": str(failure),
            "leases_kept": sum(one for one, _ in kept),
            "leases_lost": sum(one for _, one in kept),
            "waiting": counts["waiting"],
            "finished": sum(counts[state] for state in ("generated", "ready", "taken")),
        }

    def check_workers(self) -> None:
        """Watch the workers; raise if one that the run needs is dead for good.

        Raises:
            HandoverError: No rollout worker is left.
            VerifierError: A verifier worker ended.
        """
        self.watch_workers()
        for name, reason in self.restarts.dead.items():
            if name.startswith(Role.VERIFIER):
                raise VerifierError(f"{name} ended: {reason}; log: {log_path(self._logs, name)}")
        self.engines.raise_if_none()

    @property
    def is_halted(self) -> bool:
        """Whether there is no engine, or no verifier, until a restart is done; a restart has a deadline of its own."""
        return not (self.engines.handles and self.verifiers)

    @property
    def awaits_publication(self) -> bool:
        """Whether every engine waits for a publication: without a batch from them, none would come by itself."""
        return not self.engines.handles and bool(self.restarts.ready(Role.ROLLOUT))

    def admit_ready_engines(self) -> list[str]:
        """Make restarted engines receivers of the next publication; returns their names."""
        self.engines.handles |= (ready := self.restarts.take(Role.ROLLOUT))
        return list(ready)

    def activate(self, names: Collection[str]) -> None:
        """Have admitted workers ask for work; those lost in the meantime are skipped."""
        workers = {name: handle for name, handle in self._workers.items() if name in names}
        self._serving.pending |= call_all(workers, "run").pending
        for name in workers:
            self.restarts.back(name)

    def scale(self, wanted: Mapping[Role, int]) -> tuple[list[str], list[str]]:
        """Set the number of workers of each role; new ones start beside the steps.

        Returns:
            The names of those started, and of those dismissed: the highest numbers.
        """
        started, dismissed = list[str](), list[str]()
        for role, count in wanted.items():
            there = [name for name in (*self._workers, *self.restarts.states) if _role(name) is role]
            started += [name for name in _names(role, count) if name not in there or name in self.restarts.dead]
            dismissed += sorted(set(there) - set(_names(role, count)))
        for name in started:
            self.restarts.add(name)
        for name in dismissed:
            self.restarts.dismiss(name)
            kill(self.engines.forget(name) or self.verifiers.pop(name, None))
            self._serving.pending.pop(name, None)
            self.queue.forget(worker=name)
        return started, dismissed

    def states(self) -> dict[str, int]:
        """Count the workers in each state."""
        silent = self._reports.silent()
        alive = {name: State.SUSPECT if name in silent else State.HEALTHY for name in self._workers}
        return dict(Counter((alive | self.restarts.states).values()))

    def publish(self) -> dict[str, str | None]:
        """Send the current weights from all ranks to the live engines.

        Returns:
            None for each engine that has them, and the reason for each that failed to join or to receive.
        """
        failures: dict[str, str | None] = {}
        if not self.engines.handles:
            return failures
        if self._connected != self.engines.handles:
            failures = self._connect()
            if any(failures.values()) and not self._config.weights.staged:
                return failures  # There is no group to send to.
        # Longer than the engines' own deadlines (open, receive, load), so that a late engine is blamed, not a rank.
        timeout_s = 3 * self._config.weights.timeout_s + self._config.run.stall_timeout_s
        (sent, self.publish_mb_s), *_ = self.ranks.ask("publish", timeout_s=timeout_s)
        return {**failures, **sent}

    def _connect(self) -> dict[str, str | None]:
        """Form transfer groups with the live engines; returns None for each engine, or why it failed."""
        before, self._connected = self._connected, dict(self.engines.handles)
        kept = [name for name, handle in self._connected.items() if before.get(name) == handle]
        timeout_s = self._config.run.start_timeout_s + 2 * self._config.weights.timeout_s
        failures, *_ = self.ranks.ask("connect", self._connected, kept, timeout_s=timeout_s)
        return dict(failures)

    def collect(self) -> tuple[list[Event], dict[str, dict[str, Any]]]:
        """Return the workers' new events, and their gauges by lane; `watch_workers` handles dead ones."""
        reports, failed = self._reports.poll(self._workers, wait_s=_REPORT_WAIT_S)
        for name, error in failed.items():
            if isinstance(error, EngineError):
                self.engines.drop(name, str(error))
            elif not has_died(error):
                raise error
        self.replace_silent(self._config.run.stall_timeout_s)
        return [event for events, _ in reports.values() for event in events], {
            name: gauges for name, (_, gauges) in reports.items()
        }

    def memory_mb(self) -> dict[str, int]:
        """Return the memory of each process of the run in MiB, as last measured; nothing is waited for."""
        actors = {**self._workers, **self.ranks.handles, "queue": self._queue_actor}
        self._memory_polls.poll(actors, wait_s=0.0)
        # Below this process there may be a Ray of its own, with all actors.
        return self._memory_polls.latest | {"controller": resident_mb([psutil.Process()])}

    def replace_silent(self, after_s: float) -> list[str]:
        """Give up workers that have not reported for so long: their processes hang. Returns their names."""
        silent = {name: silent_s for name, silent_s in self._reports.silent().items() if name in self._workers}
        hung = [name for name, silent_s in silent.items() if silent_s > after_s]
        for name in hung:
            self._lose(name, f"its process hangs: no report for {silent[name]:.0f} s")
        return hung

    def stop(self) -> None:
        """Stop every actor, and kill those that do not stop."""
        stop_all({**self._workers, **self.ranks.handles, "queue": self._queue_actor})
        self.kill()

    def kill(self) -> None:
        """Kill every actor."""
        self.ranks.kill()
        kill(*self._workers.values(), *self.restarts.handles.values(), self._queue_actor)
        if hasattr(self, "queue"):
            self.queue.close()

    @property
    def _workers(self) -> dict[str, Any]:
        return {**self.engines.handles, **self.verifiers}

    def _lose(self, name: str, reason: str) -> None:
        if name in self.verifiers:
            kill(self.verifiers.pop(name))
            self._note_lost(name, reason)
        else:
            self.engines.drop(name, reason)

    def _note_lost(self, name: str, reason: str) -> None:
        self._serving.pending.pop(name, None)
        self.restarts.lost(name, reason)
        self.queue.forget(worker=name)  # last, as it raises if the queue died too

    def _respawn(self, name: str) -> Any:
        return self._spawn(name) if self._places.has_place(name) else None

    def _spawn(self, name: str) -> Any:
        role = _role(name)
        kind = self._rollout_actor if role is Role.ROLLOUT else VerifierActor
        common = {"access": self._access[role], "model_folder": self._model_folder}
        return self._places.spawn(kind, name, name=name, **common)

    def _wait_for_queue(self) -> None:
        opening = Calls({"queue": self._queue_actor.access.remote()})
        self._access = self._places.wait_until_started(opening, self._print)["queue"]

    def _send_to_queue(self, members: Mapping[str, Any], method: str) -> Calls:
        return Calls({name: getattr(one, method).remote(self._access[_role(name)]) for name, one in members.items()})


def _role(name: str) -> Role:
    return Role(name.partition("/")[0])


def _names(role: Role, count: int) -> list[str]:
    return [f"{role}/{index}" for index in range(count)]
