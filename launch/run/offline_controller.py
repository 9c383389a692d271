"""The controller of an offline run: a plain loop over steps, in the CLI's process.

Every wait watches for progress; what ends the run while a batch trains waits until it is trained, so that there is a
whole state to save.
"""

import contextlib
import functools
import time
from pathlib import Path
from typing import Any

import ray

from areal_lite.actors.offline import OfflineActor
from areal_lite.config.offline import OfflineConfig
from areal_lite.errors import ArealLiteError, CheckpointError
from areal_lite.events import EventBuffer
from areal_lite.launch.run.controller import Interrupted
from areal_lite.launch.run.offline_view import OfflineView, describe_figures
from areal_lite.launch.run.placement import actor_options
from areal_lite.launch.run.ranks import Ranks
from areal_lite.launch.run.remote import result
from areal_lite.launch.run.signals import Interrupts
from areal_lite.launch.run.starting import log_path, wait_until_started
from areal_lite.record.offline_recorder import OfflineRecorder
from areal_lite.record.run_folder import RunFolder
from areal_lite.watchdog import Watchdog

__all__ = ["OfflineController"]

_POLL_S = 0.25
_PING_TIMEOUT_S = 10.0
_SAVE_TIMEOUT_S = 600.0
_STOP_TIMEOUT_S = 20.0


class OfflineController:
    """One run: owns the trainer ranks, the run folder and the order of everything."""

    def __init__(self, config: OfflineConfig, *, folder: RunFolder, model_folder: Path, view: OfflineView) -> None:
        """Prepare a run; nothing starts before `run`.

        Args:
            config: The recipe, its paths absolute and its steps known.
            folder: Gets every file.
            model_folder: Hugging Face folder with the initial weights and the tokenizer.
            view: Shows how it goes.
        """
        self._config, self._folder, self._view = config, folder, view
        self._model_folder = model_folder
        self._recorder = OfflineRecorder(config, folder)
        self._trainer_lane, self._controller_lane = EventBuffer("trainer"), EventBuffer("controller")
        self._watchdog = Watchdog(config.run.stall_timeout_s)
        self._interrupts = Interrupts()
        self._said_stopping = False
        self._version = 0
        self._at_boundary = False

    def run(self) -> dict[str, Any]:
        """Run to the end and return the summary.

        Raises:
            Interrupted: After Ctrl-C, once everything is saved.
            ArealLiteError: What ended the run early; what could be saved is saved.
        """
        checkpoint = self._folder.newest_checkpoint() if self._config.run.resume else None
        logs = str(self._folder.logs)
        kind = ray.remote(OfflineActor).options(**actor_options(self._config, "trainer"))
        ranks = range(self._config.trainer.ranks)
        handles = {f"trainer/{rank}": kind.remote(self._config, rank=rank, log_folder=logs) for rank in ranks}
        self._ranks = Ranks(handles, log_of=functools.partial(log_path, logs))
        try:
            with self._interrupts:
                self._start(logs)
                self._interrupts.work_begins()
                self._prepare(checkpoint)
                return self._finish(self._steps())
        except (ArealLiteError, ray.exceptions.RayError) as error:
            self._rescue(error)
            raise
        finally:
            self._view.end()
            for handle in handles.values():
                ray.kill(handle)

    def _start(self, logs: str) -> None:
        self._view.say("starting the trainer ranks ...")
        timeout_s, first = self._config.run.start_timeout_s, self._ranks.handles["trainer/0"]
        address = result(first.open_store.remote(), timeout_s=timeout_s)
        references = {
            name: handle.start.remote(
                address=address,
                model_folder=str(self._model_folder),
                reference_folder=self._config.preference.reference_path,
            )
            for name, handle in self._ranks.handles.items()
        }
        wait_until_started(references, timeout_s=timeout_s, logs=logs, on_progress=self._view.say)

    def _prepare(self, checkpoint: Path | None) -> None:
        if self._config.has_reference:
            self._view.say("running the reference model over all pairs ...")
        self._ask("prepare", waiting_for="the reference model")
        if checkpoint is not None:
            # One long read without a sign of life: it gets the deadline of a start.
            timeout_s = self._config.run.start_timeout_s
            self._version = self._ranks.ask("load", str(checkpoint / "trainer"), timeout_s=timeout_s)[0]
        self._at_boundary = True
        if not self._recorder.evaluations:
            self._evaluate()

    def _steps(self) -> str:
        steps = self._config.run.steps
        self._view.begin(done=self._version, total=steps)
        try:
            while self._version < steps and not self._interrupts:
                self._step()
        finally:
            self._view.end()
        return "interrupted" if self._version < steps else "done"

    def _step(self) -> None:
        run = self._config.run
        begun = time.monotonic()
        self._trainer_lane.emit("train", step=self._version + 1)
        self._at_boundary = False
        figures = self._ask("step", waiting_for=f"step {self._version + 1} to be trained")[0]
        self._version += 1
        self._at_boundary = True
        self._trainer_lane.emit("trained", version=self._version)
        train_s = time.monotonic() - begun
        is_last = self._version == run.steps
        try:
            if is_last or (run.eval_every and self._version % run.eval_every == 0):
                self._evaluate()
        finally:  # the step is trained, and will be saved, even where its evaluation failed
            row = self._recorder.step(figures, step=self._version, train_s=train_s)
            self._recorder.feed([*self._trainer_lane.drain(), *self._controller_lane.drain()])
        self._view.step(row, next(reversed(self._recorder.evaluations.values()), {}))
        if run.checkpoint_every and self._version % run.checkpoint_every == 0 and not is_last:
            self._save()

    def _evaluate(self) -> None:
        figures = self._ask("evaluate", waiting_for="an evaluation")[0]
        if figures:
            self._recorder.evaluations[self._version] = figures
            self._controller_lane.emit("eval", step=self._version, figures=figures)
            self._view.say(f"step {self._version}, {describe_figures(figures)}")

    def _ask(self, method: str, *args: Any, waiting_for: str) -> list[Any]:
        """Have all ranks do something together, with the watchdog on."""
        references = self._ranks.begin(method, *args)
        self._watchdog.restart()
        while late := self._ranks.late(references, wait_s=_POLL_S):
            self._say_stopping()
            progress = (len(late), self._ranks.progress())
            self._watchdog.check(progress, waiting_for=waiting_for, culprit=functools.partial(", ".join, late))
        self._say_stopping()
        return [result(reference) for reference in references.values()]

    def _say_stopping(self) -> None:
        if self._interrupts and not self._said_stopping:
            self._said_stopping = True
            self._view.say("stopping after this step and saving; press Ctrl-C again to stop at once ...")

    def _save(self) -> Path:
        """Write a checkpoint of this step boundary."""

        def save_trainer(path: Path) -> None:
            self._ranks.ask("save", str(path), timeout_s=_SAVE_TIMEOUT_S)

        path = self._folder.write_checkpoint(
            self._version, queue_state=None, save_trainer=save_trainer, keep=self._config.run.keep_checkpoints
        )
        self._controller_lane.emit("checkpoint", step=self._version)
        return path

    def _finish(self, status: str) -> dict[str, Any]:
        """Save, export, sum up, stop; in this order."""
        self._view.say("saving ...")
        checkpoint = self._save()
        self._ranks.ask("export", str(checkpoint / "model"), timeout_s=_SAVE_TIMEOUT_S)
        self._recorder.feed(self._controller_lane.drain())
        summary = self._recorder.summary(status)
        stopping = list(self._ranks.begin("stop").values())
        with contextlib.suppress(Exception):
            ray.wait(stopping, num_returns=len(stopping), timeout=_STOP_TIMEOUT_S)
        if status != "done":
            raise Interrupted(str(self._folder.path))
        return summary

    def _rescue(self, error: Exception) -> None:
        """After a failure: save if the weights are those of a step boundary, write the summary, say how to go on."""
        self._view.end()
        with contextlib.suppress(Exception):
            if self._at_boundary and self._version > 0:
                self._ranks.ask("ping", timeout_s=_PING_TIMEOUT_S)
                self._view.say(f"the run failed; saving step {self._version} ...")
                self._save()
        with contextlib.suppress(Exception):
            self._recorder.feed([*self._trainer_lane.drain(), *self._controller_lane.drain()])
        self._recorder.summary(f"failed: {type(error).__name__}: {error}")
        try:
            step = self._folder.newest_checkpoint().name
        except CheckpointError:
            self._view.say("there is no checkpoint to go on from (run.checkpoint_every)")
        else:
            self._view.say(
                f"newest checkpoint: {step}; to go on from there, resume with run.resume={self._folder.path}"
            )
