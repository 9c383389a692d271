"""All actors of a run: start them, ask them, stop them.

The controller owns one `Cluster`. Everything it starts it stops itself, by handle.
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
from areal_lite.events import Event
from areal_lite.launch.run.engines import RayEngines
from areal_lite.launch.run.places import Places
from areal_lite.launch.run.ranks import Ranks
from areal_lite.launch.run.restarts import Restarts, State
from areal_lite.sample_queue.access import Role
from areal_lite.sample_queue.client import QueueClient
from areal_lite.types import Prompt

logger = logging.getLogger(__name__)

_COPY_EVERY_S = 1.0
"""Between copies of the queue's state with one batch, where one takes a moment; else 20 times as long as it takes."""
_LONG_COPY_S = 5.0
"""Where one took longer, the first one with the next batch waits too: it would hold up every step."""
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
            queue_state: Of the checkpoint to go on from.
            prompts: To train on, by source.
            rollout_actor: What a benchmark measures may be more than a run needs.
        """
        self._config, self._places, self._logs = places.config, places, places.logs
        self._rollout_actor = rollout_actor
        self._model_folder, self._prompts = str(model_folder), prompts
        self.verifiers: dict[str, Any] = {}
        run = self._config.run
        self.engines = RayEngines({}, timeout_s=run.stall_timeout_s, on_drop=self._note_lost)
        self.restarts = Restarts(self._respawn, most=run.max_worker_restarts, start_timeout_s=run.start_timeout_s)
        self._reports, self._memory_polls = Poller("collect"), Poller("memory_mb")
        self._memory_mb = dict[str, int]()
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
        """What became of the work when the queue was replaced, for whoever tells of it, who takes it away."""
        self._spawn_queue(queue_state)
        self.ranks = Ranks(OnlineTrainerActor, self._places)
        self._serving = Calls({})
        self._connected: dict[str, Any] = {}

    def renew(self, queue_state: bytes | None) -> None:
        """Replace queue and trainer ranks, neither of which goes on without the other; then call `start` again."""
        self.ranks.kill()
        kill(self._queue_actor)
        self.queue.close()
        self.restarts.begin_anew()
        self._spawn_core(queue_state)

    def start(self, *, checkpoint: Path | None, on_progress: Callable[[str], object]) -> int:
        """Start everything that is not there yet, and connect it; returns the trainer's version.

        Workers that are there leave what they do for the queue that was replaced; one that cannot is lost.

        Raises:
            StallError: An actor did not start within `run.start_timeout_s`; names it.
            EngineError, VerifierError, CheckpointError: As the actor said.
        """
        config, self._say = self._config, on_progress
        self._find_queue()
        access, timeout_s = self._access, config.queue.lease_timeout_s
        self.queue = QueueClient(access[Role.CONTROLLER], timeout_s=timeout_s, check=self._feel_pulse)
        moving = self._send_to_queue(self._workers, "move_to")
        if not self._has_started:
            self.engines.handles |= {name: self._spawn(name) for name in _names(Role.ROLLOUT, config.rollout.workers)}
            self.verifiers |= {name: self._spawn(name) for name in _names(Role.VERIFIER, config.verifier.workers)}
        starting = call_all({} if self._has_started else self._workers, "start")
        if config.weights.transport == "ipc":
            # As it starts, an engine takes what its GPU's memory loses for its own: a rank would leave it no cache.
            self._places.wait_until_started(starting, on_progress)
        ranks = self.ranks.start(model_folder=self._model_folder, access=access[Role.TRAINER])
        self._places.wait_until_started(Calls(ranks.pending | starting.pending), on_progress)
        self._has_started = True
        version = 0 if checkpoint is None else self.ranks.load(checkpoint)
        # An engine that is in the middle of a transfer ends it within one of these times.
        failed = {name: describe(error) for name, error in moving.failures(2 * config.weights.timeout_s).items()}
        for name, why in (failed | dict.fromkeys(moving.pending, "it is late")).items():
            self._lose(name, f"it must leave a queue that is gone: {why}")
        for name, failure in self._connect().items() if self.engines.handles else ():
            if failure is not None:
                self.engines.drop(name, failure)
        return version

    def serve(self) -> None:
        """Let the workers ask for work."""
        idle = {name: handle for name, handle in self._workers.items() if name not in self._serving.pending}
        self._serving.pending |= call_all(idle, "run").pending
        self.engines.awaits_others = lambda: self.restarts.awaits(Role.ROLLOUT)

    def look_after(self) -> None:
        """Give up workers that ended, start them again when it is time, and let verifiers that are back work.

        Raises:
            QueueError, RankDied: The sample queue or a trainer rank died.
        """
        self._feel_pulse()
        for name, error in self._serving.answers(0.0):
            reason = "its loop ended" if error is None else describe(error)
            if name in self.verifiers and not has_died(error):
                self.restarts.give_up(name, reason)  # The verifier itself is of no use, and would be none again.
            else:
                self._lose(name, reason)
        self.restarts.poll()
        self.verifiers |= (ready := self.restarts.take(Role.VERIFIER))
        self.rejoin(ready)

    def _feel_pulse(self) -> None:
        self.ranks.progress()
        _, failed = self._queue_pings.poll({"queue": self._queue_actor}, wait_s=0.0)
        if died := failed.get("queue"):
            log = log_path(self._logs, "queue")
            failure = QueueError(f"the sample queue, on which everybody waits, died: {describe(died)}; log: {log}")
            may_replace = self._taken and self._copy and self._config.run.max_restarts
            if not (may_replace and self._places.whereabouts.reaches("queue")):
                raise failure
            try:
                self._replace_queue(failure)
            except (ArealLiteError, ray.exceptions.RayError) as error:
                raise failure from error

    def note_taken(self, batch_id: str = "") -> None:
        """Forget the copies without this batch; without any, a queue that dies from now on is the run's failure."""
        self._taken, self._copy = batch_id, b""
        if self._copy_took_s < _LONG_COPY_S:
            self._copy_due = 0.0

    def copy_queue(self) -> None:
        """Copy the queue's state once a batch is taken, and again while little time goes into it."""
        begun = time.monotonic()
        if self._taken and begun > self._copy_due:
            try:
                self._copy = self.queue.save()
            except QueueTimeout as error:
                logger.warning("a step is not ended for want of a copy: %s", error)
            self._copy_took_s = time.monotonic() - begun
            self._copy_due = time.monotonic() + _COPY_EVERY_S + 20 * self._copy_took_s

    def _replace_queue(self, failure: QueueError) -> None:
        """Have a new queue go on from the copy, once for each batch; workers keep what they hold, ranks their batch."""
        noticed, batch_id, copy = time.time(), self._taken, self._copy
        self.note_taken()
        kill(self._queue_actor)
        self._say(f"{failure}; a new one goes on with a copy of its state")
        self._spawn_queue(copy, keep_batch=True)
        self._find_queue()
        self.queue.move_to(self._access[Role.CONTROLLER])
        if self.trained == batch_id:
            self.queue.complete_step(batch_id=batch_id)
        else:
            self.queue.take(batch_id=batch_id, wait_s=0.0)
        moving = self._send_to_queue(self._workers | self.ranks.handles, "reconnect")
        for name in {**moving.failures(self._config.run.stall_timeout_s), **moving.pending}:
            if name in self.ranks.handles:
                raise failure
            self._lose(name, "it must go on at a new queue")
        self.restarts.begin_anew()
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
        """Look after the workers; raise when somebody indispensable ended, and is not started again.

        Raises:
            HandoverError: No rollout worker is left.
            VerifierError: A verifier worker ended.
        """
        self.look_after()
        for name, reason in self.restarts.dead.items():
            if name.startswith(Role.VERIFIER):
                raise VerifierError(f"{name} ended: {reason}; log: {log_path(self._logs, name)}")
        self.engines.raise_if_none()

    @property
    def is_halted(self) -> bool:
        """Whether nobody generates, or nobody verifies, until a start is done, which has a deadline of its own."""
        return not (self.engines.handles and self.verifiers)

    @property
    def waits_to_join(self) -> bool:
        """Whether all who could generate wait for a publication, which without them would never come."""
        return not self.engines.handles and bool(self.restarts.ready(Role.ROLLOUT))

    def take_in(self) -> list[str]:
        """Make the rollout workers that are ready again receivers of the next publication; returns their names."""
        self.engines.handles |= (ready := self.restarts.take(Role.ROLLOUT))
        return list(ready)

    def rejoin(self, names: Collection[str]) -> None:
        """Let workers that were taken in ask for work, unless they were lost since."""
        workers = {name: handle for name, handle in self._workers.items() if name in names}
        self._serving.pending |= call_all(workers, "run").pending
        for name in workers:
            self.restarts.back(name)

    def scale(self, wanted: Mapping[Role, int]) -> tuple[list[str], list[str]]:
        """Have so many workers of a role from now on: those that lack are started beside the steps, others dismissed.

        Returns:
            Their names; dismissed are those with the highest numbers.
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
        """How many workers are in each state."""
        silent = self._reports.silent()
        alive = {name: State.SUSPECT if name in silent else State.HEALTHY for name in self._workers}
        return dict(Counter((alive | self.restarts.states).values()))

    def publish(self) -> dict[str, str | None]:
        """Have all ranks send the present weights, to the engines that are alive now.

        Returns:
            Per engine None or why it failed: to join, or in the transfer.
        """
        failures: dict[str, str | None] = {}
        if not self.engines.handles:
            return failures
        if self._connected != self.engines.handles:
            failures = self._connect()
            if any(failures.values()) and not self._config.weights.staged:
                return failures  # There is no group to send to.
        # The engines' own deadlines (open, receive, load) come first, so that a late engine is blamed and not a rank.
        timeout_s = 3 * self._config.weights.timeout_s + self._config.run.stall_timeout_s
        sent, *_ = self.ranks.ask("publish", timeout_s=timeout_s)
        return {**failures, **sent}

    def _connect(self) -> dict[str, str | None]:
        """Form the transfer groups with the engines that are alive; returns per engine None or why it failed."""
        before, self._connected = self._connected, dict(self.engines.handles)
        kept = [name for name, handle in self._connected.items() if before.get(name) == handle]
        timeout_s = self._config.run.start_timeout_s + 2 * self._config.weights.join_timeout_s
        failures, *_ = self.ranks.ask("connect", self._connected, kept, timeout_s=timeout_s)
        return dict(failures)

    def collect(self) -> tuple[list[Event], dict[str, dict[str, Any]]]:
        """Events of all workers since the last call, and their gauges by lane; the dead are left to `check_workers`."""
        reports, failed = self._reports.poll(self._workers, wait_s=_REPORT_WAIT_S)
        for name, error in failed.items():
            if isinstance(error, EngineError):
                self.engines.drop(name, str(error))
            elif has_died(error):
                logger.warning("%s did not report", name)
            else:
                raise error
        self.replace_silent(self._config.run.stall_timeout_s)
        return [event for events, _ in reports.values() for event in events], {
            name: gauges for name, (_, gauges) in reports.items()
        }

    def memory_mb(self) -> dict[str, int]:
        """Return the memory of each process of the run in MiB, as last measured; nothing is waited for."""
        actors = {**self._workers, **self.ranks.handles, "queue": self._queue_actor}
        measured, _ = self._memory_polls.poll(actors, wait_s=0.0)
        known = self._memory_mb | measured
        self._memory_mb = {name: known[name] for name in actors if name in known}
        # Below this process there may be a Ray of its own, with all actors.
        return self._memory_mb | {"controller": resident_mb([psutil.Process()])}

    def replace_silent(self, after_s: float) -> list[str]:
        """Give up workers that have not reported for so long: their processes hang. Returns their names."""
        silent = {name: silent_s for name, silent_s in self._reports.silent().items() if name in self._workers}
        hung = [name for name, silent_s in silent.items() if silent_s > after_s]
        for name in hung:
            self._lose(name, f"its process hangs: no report for {silent[name]:.0f} s")
        return hung

    def stop(self) -> None:
        """Stop every actor, then end what did not stop by itself."""
        stop_all({**self._workers, **self.ranks.handles, "queue": self._queue_actor})
        self.kill()

    def kill(self) -> None:
        """End every actor at once."""
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
        logger.warning("worker %s was lost: %s", name, reason)
        self._serving.pending.pop(name, None)
        self.restarts.lost(name, reason)
        self.queue.forget(worker=name)  # last, as the queue may be what died

    def _respawn(self, name: str) -> Any:
        return self._spawn(name) if self._places.has_place(name) else None

    def _spawn(self, name: str) -> Any:
        role = _role(name)
        kind = self._rollout_actor if role is Role.ROLLOUT else VerifierActor
        common = {"access": self._access[role], "model_folder": self._model_folder}
        return self._places.spawn(kind, name, name=name, **common)

    def _find_queue(self) -> None:
        opening = Calls({"queue": self._queue_actor.access.remote()})
        self._access = self._places.wait_until_started(opening, self._say)["queue"]

    def _send_to_queue(self, members: Mapping[str, Any], method: str) -> Calls:
        return Calls({name: getattr(one, method).remote(self._access[_role(name)]) for name, one in members.items()})


def _role(name: str) -> Role:
    return Role(name.partition("/")[0])


def _names(role: Role, count: int) -> list[str]:
    return [f"{role}/{index}" for index in range(count)]
