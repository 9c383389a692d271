"""The controller of a reinforcement-learning run: workers generate and verify while the ranks train.

A step consumes a batch from the sample queue, has the ranks train it, hands the new weights over to the engines, checks
parity, and then evaluates and saves if due. It waits for the batch (unblocked by finished groups, or by the watchdog,
which names the workers with the oldest leases) and for the ranks (unblocked by their answers, or by the watchdog).
"""

import contextlib
import functools
import logging
import time
from collections.abc import Callable, Hashable, Mapping
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from typing import Any

from areal_lite.config.recipe import Config
from areal_lite.errors import ArealLiteError, FruitlessError, StallError
from areal_lite.events import EventBuffer
from areal_lite.launch.run import scaling
from areal_lite.launch.run.cluster import Cluster
from areal_lite.launch.run.collector import Collector
from areal_lite.launch.run.controller import Controller
from areal_lite.launch.run.evaluation import Evaluations
from areal_lite.launch.run.parity import Difference, ParityCheck, prompt_sequences, stored_sequences
from areal_lite.launch.run.ranks import POLL_S
from areal_lite.record.length_bias import spread_warning, stale_warning
from areal_lite.record.recorder import OnlineRecorder
from areal_lite.record.worker_warnings import growth_warning, link_warning
from areal_lite.sample_queue.access import Role
from areal_lite.sample_queue.records import Rewards
from areal_lite.types import Prompt
from areal_lite.weights.handover import hand_over

logger = logging.getLogger(__name__)

_FRUITLESS_BATCHES = 50
"""Batches' worth of groups that may end failed, rejected or stale before a batch is complete."""


class OnlineController(Controller):
    """Runs `areal-lite train`."""

    _config: Config
    _cluster: Cluster
    _recorder_kind = OnlineRecorder

    def __init__(self, *, prompts: Mapping[str, list[Prompt]], eval_prompts: list[Prompt], **run: Any) -> None:
        """Prepare a run.

        Args:
            prompts: Training prompts by source.
            eval_prompts: Held-out prompts; none = no evaluation.
            run: Arguments of `Controller`.
        """
        super().__init__(**run)
        self._prompts, self._eval_prompts = prompts, eval_prompts
        self._handover_lane = EventBuffer("handover")
        self._at_boundary = True
        self._first_version = 0
        self._parity = ParityCheck(
            self._config, model_folder=self._model_folder, ask=self._ask, report=self._report_parity
        )
        self._wanted = dict[Role, int]()
        """Numbers of workers asked for by `areal-lite scale`, until the next wait for a batch."""

    def _spawn(self, checkpoint: Path | None) -> Cluster:
        state = (checkpoint / "queue.msgpack").read_bytes() if checkpoint else None
        if hasattr(self, "_cluster"):
            self._cluster.replace_core(state)
        else:
            self._view.print(
                "starting the sample queue, engines, verifiers and trainer ranks (about half a minute) ..."
            )
            self._cluster = Cluster(
                self._places, model_folder=self._model_folder, queue_state=state, prompts=self._prompts
            )
        self._ranks = self._cluster.ranks
        self._collector = Collector(
            self._cluster,
            recorder=self._recorder,
            view=self._view,
            logs=str(self._folder.logs),
            own=[self._trainer_lane, self._handover_lane, self._controller_lane],
        )
        self._cluster.engines.meanwhile = functools.partial(self._answer_stop, "a weight sync")
        of_rewards = [] if self._config.objective.reward_scale == 0 else [spread_warning]  # 0: a teacher's alone
        self._warnings = [stale_warning, *of_rewards, growth_warning, link_warning]
        """Checks of the rows so far that have found nothing since the last start: each warns once."""
        self._evaluations = Evaluations(
            self._cluster, self._eval_prompts, recorder=self._recorder, lane=self._controller_lane, view=self._view
        )
        return self._cluster

    def _start(self, checkpoint: Path | None) -> None:
        self._version = self._cluster.start(checkpoint=checkpoint, on_progress=self._view.print)
        self._hand_over(stamp_ledger=lambda: None)
        self._first_version = self._version
        prompts = chain.from_iterable(self._prompts.values())
        self._check_parity(prompt_sequences(prompts))
        if not self._recorder.evaluations:
            self._evaluate_now()

    def _prepare(self, checkpoint: Path | None) -> None:
        self._cluster.queue.open_admission()
        self._cluster.serve()
        if checkpoint is not None:
            self._evaluate_if_due()  # that of this step may have ended after its save began

    def _step(self) -> bool:
        batch_id = f"step-{self._version + 1}"
        begun = time.monotonic()
        self._trainer_lane.emit("wait")
        rewards = self._wait_for_batch(batch_id)
        if rewards is None:
            return False
        self._cluster.mark_batch_taken(batch_id)
        taken = time.monotonic()
        self._trainer_lane.emit("train", batch=batch_id)
        groups = self._cluster.queue.batch_groups(batch_id=batch_id, limit=max(self._config.run.log_samples, 1))
        self._at_boundary = False
        (stats, *_) = self._ask("step", batch_id, waiting_for=f"step {self._version + 1} to be trained")
        self._version += 1
        trained = time.monotonic()
        self._trainer_lane.emit("trained", version=self._version)
        record = {
            "stats": stats | rewards,
            "groups": groups,
            "timings": {"trainer_wait_s": taken - begun, "train_s": trained - taken},
        }
        try:
            self._publish(batch_id)
            record["timings"]["publish_s"] = time.monotonic() - trained
            self._check_parity(stored_sequences(groups))
            self._evaluations.poll()
        finally:  # the step is trained and will be saved, even if the rest failed
            record["timings"].setdefault("publish_s", time.monotonic() - trained)
            self._unwritten = record
        self._evaluate_if_due()
        self._save_if_due()
        return True

    def _wait_for_batch(self, batch_id: str) -> Rewards | None:
        queue = self._cluster.queue
        self._watchdog.restart()
        ended_before: int | None = None
        wait_s = 0.0
        while True:
            self._scale()
            self._revive_engines()
            rewards = queue.take(batch_id=batch_id, wait_s=wait_s)
            if rewards is not None or self._interrupts:
                return rewards
            wait_s = POLL_S
            if self._cluster.is_halted:
                self._watchdog.restart()
            status = queue.status()
            ended = sum(status["counts"][state] for state in ("failed", "rejected", "stale"))
            ended_before = ended if ended_before is None else ended_before
            self._raise_if_fruitless(ended - ended_before, status["counts"])
            self._tick()
            self._check_progress(
                status["progress"],
                waiting_for=f"the batch of step {self._version + 1} ({status['missing']} groups missing)",
                culprit=functools.partial(_late_workers, status),
            )

    def _revive_engines(self) -> None:
        """Check the workers; where all engines are restarting, publish for those that are ready."""
        self._cluster.check_workers()
        if self._cluster.awaits_publication:
            self._hand_over(stamp_ledger=lambda: None)

    def _check_progress(self, reading: Hashable, *, waiting_for: str, culprit: Callable[[], str]) -> None:
        """Check a wait for workers: where one of them hangs it is replaced, and only then does the wait fail."""
        try:
            self._watchdog.check(reading, waiting_for=waiting_for, culprit=culprit)
        except StallError:
            # One that hung just before the last progress has not been silent for the whole time-out yet.
            if not self._cluster.replace_silent(self._config.run.stall_timeout_s / 2):
                raise
            self._watchdog.restart()

    def _scale(self) -> None:
        """Start or dismiss workers as asked, while no weights are being sent."""
        if self._wanted:
            started, dismissed = self._cluster.scale(self._wanted)
            self._wanted = {}
            for name in dismissed:
                self._collector.keep_counts(name)
            self._controller_lane.emit("scaled", started=started, dismissed=dismissed)
            self._view.print(f"starting {', '.join(started) or 'none'}, dismissing {', '.join(dismissed) or 'none'}")

    def _raise_if_fruitless(self, ended: int, counts: dict[str, int]) -> None:
        """Groups that end without ever making a batch look like progress to the watchdog, but are not."""
        if ended > _FRUITLESS_BATCHES * self._config.queue.groups_per_step:
            reasons = ", ".join(f"{state} {count}" for state, count in counts.items() if "(" in state)
            self._collector.collect(force=True)
            fix = f"see {self._folder.logs}/verifier-*.log, and try the verifier alone with areal-lite verify"
            if errors := list(self._collector.errors().values()):
                fix = (
                    f"correct what fails episodes: {' | '.join(errors)} (tracebacks are in "
                    f"{self._folder.logs}/rollout-*.log); areal-lite eval runs episodes without training"
                )
            raise FruitlessError(
                f"no batch was completed: expected {self._config.queue.groups_per_step} trainable groups, got none of "
                f"{ended} that ended since the last batch: {reasons or counts}. Fix: {fix}"
            )

    def _publish(self, batch_id: str) -> None:
        """Hand over the weights of a trained step, which is complete, and can be saved, even if that fails."""

        def complete() -> None:
            self._cluster.queue.complete_step(batch_id=batch_id)
            self._cluster.trained = batch_id
            self._at_boundary = True

        try:
            self._hand_over(stamp_ledger=complete)
        except ArealLiteError:
            if not self._at_boundary:
                complete()
            raise
        self._trainer_lane.emit("published", version=self._version)

    def _hand_over(self, *, stamp_ledger: Callable[[], None]) -> None:
        joining = self._cluster.admit_ready_engines()
        hand_over(
            self._cluster.engines,
            publish=self._cluster.publish,
            staged=self._config.weights.staged,
            stamp_ledger=stamp_ledger,
            version=self._version,
            interrupt=self._config.rollout.interrupt,
            events=self._handover_lane,
        )
        self._cluster.activate(joining)

    def _check_parity(self, sequences: list[tuple[list[int], list[int]]]) -> None:
        """Check invariant I4, as far as it is due.

        Raises:
            HandoverError: An engine is not the trainer's model.
        """
        self._parity.after_publication(
            self._version - self._first_version,
            version=self._version,
            handles=dict(self._cluster.engines.handles),  # a lost engine leaves the cluster's
            sequences=sequences,
        )

    def _report_parity(self, found: Difference) -> None:
        nats = asdict(found)
        self._recorder.parity(**nats)
        self._controller_lane.emit("parity", step=self._version, **nats)

    def _tick(self) -> None:
        self._cluster.copy_queue()
        super()._tick()

    def _poll_processes(self) -> None:
        self._wanted |= scaling.take(self._folder.path)
        self._cluster.watch_workers()
        if replaced := self._cluster.replaced:
            self._cluster.replaced = None
            self._controller_lane.emit("restarted", step=self._version, **replaced)
            self._view.print(
                "queue is back: workers kept {leases_kept} groups and dropped {leases_lost}; {finished} finished ones "
                "are kept, {waiting} are generated again".format(**replaced)
            )
        self._collector.collect()
        self._evaluations.poll()
        if self._config.reward_watch.stop and self._evaluations.alarm and self._version < self._config.run.steps:
            self._interrupts.request_stop("reward_watch")

    def _write(self, record: dict[str, Any]) -> Mapping[str, Any]:
        self._collector.collect(force=True)
        status = self._cluster.queue.status()
        row: Mapping[str, Any] = self._recorder.step(
            record["stats"]
            | self._collector.figures()
            | {"workers": self._cluster.states(), "memory_mb": self._cluster.memory_mb()}
            | {"publish_mb_s": self._cluster.publish_mb_s},
            step=self._version,
            tokens_generated=self._collector.tokens(),
            ledger=status["counts"],
            **record["timings"],
        )
        self._unwritten = None
        self._recorder.samples(self._version, record["groups"][: self._config.run.log_samples])
        for warning in [*self._warnings]:
            if text := warning([*self._recorder.recent]):
                self._warnings.remove(warning)
                self._view.print(text, style="yellow")
                self._controller_lane.emit("warning", step=self._version, text=text)
        self._view.step(row, evaluations=self._recorder.evaluations, shares=self._recorder.shares())
        return row

    def _evaluate_if_due(self) -> None:
        if self._is_due(self._config.run.eval_every) and self._version not in self._recorder.evaluations:
            self._evaluations.begin(self._version)

    def _evaluate_now(self) -> None:
        """Evaluate under one version, with nothing beside it; Ctrl-C ends it, and what is evaluated by then counts."""
        while self._eval_prompts and self._cluster.is_halted and not self._interrupts:  # a restart has a deadline
            self._revive_engines()
            self._tick()
            time.sleep(POLL_S)
        self._evaluations.begin(self._version)
        if self._evaluations:
            self._view.print(f"evaluating {len(self._eval_prompts)} held-out problems at version {self._version} ...")
        self._watchdog.restart()
        while self._evaluations and not self._interrupts:
            culprit = functools.partial(str, self._evaluations.late())
            self._tick()
            self._evaluations.poll(POLL_S)
            self._check_progress(self._collector.work(), waiting_for="an evaluation", culprit=culprit)
        self._evaluations.cut_short()

    def _before_last_save(self, status: str) -> str:
        self._cluster.mark_batch_taken()
        self._cluster.queue.close_admission()
        if self._evaluations:
            self._evaluations.lose("the run ends")
        if status == "done":
            self._evaluate_now()
            if self._evaluations.is_lost and not self._interrupts:
                time.sleep(POLL_S)
                self._tick()  # gives up the worker that died
                self._evaluate_now()  # by the others, or by its successor
        if self._evaluations.is_lost:
            self._recorder.stopped_by = "the loss of the last evaluation"
        # If the evaluation was cut short by Ctrl-C or lost with a worker, a resume completes it.
        return "interrupted" if self._interrupts or self._evaluations.is_lost else status

    def _queue_state(self) -> bytes:
        return self._cluster.queue.save()

    def _summarize(self, status: str, *, failed: bool) -> dict[str, Any]:
        counts = dict[str, int]()
        attempt = contextlib.suppress(Exception) if failed else contextlib.nullcontext()
        with attempt:
            self._collector.collect(force=True)
        with attempt:
            queue = self._cluster.queue  # not there yet where the start failed
            counts = queue.status()["counts"] if failed else queue.abandon()
        summary: dict[str, Any] = self._recorder.summary(status, ledger=counts)
        return summary


def _late_workers(status: Any) -> str:
    """Name the three workers with the oldest leases."""
    workers = sorted(status["workers"].items(), key=lambda item: -item[1]["oldest_lease_age_s"])
    if not workers:
        return "all workers: none has asked for work yet"
    return "; ".join(
        f"{name} ({worker['role'] or 'no work yet'}) holds {worker['leases']} leases, the oldest for "
        f"{worker['oldest_lease_age_s']:.0f} s; last heartbeat {worker['heartbeat_age_s']:.0f} s ago"
        for name, worker in workers[:3]
    )
