"""The controller: drives one run from start to end. A plain class in the CLI's process.

Per step: wait for a batch, have the trainer ranks train it, hand the weights over, compare, and only then evaluate or
save. The step's row is written while the next batch trains, and before anything is saved. Every wait passes through
`_tick`, which collects events and asks the watchdog. What ends the run while a batch trains waits until it is trained,
so that there is a whole state to save.
"""

import contextlib
import functools
import logging
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import ray

from areal_lite.config.recipe import Config
from areal_lite.errors import ArealLiteError, CheckpointError, StallError
from areal_lite.events import EventBuffer
from areal_lite.launch.run.actor_keeper import ActorKeeper
from areal_lite.launch.run.cluster import Cluster
from areal_lite.launch.run.collector import Collector
from areal_lite.launch.run.evaluation import Evaluation, in_words
from areal_lite.launch.run.parity import largest_logprob_difference
from areal_lite.launch.run.remote import describe, result
from areal_lite.launch.run.signals import Interrupts
from areal_lite.launch.run.view import View
from areal_lite.record.online_recorder import OnlineRecorder
from areal_lite.record.run_folder import RunFolder
from areal_lite.sample_queue.requests import BatchInfo
from areal_lite.types import Group, Prompt
from areal_lite.watchdog import Watchdog
from areal_lite.weights.handover import hand_over

__all__ = ["Controller", "Interrupted"]

logger = logging.getLogger(__name__)

_POLL_S = 0.25
_PING_TIMEOUT_S = 10.0
_SAVE_TIMEOUT_S = 600.0
_FRUITLESS_BATCHES = 50
"""Batches' worth of groups that may end failed, rejected or stale before a single batch is complete."""


class Interrupted(Exception):
    """The run was stopped by Ctrl-C; its work is saved."""


class Controller:
    """One run: owns the cluster, the run folder and the order of everything."""

    def __init__(
        self,
        config: Config,
        *,
        folder: RunFolder,
        model_folder: Path,
        prompts: Mapping[str, list[Prompt]],
        eval_prompts: list[Prompt],
        view: View,
        keeper: ActorKeeper | None = None,
    ) -> None:
        """Prepare a run; nothing starts before `run`.

        Args:
            config: The recipe.
            folder: Gets every file.
            model_folder: Hugging Face folder with the initial weights and the tokenizer.
            prompts: To train on, by source.
            eval_prompts: Held-out prompts; none = no evaluation.
            view: Shows how it goes.
            keeper: Lends actors of an earlier run, and takes them back when this one is done.
        """
        self._config, self._folder, self._view = config, folder, view
        self._keeper = keeper
        self._model_folder, self._prompts, self._eval_prompts = model_folder, prompts, eval_prompts
        self._trainer_lane, self._handover_lane = EventBuffer("trainer"), EventBuffer("handover")
        self._controller_lane = EventBuffer("controller")
        self._recorder = OnlineRecorder(config, folder)
        self._watchdog = Watchdog(config.run.stall_timeout_s)
        self._evaluation: Evaluation | None = None
        self._interrupts = Interrupts()
        self._version = 0
        self._at_boundary = True
        self._said_stopping = False
        self._row: Callable[[], None] | None = None
        """Writes the row of the last step; None once it is written."""

    def run(self) -> dict[str, Any]:
        """Run to the end and return the summary.

        Raises:
            Interrupted: After Ctrl-C, once everything is saved.
            ArealLiteError: What ended the run early; what could be saved is saved.
        """
        checkpoint = self._folder.newest_checkpoint() if self._config.run.resume else None
        queue_state = (checkpoint / "queue.msgpack").read_bytes() if checkpoint else None
        self._cluster = Cluster(
            self._config,
            model_folder=self._model_folder,
            log_folder=self._folder.logs,
            queue_state=queue_state,
            prompts=self._prompts,
            kept=self._borrowed(),
        )
        self._collector = Collector(
            self._cluster,
            recorder=self._recorder,
            view=self._view,
            logs=str(self._folder.logs),
            own=[self._trainer_lane, self._handover_lane, self._controller_lane],
        )
        try:
            with self._interrupts:
                self._start(checkpoint)
                self._interrupts.work_begins()
                return self._finish(self._steps())
        except (ArealLiteError, ray.exceptions.RayError) as error:
            self._rescue(error)
            raise
        finally:
            self._view.end()
            self._cluster.kill()

    def _borrowed(self) -> dict[str, Any]:
        if self._keeper is None:
            return {}
        return self._keeper.lend(self._config, model_folder=self._model_folder, say=self._view.say)

    def _start(self, checkpoint: Path | None) -> None:
        if self._cluster.is_new:
            self._view.say("starting the sample queue, engines, verifiers and trainer ranks (about half a minute) ...")
        self._version = self._cluster.start(checkpoint=checkpoint, on_progress=self._view.say)
        self._hand_over(stamp_ledger=lambda: None)
        if not self._recorder.evaluations:
            self._evaluate_now()
        self._cluster.queue.open_admission()
        self._cluster.serve()
        self._watchdog.restart()

    def _steps(self) -> str:
        self._view.begin(first_step=self._version)
        try:
            while self._version < self._config.run.steps and not self._interrupts:
                if not self._step():
                    break
            self._write_row()
        finally:
            self._view.end()
        return "interrupted" if self._version < self._config.run.steps else "done"

    def _step(self) -> bool:
        """One trainer step and its publication; False when Ctrl-C came while waiting for the batch."""
        batch_id = f"step-{self._version + 1}"
        begun = time.monotonic()
        self._trainer_lane.emit("wait")
        info = self._wait_for_batch(batch_id)
        if info is None:
            return False
        taken = time.monotonic()
        self._trainer_lane.emit("train", batch=batch_id)
        groups = self._cluster.queue.batch_groups(batch_id=batch_id, limit=max(self._config.run.log_samples, 1))
        self._at_boundary = False
        stats = self._train(batch_id) | info["rewards"]
        self._version += 1
        trained = time.monotonic()
        self._trainer_lane.emit("trained", version=self._version)
        timings = {"trainer_wait_s": taken - begun, "train_s": trained - taken}
        try:
            self._hand_over(stamp_ledger=lambda: self._complete(batch_id))
        except ArealLiteError:
            # The step is trained all the same: it is completed and recorded, so that it can be saved.
            if not self._at_boundary:
                self._complete(batch_id)
            self._record(stats, groups, **timings, publish_s=time.monotonic() - trained)
            raise
        self._trainer_lane.emit("published", version=self._version)
        self._after_step(stats, groups, **timings, publish_s=time.monotonic() - trained)
        return True

    def _wait_for_batch(self, batch_id: str) -> BatchInfo | None:
        queue = self._cluster.queue
        self._watchdog.restart()
        self._cluster.check_workers()
        ended_before: int | None = None
        wait_s = 0.0
        while (info := queue.take(batch_id=batch_id, wait_s=wait_s)) is None:
            wait_s = _POLL_S
            if self._interrupts:
                return None
            self._cluster.check_workers()
            status = queue.status()
            ended = sum(status["counts"][state] for state in ("failed", "rejected", "stale"))
            ended_before = ended if ended_before is None else ended_before
            self._raise_if_fruitless(ended - ended_before, status["counts"])
            self._tick(
                status["progress"],
                waiting_for=f"the batch of step {self._version + 1} ({status['missing']} groups missing)",
                culprit=functools.partial(_late_workers, status),
            )
        return info

    def _raise_if_fruitless(self, ended: int, counts: dict[str, int]) -> None:
        """Groups that end without ever making a batch look like progress to the watchdog; they are not."""
        if ended > _FRUITLESS_BATCHES * self._config.queue.groups_per_step:
            reasons = ", ".join(f"{state} {count}" for state, count in counts.items() if "(" in state)
            raise StallError(
                f"a batch needs {self._config.queue.groups_per_step} groups, got none out of {ended} that ended since "
                f"the last one: {reasons or counts}; the first errors are in {self._folder.logs}, verifier-*.log, or "
                "rollout-*.log where a workflow failed; try a verifier on its own with areal-lite verify"
            )

    def _train(self, batch_id: str) -> dict[str, Any]:
        stats = self._ask_trainers("train_step", batch_id, waiting_for=f"step {self._version + 1} to be trained")
        return dict(stats[0])

    def _ask_trainers(self, method: str, *args: Any, waiting_for: str) -> list[Any]:
        """Have all ranks do something together, with the watchdog on."""
        ranks = self._cluster.ranks
        references = ranks.begin(method, *args)
        self._write_row()  # It asks everybody how it goes: something the trainer must not wait for.
        self._watchdog.restart()
        while late := ranks.late(references, wait_s=_POLL_S):
            progress = (len(late), ranks.progress())
            self._tick(progress, waiting_for=waiting_for, culprit=functools.partial(", ".join, late))
        return [result(reference) for reference in references.values()]

    def _tick(self, progress: Any, *, waiting_for: str, culprit: Callable[[], str]) -> None:
        """What every wait does while it waits."""
        if self._interrupts and not self._said_stopping:
            self._said_stopping = True
            self._view.say("stopping after this step and saving; press Ctrl-C again to stop at once ...")
        self._write_row()
        self._collector.collect()
        if self._evaluation is not None:
            self._poll_evaluation()
        self._watchdog.check(progress, waiting_for=waiting_for, culprit=culprit)

    def _hand_over(self, *, stamp_ledger: Callable[[], None]) -> None:
        hand_over(
            self._cluster.engines,
            publish=self._cluster.publish,
            staged=self._config.weights.staged,
            stamp_ledger=stamp_ledger,
            version=self._version,
            interrupt=self._config.rollout.interrupt,
            events=self._handover_lane,
        )

    def _complete(self, batch_id: str) -> None:
        self._cluster.queue.complete_step(batch_id=batch_id)
        self._at_boundary = True

    def _after_step(self, stats: dict[str, Any], groups: list[Group], **timings: float) -> None:
        run, step = self._config.run, self._version
        if self._config.weights.parity_every and step % self._config.weights.parity_every == 0:
            self._check_parity(groups)
        if self._evaluation is not None:
            self._poll_evaluation()
        self._row = functools.partial(self._record, stats, groups, **timings)
        if run.eval_every and step % run.eval_every == 0 and step < run.steps and self._evaluation is None:
            self._begin_evaluation()
        if run.checkpoint_every and step % run.checkpoint_every == 0 and step < run.steps:
            self._save()

    def _write_row(self) -> None:
        if self._row is not None:
            self._row()
            self._row = None

    def _record(self, stats: dict[str, Any], groups: list[Group], **timings: float) -> None:
        self._collector.collect(force=True)
        status = self._cluster.queue.status()
        row = self._recorder.step(
            stats | self._collector.verifiers() | {"messages_refused": status["refused"]},
            step=self._version,
            tokens_generated=self._collector.tokens(),
            ledger=status["counts"],
            **timings,
        )
        self._recorder.samples(self._version, groups[: self._config.run.log_samples])
        self._view.step(row, evaluations=self._recorder.evaluations, shares=self._recorder.shares())

    def _check_parity(self, groups: list[Group]) -> None:
        def trainer_logprobs(sequences: list[Any]) -> list[Any]:
            return list(self._ask_trainers("score", sequences, waiting_for="the trainer's logprobs")[0])

        worst = largest_logprob_difference(
            groups,
            engines=self._cluster.engines,
            ask_trainer=trainer_logprobs,
            num_sequences=self._config.weights.parity_sequences,
            timeout_s=self._config.run.stall_timeout_s,
        )
        if worst is not None:
            self._recorder.parity(worst)
            self._controller_lane.emit("parity", step=self._version, max_abs_logprob_diff=worst)

    def _begin_evaluation(self) -> None:
        if self._eval_prompts and self._cluster.engines.handles:
            self._evaluation = Evaluation(self._cluster, self._eval_prompts, step=self._version)

    def _evaluate_now(self) -> None:
        """Evaluate under one version, with nothing beside; Ctrl-C ends it."""
        self._begin_evaluation()
        if self._evaluation is not None:
            self._view.say(f"evaluating {len(self._eval_prompts)} held-out problems at version {self._version} ...")
        self._watchdog.restart()
        while self._evaluation is not None and not self._interrupts:
            culprit = functools.partial(", ".join, self._evaluation.late())
            self._poll_evaluation(wait_s=_POLL_S)
            self._tick(self._collector.work(), waiting_for="an evaluation", culprit=culprit)
        self._evaluation = None

    def _poll_evaluation(self, wait_s: float = 0.0) -> None:
        assert self._evaluation is not None
        try:
            result = self._evaluation.poll(wait_s)
        except (ArealLiteError, ray.exceptions.RayError) as error:
            self._view.say(f"the evaluation of step {self._evaluation.step} was lost: {describe(error)}")
            self._evaluation = None
            return
        if result is not None:
            self._evaluation = None
            if result["problems"]:
                self._recorder.evaluation(result["step"], result["accuracy"], by_source=result["by_source"])
                self._controller_lane.emit("eval", **result)
            self._view.say(in_words(result), style="" if result["problems"] else "red")

    def _save(self) -> Path:
        """Write a checkpoint of this step boundary."""
        self._write_row()
        queue_state = self._cluster.queue.save()

        def save_trainer(path: Path) -> None:
            self._cluster.ask_trainers("save", str(path), timeout_s=_SAVE_TIMEOUT_S)

        path = self._folder.write_checkpoint(
            self._version, queue_state=queue_state, save_trainer=save_trainer, keep=self._config.run.keep_checkpoints
        )
        self._controller_lane.emit("checkpoint", step=self._version)
        return path

    def _finish(self, status: str) -> dict[str, Any]:
        """Evaluate, save, export, sum up, hand the actors on or stop them; in this order."""
        queue = self._cluster.queue
        queue.close_admission()
        self._evaluation = None
        if status == "done":
            self._evaluate_now()
            # Ctrl-C cut the evaluation short: the run is complete when a resume has made up for it.
            status = "interrupted" if self._interrupts else "done"
        self._view.say("saving ...")
        checkpoint = self._save()
        self._cluster.ask_trainers("export", str(checkpoint / "model"), timeout_s=_SAVE_TIMEOUT_S)
        counts = queue.abandon()
        self._collector.collect(force=True)
        summary = self._recorder.summary(status, ledger=counts)
        if status == "done" and self._keeper is not None:
            self._keeper.keep(self._cluster.release(), config=self._config, model_folder=self._model_folder)
        else:
            self._cluster.stop()
        if status != "done":
            raise Interrupted(str(self._folder.path))
        return summary

    def _rescue(self, error: Exception) -> None:
        """After a failure: save if the weights are those of a step boundary, write the summary, say how to go on."""
        self._view.end()
        with contextlib.suppress(Exception):
            self._write_row()
        with contextlib.suppress(Exception):
            if self._at_boundary and self._version > 0 and self._trainers_answer():
                self._view.say(f"the run failed; saving step {self._version} ...")
                self._save()
        with contextlib.suppress(Exception):
            self._collector.collect(force=True)
        counts: dict[str, int] = {}
        with contextlib.suppress(Exception):
            counts = self._cluster.queue.status()["counts"]
        self._recorder.summary(f"failed: {type(error).__name__}: {error}", ledger=counts)
        try:
            step = self._folder.newest_checkpoint().name
        except CheckpointError:
            self._view.say("there is no checkpoint to go on from (run.checkpoint_every)")
        else:
            self._view.say(
                f"newest checkpoint: {step}; to go on from there, resume with run.resume={self._folder.path}"
            )

    def _trainers_answer(self) -> bool:
        """Whether every rank is alive and free; a hung one would make saving wait for nothing."""
        with contextlib.suppress(ArealLiteError, ray.exceptions.RayError):
            self._cluster.ask_trainers("ping", timeout_s=_PING_TIMEOUT_S)
            return True
        return False


def _late_workers(status: Any) -> str:
    """Say who holds work and has not been heard of, or holds it longest."""
    workers = sorted(status["workers"].items(), key=lambda item: -item[1]["oldest_lease_age_s"])
    if not workers:
        return "no worker has asked for work yet"
    return "; ".join(
        f"{name} ({worker['role'] or 'no work yet'}) holds {worker['leases']} leases, the oldest since "
        f"{worker['oldest_lease_age_s']:.0f} s, last heard of {worker['heartbeat_age_s']:.0f} s ago"
        for name, worker in workers[:3]
    )
