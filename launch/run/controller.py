"""The controller drives one run from start to end: a plain class in the CLI's process.

This file has what every run has: the order of things, Ctrl-C, the watchdog, checkpoints and the end. `online.py` and
`offline.py` define what a step is.

All waits poll, and call `_tick` at each poll. It answers Ctrl-C, writes the row of the last step (so that no step waits
for it), advances a save in the background, and watches the processes. A stop request takes effect between two steps,
where there is a whole state to save.
"""

import contextlib
import functools
import time
from abc import ABC, abstractmethod
from collections import ChainMap
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import numpy as np

from areal_lite.actors.calls import call_all
from areal_lite.errors import CheckpointError, FruitlessError, QueueError, QueueTimeout, RankDied, StallError
from areal_lite.events import EventBuffer, now
from areal_lite.launch.run.cluster import Cluster
from areal_lite.launch.run.places import Places
from areal_lite.launch.run.ranks import POLL_S, Ranks
from areal_lite.launch.run.signals import Interrupts
from areal_lite.launch.run.view import View
from areal_lite.record.checkpoints import seal, whole_checkpoints
from areal_lite.record.run_folder import RunFolder
from areal_lite.watchdog import Watchdog

_GOES_BACK = (QueueError, QueueTimeout, RankDied, StallError)
"""Failures that a restart from a checkpoint can cure."""
_SETTLE_S = 0.05
"""Between polls of a save in the background."""


class Interrupted(Exception):
    """The run was stopped by Ctrl-C or by a notice of a batch system.

    Args:
        folder: The run's folder.
        summary: Where there is time to show one.
        is_resumable: False where no checkpoint was saved.
    """

    def __init__(self, folder: str, summary: dict[str, Any] | None = None, *, is_resumable: bool = True) -> None:
        super().__init__(folder)
        self.summary, self.is_resumable = summary or {}, is_resumable


class Controller(ABC):
    """One run: owns its processes and its run folder."""

    _config: Any
    _ranks: Ranks
    _recorder_kind: type[Any]

    def __init__(self, *, folder: RunFolder, places: Places, model_folder: Path, view: View) -> None:
        """Prepare a run; `run` starts it.

        Args:
            places: What is reserved, with the recipe: paths absolute, number of steps known.
            model_folder: Hugging Face folder with the initial weights and the tokenizer.
        """
        self._config, self._folder, self._view = places.config, folder, view
        self._places, self._model_folder = places, model_folder
        self._recorder = self._recorder_kind(self._config, folder)
        self._trainer_lane, self._controller_lane = EventBuffer("trainer"), EventBuffer("controller")
        self._watchdog = Watchdog(self._config.run.stall_timeout_s)
        self._interrupts = Interrupts(save_deadline_s=self._config.run.save_deadline_s)
        self._version = 0
        self._saved_at = time.monotonic()
        self._restarts_left: int = self._config.run.max_restarts
        self._furthest = 0
        """The latest step that this process has saved."""
        self._at_boundary = False
        """Whether the weights are those of a completed step, which can be saved."""
        self._saving: tuple[int, Iterator[object]] | None = None
        """The step that is being saved in the background, and the generator that advances the save."""
        self._on_step: Callable[[Mapping[str, Any]], object] | None = None
        self._callback_error: BaseException | None = None
        """What `on_step` raised; it ends the run after the current step."""
        self._unwritten: dict[str, Any] | None = None
        """Record of the last step, until its row is written."""

    def run(self, on_step: Callable[[Mapping[str, Any]], object] | None = None) -> dict[str, Any]:
        """Run to the end and return the summary.

        Args:
            on_step: Gets the row of every step, again for steps that are repeated from a checkpoint; returning False
                ends the run like Ctrl-C.

        Raises:
            Interrupted: After Ctrl-C, once everything is saved; after a notice of a batch system, in any case.
            Exception: What ended the run early, or what `on_step` raised; a completed step is saved.
        """
        self._on_step = on_step
        checkpoint = self._folder.checkpoint
        self._spawn_all(checkpoint)
        with self._interrupts:
            return self._run(checkpoint)

    def _run(self, checkpoint: Path | None) -> dict[str, Any]:
        try:
            self._start(checkpoint)
            self._interrupts.set_immediate(False)
            self._prepare(checkpoint)
            failure: Exception | None = None
            while True:
                try:
                    if failure is not None:
                        self._go_back(failure)
                    return self._finish(self._steps())
                except _GOES_BACK as error:
                    if not self._may_go_back(error):
                        raise
                    failure = error
        except Interrupted:
            raise
        except KeyboardInterrupt:
            self._view.print(self._folder.how_to_resume())
            raise
        except (Exception, SystemExit) as error:
            located = self._places.placement.with_nodes(error)
            self._rescue(located)
            if self._interrupts.notice:
                is_resumable = bool(whole_checkpoints(self._folder.checkpoints))
                raise Interrupted(str(self._folder.path), is_resumable=is_resumable) from located
            if located is error:
                raise
            raise located from error
        finally:
            self._view.end()
            self._processes.kill()

    def _may_go_back(self, failure: Exception) -> bool:
        """True if a restart can help; False if the node of a process that it starts is unreachable."""
        if self._interrupts or self._restarts_left == 0 or isinstance(failure, FruitlessError):
            return False
        return self._places.placement.reaches("queue", *self._ranks.handles)

    def _go_back(self, failure: Exception) -> None:
        """Restart from the latest checkpoint, after saving the current step if it is complete."""
        noticed, reason = now(), str(self._places.placement.with_nodes(failure))
        self._save_what_is_whole()
        self._restarts_left -= 1
        self._recorder.close()
        self._folder.go_back(say=self._view.print)
        self._recorder = self._recorder_kind(self._config, self._folder)
        checkpoint = self._folder.checkpoint
        place = checkpoint.name if checkpoint else "the start"
        self._view.print(
            f"{reason}; restarting from {place} (run.max_restarts: {self._restarts_left} left)", style="yellow"
        )
        self._unwritten, self._version = None, 0
        self._interrupts.set_immediate(True)
        self._spawn_all(checkpoint)
        try:
            self._start(checkpoint)
        except StallError:
            self._restarts_left = 0  # the next start would take too long as well
            raise
        self._interrupts.set_immediate(False)
        self._at_boundary = True
        self._prepare(checkpoint)
        self._controller_lane.emit("restarted", step=self._version, noticed=noticed, reason=reason)
        self._view.print(f"back at step {self._version}")

    def _spawn_all(self, checkpoint: Path | None) -> None:
        self._processes = self._spawn(checkpoint)
        self._ranks.meanwhile = self._announce_stop

    @abstractmethod
    def _spawn(self, checkpoint: Path | None) -> Cluster | Ranks:
        """Start the first processes and set `_ranks`; returns the object that stops and kills all processes.

        Another call replaces the processes that hold the run's state.
        """

    @abstractmethod
    def _start(self, checkpoint: Path | None) -> None:
        """Wait until all processes have started; Ctrl-C ends the run at once, as there is nothing to save."""

    @abstractmethod
    def _prepare(self, checkpoint: Path | None) -> None:
        """Prepare the first step."""

    @abstractmethod
    def _step(self) -> bool:
        """Train one step and leave its record in `_unwritten`; False if Ctrl-C came before it began."""

    @abstractmethod
    def _poll_processes(self) -> None:
        """Watch the processes and collect their reports; called at each poll of a wait."""

    @abstractmethod
    def _write(self, record: dict[str, Any]) -> Mapping[str, Any]:
        """Write, show and return the row of a step; once it is written, `_unwritten` is None, whatever fails then."""

    @abstractmethod
    def _summarize(self, status: str, *, failed: bool) -> dict[str, Any]:
        """Write and return the summary; a failed run may have lost processes."""

    def _before_last_save(self, status: str) -> str:
        """Finish the run's work after the last step; returns the status."""
        return status

    def _queue_state(self) -> bytes | None:
        """Return the sample queue's part of a checkpoint, None for a run without one."""
        return None

    def _steps(self) -> str:
        steps = self._config.run.steps
        self._view.begin(first_step=self._version)
        try:
            while self._version < steps and not self._interrupts and self._step():
                pass
            self._tick()
        finally:
            self._view.end()
        if self._callback_error is not None:
            raise self._callback_error
        return "interrupted" if self._version < steps else "done"

    def _is_due(self, every: int) -> bool:
        """Whether a thing that happens every `every` steps (0 = never) is due; not at the last step."""
        return every > 0 and self._version % every == 0 and self._version < self._config.run.steps

    def _save_if_due(self) -> None:
        """Save if `run.checkpoint_every` or `run.checkpoint_every_minutes` asks for it."""
        run = self._config.run
        is_late = 0 < run.checkpoint_every_minutes * 60 <= time.monotonic() - self._saved_at
        if self._is_due(run.checkpoint_every) or (is_late and self._is_due(1)):
            try:
                self._save(beside=run.checkpoint_beside)
            except CheckpointError as error:
                self._view.print(str(error), style="yellow")

    def _ask(self, method: str, *args: Any, waiting_for: str) -> list[Any]:
        """Call a method of all ranks under the watchdog; returns their answers."""
        calls = call_all(self._ranks.handles, "work", method, *args)
        self._watchdog.restart()
        self._tick()
        while late := self._ranks.wait(calls, POLL_S):
            self._tick()
            self._answer_stop(waiting_for)
            progress = (len(late), self._ranks.progress())
            culprit = functools.partial(self._ranks.describe, late)
            self._watchdog.check(progress, waiting_for=waiting_for, culprit=culprit)
        return [calls.values[name] for name in self._ranks.handles]

    def _tick(self) -> None:
        """Do what every wait does at each poll."""
        if self._places.head_is_lost():
            self._interrupts.give_notice("the loss of Ray's head process (GCS)")
        self._announce_stop()
        if self._unwritten is not None:
            self._call_back(self._write(self._unwritten))
        self._advance_save()
        self._poll_processes()

    def _announce_stop(self) -> None:
        """Confirm a request to stop, once."""
        if self._interrupts.is_unannounced():
            why = self._interrupts.notice or "press Ctrl-C again to stop at once"
            self._view.print(f"stopping after this step and saving ({why}) ...")

    def _answer_stop(self, waiting_for: str) -> None:
        """Confirm a request to stop; after the deadline of a notice, end the wait."""
        self._announce_stop()
        if self._interrupts.is_overdue():
            raise StallError(
                f"the run could not stop in time after {self._interrupts.notice}: run.save_deadline_s="
                f"{self._config.run.save_deadline_s:g} are over, and it still waits for {waiting_for}"
            )

    def _call_back(self, row: Mapping[str, Any]) -> None:
        try:
            answer = None if self._on_step is None else self._on_step(row)
            if isinstance(answer, bool | np.bool_) and not answer:
                self._interrupts.request_stop()
        except (Exception, SystemExit) as error:
            self._callback_error, self._on_step = error, None
            self._interrupts.request_stop()

    def _save(self, *, beside: bool = False) -> None:
        """Save the completed step; in the background (`beside`), only the copies of the state are waited for.

        Raises:
            CheckpointError: In the background: an earlier save is still being written.
            StallError: A rank or the disk is late.
        """
        self._tick()
        if not beside:
            self._finish_save()
        self._saved_at = time.monotonic()
        if self._config.run.checkpoint_beside and ((late := self._ranks.busy()) or self._saving is not None):
            words = "; ".join(f"{name} {doing}" for name, doing in late.items()) or "its manifest"
            problem = f"step {self._version} is not saved: an earlier save is still being written: {words}"
            raise CheckpointError(problem) if beside else StallError(problem)
        saving = self._write_checkpoint(beside=beside)
        if beside:
            next(saving)  # an error up to here belongs to this step
            self._saving = self._version, saving
            return
        for _ in saving:
            self._announce_stop()

    def _write_checkpoint(self, *, beside: bool) -> Iterator[object]:
        """Write a checkpoint of the completed step, a bit at each `next`; ends when it is whole."""
        run, step, wait_s, start = self._config.run, self._version, 0.0 if beside else POLL_S, now()
        with self._folder.new_checkpoint(step, queue_state=self._queue_state(), keep=run.keep_checkpoints) as path:
            self._ranks.ask("snapshot", beside, timeout_s=run.save_timeout_s)
            for answers in self._ranks.asking("save", path, timeout_s=run.save_timeout_s, wait_s=wait_s):
                yield answers
            pool, deadline = ThreadPoolExecutor(1), time.monotonic() + run.save_timeout_s
            reading = pool.submit(seal, path.parent, ChainMap(*answers))
            pool.shutdown(wait=False)
            while wait([reading], wait_s).not_done:
                if time.monotonic() >= deadline:
                    raise StallError(
                        f"the manifest of {path.parent} was not written: expected to read the checkpoint within "
                        f"run.save_timeout_s={run.save_timeout_s:g} s. Fix: check that disk, or raise the limit"
                    )
                yield None
            reading.result()
        self._controller_lane.emit("checkpoint", step=step, start=start)
        if step > self._furthest:
            self._furthest, self._restarts_left = step, run.max_restarts

    def _advance_save(self) -> None:
        """Advance a save in the background; if it fails, only its checkpoint is lost."""
        if self._saving is None:
            return
        step, saving = self._saving
        try:
            next(saving)
            return
        except StopIteration:
            pass
        except Exception as error:
            self._view.print(f"the save of step {step} failed: {error}", style="yellow")
        self._saving = None

    def _finish_save(self) -> None:
        """Wait for a save in the background, before another save, a restart or the end."""
        if self._saving is not None:
            step, timeout_s = self._saving[0], self._config.run.save_timeout_s
            self._view.print(f"waiting for the save of step {step} (run.save_timeout_s={timeout_s:g}) ...")
        while self._saving is not None:
            self._advance_save()
            self._announce_stop()
            time.sleep(_SETTLE_S)

    def _finish(self, status: str) -> dict[str, Any]:
        """Save, export, summarize and stop, in this order; after a notice, only what a resume needs."""
        status = self._before_last_save(status)
        self._view.print("saving ...")
        if not (self._interrupts.notice and self._is_exported()):
            self._save()
        checkpoint = self._folder.newest_checkpoint()
        if self._interrupts.notice:
            status = "interrupted"  # a resume exports the model
        else:
            written = self._ranks.ask("export", checkpoint / "model", timeout_s=self._config.run.save_timeout_s)
            seal(checkpoint, ChainMap(*written))
        if self._interrupts:
            self._recorder.stopped_by = self._interrupts.why
            self._view.print(f"saved {checkpoint.name} after {self._interrupts.why}")
        summary = self._summarize(status, failed=False)
        if not self._interrupts.notice:
            self._processes.stop()
        if status != "done":
            raise Interrupted(str(self._folder.path), None if self._interrupts.notice else summary)
        return summary

    def _is_exported(self) -> bool:
        """Whether the step's checkpoint holds a model: a new save would replace it by one without."""
        return (self._folder.checkpoints / f"step-{self._version:06d}" / "model").is_dir()

    def _rescue(self, error: BaseException) -> None:
        """After a failure: save a completed step, write the summary, and print how to resume."""
        self._view.end()
        if self._interrupts.notice:
            self._view.print(str(error))
        self._save_what_is_whole()
        self._recorder.stopped_by = self._interrupts.why
        self._summarize(f"failed: {type(error).__name__}: {error}", failed=True)
        self._view.print(self._folder.how_to_resume())

    def _save_what_is_whole(self) -> None:
        """Save after a failure, if a step is complete and all ranks are free."""
        with contextlib.suppress(Exception):
            self._tick()
        self._finish_save()
        with contextlib.suppress(Exception):
            # A busy rank hangs, and the save would wait for it.
            if self._at_boundary and self._version > 0 and not self._is_exported() and not self._ranks.busy():
                self._view.print(f"saving step {self._version} ...")
                try:
                    self._save()
                except CheckpointError as error:
                    self._view.print(str(error), style="yellow")
