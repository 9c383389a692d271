"""The controller: drives one run from start to end. A plain class in the CLI's process.

What every kind of run has: its order, Ctrl-C, the watchdog, checkpoints and the end. What a step is, and who takes part
in it beside the trainer ranks, the two kinds say: `online.py` and `offline.py`.

Every wait begins with `_tick`, again and again: there the record of the last step is written, so that nobody waits for
it. What ends the run while a batch trains waits until it is trained, so that there is a whole state to save.
"""

import contextlib
import functools
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

from areal_lite.actors.calls import call_all
from areal_lite.errors import CheckpointError, FruitlessError, QueueError, QueueTimeout, RankDied, StallError
from areal_lite.events import EventBuffer
from areal_lite.launch.run.cluster import Cluster
from areal_lite.launch.run.places import Places
from areal_lite.launch.run.ranks import POLL_S, Ranks
from areal_lite.launch.run.signals import Interrupts
from areal_lite.launch.run.view import View
from areal_lite.record.checkpoints import seal, whole_checkpoints
from areal_lite.record.run_folder import RunFolder
from areal_lite.watchdog import Watchdog

_GOES_BACK = (QueueError, QueueTimeout, RankDied, StallError)
"""What is over when queue and ranks begin again."""
_SETTLE_S = 0.05
"""Between looks at a save that is waited for."""


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
    """One run: owns the processes, the run folder and the order of everything."""

    _config: Any
    _ranks: Ranks
    _recorder_kind: type[Any]

    def __init__(self, *, folder: RunFolder, places: Places, model_folder: Path, view: View) -> None:
        """Prepare a run; nothing starts before `run`.

        Args:
            places: With the recipe, its paths absolute and its steps known.
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
        """The step that was saved last, of all that this process has saved."""
        self._at_boundary = False
        """The weights are those of a completed step, so that they can be saved."""
        self._saving: tuple[int, Iterator[object]] | None = None
        """The step that is saved beside the present one, and what goes on with it."""
        self._on_step: Callable[[Mapping[str, Any]], object] | None = None
        self._callback_error: BaseException | None = None
        """What `on_step` raised; it ends the run, like any other error, once the step under way is trained."""
        self._unwritten: dict[str, Any] | None = None
        """What is known of the last step, until its row is written."""

    def run(self, on_step: Callable[[Mapping[str, Any]], object] | None = None) -> dict[str, Any]:
        """Run to the end and return the summary.

        Args:
            on_step: Gets the row of every step, once more of those that are trained again after the run went back;
                returning False ends the run like Ctrl-C.

        Raises:
            Interrupted: After Ctrl-C, once everything is saved; after the notice of a batch system, in any case.
            Exception: What ended the run early, or what `on_step` raised; what could be saved is saved.
        """
        self._on_step = on_step
        checkpoint = self._folder.checkpoint
        self._spawn_all(checkpoint)
        with self._interrupts:
            return self._run(checkpoint)

    def _run(self, checkpoint: Path | None) -> dict[str, Any]:
        try:
            self._start(checkpoint)
            self._interrupts.end_at_once(False)
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
            self._view.say(self._folder.how_to_resume())
            raise
        except (Exception, SystemExit) as error:
            located = self._places.whereabouts.located(error)
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
        """Whether to begin again may help: a node that is out of reach would be waited for in vain."""
        is_hopeless = isinstance(failure, FruitlessError) or self._places.whereabouts.out_of_reach()
        return not (self._interrupts or self._restarts_left == 0 or is_hopeless)

    def _go_back(self, failure: Exception) -> None:
        """Begin again at the last checkpoint, which may be this moment's, with new processes where it takes them."""
        noticed, reason = time.time(), str(self._places.whereabouts.located(failure))
        self._save_what_is_whole()
        self._restarts_left -= 1
        self._recorder.close()
        self._folder.go_back(say=self._view.say)
        self._recorder = self._recorder_kind(self._config, self._folder)
        checkpoint = self._folder.checkpoint
        place = checkpoint.name if checkpoint else "the start"
        self._view.say(
            f"{reason}; the run goes back to {place} (run.max_restarts: {self._restarts_left} left)", style="yellow"
        )
        self._unwritten, self._version = None, 0
        self._interrupts.end_at_once(True)
        self._spawn_all(checkpoint)
        try:
            self._start(checkpoint)
        except StallError:
            self._restarts_left = 0  # what took too long would do so again
            raise
        self._interrupts.end_at_once(False)
        self._at_boundary = True
        self._prepare(checkpoint)
        self._controller_lane.emit("restarted", step=self._version, noticed=noticed, reason=reason)
        self._view.say(f"back at step {self._version}")

    def _spawn_all(self, checkpoint: Path | None) -> None:
        self._processes = self._spawn(checkpoint)
        self._ranks.meanwhile = self._hear

    @abstractmethod
    def _spawn(self, checkpoint: Path | None) -> Cluster | Ranks:
        """Start the first processes, and set `_ranks`; returns what ends all that there will be.

        Called again, it replaces those that hold the run's state.
        """

    @abstractmethod
    def _start(self, checkpoint: Path | None) -> None:
        """Wait until all processes are there. Ctrl-C ends the run at once: there is nothing to save yet."""

    @abstractmethod
    def _prepare(self, checkpoint: Path | None) -> None:
        """Do what comes before the first step."""

    @abstractmethod
    def _step(self) -> bool:
        """Train one step and leave its record in `_unwritten`; False when Ctrl-C came before it began."""

    @abstractmethod
    def _look_after(self) -> None:
        """Do what goes on beside a wait."""

    @abstractmethod
    def _write(self, record: dict[str, Any]) -> Mapping[str, Any]:
        """Write the row of a step, show it, and return it."""

    @abstractmethod
    def _sum_up(self, status: str, *, failed: bool) -> dict[str, Any]:
        """Write the summary of a run that is saved, or of one that failed, which may have lost processes."""

    def _wind_up(self, status: str) -> str:
        """Do what comes between the last step and the last checkpoint; returns the status."""
        return status

    def _queue_state(self) -> bytes | None:
        """Return the sample queue's part of a checkpoint."""
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
        """Whether something that happens every so many steps, 0 = never, does so now; at the end it does anyway."""
        return every > 0 and self._version % every == 0 and self._version < self._config.run.steps

    def _save_if_due(self) -> None:
        """Write a checkpoint where steps or minutes since the last one ask for it."""
        run = self._config.run
        is_late = 0 < run.checkpoint_every_minutes * 60 <= time.monotonic() - self._saved_at
        if self._is_due(run.checkpoint_every) or (is_late and self._is_due(1)):
            try:
                self._save(beside=run.checkpoint_beside)
            except CheckpointError as error:
                self._view.say(str(error), style="yellow")

    def _ask(self, method: str, *args: Any, waiting_for: str) -> list[Any]:
        """Have all ranks do something together, with the watchdog on."""
        calls = call_all(self._ranks.handles, "work", method, *args)
        self._watchdog.restart()
        self._tick()
        while late := self._ranks.wait(calls, POLL_S):
            self._tick()
            if self._interrupts.are_overdue():
                raise StallError(
                    f"after {self._interrupts.notice} the run must save within run.save_deadline_s="
                    f"{self._config.run.save_deadline_s:g} s, it still waits for {waiting_for}: given up"
                )
            progress = (len(late), self._ranks.progress())
            self._watchdog.check(
                progress, waiting_for=waiting_for, culprit=functools.partial(self._ranks.describe, late)
            )
        return [calls.values[name] for name in self._ranks.handles]

    def _tick(self) -> None:
        """What every wait does first, and again and again."""
        if self._places.head_is_lost():
            self._interrupts.give_notice("the loss of Ray's head process (GCS)")
        self._hear()
        if self._unwritten is not None:
            row = self._write(self._unwritten)
            self._unwritten = None
            self._call_back(row)
        self._go_on_saving()
        self._look_after()

    def _hear(self) -> None:
        """Tell whoever asked to stop that they were heard."""
        if self._interrupts.are_news():
            why = self._interrupts.notice or "press Ctrl-C again to stop at once"
            self._view.say(f"stopping after this step and saving ({why}) ...")

    def _call_back(self, row: Mapping[str, Any]) -> None:
        try:
            if self._on_step is not None and self._on_step(row) is False:
                self._interrupts.ask()
        except (Exception, SystemExit) as error:
            self._callback_error, self._on_step = error, None
            self._interrupts.ask()

    def _save(self, *, beside: bool = False) -> None:
        """Write a checkpoint of this step boundary; beside the steps that follow, only the copies are waited for.

        Raises:
            CheckpointError: Beside the steps, of which none waits for an earlier save.
            StallError: Somebody is late.
        """
        self._tick()
        if not beside:
            self._settle()
        self._saved_at = time.monotonic()
        if self._config.run.checkpoint_beside and ((late := self._ranks.busy()) or self._saving is not None):
            words = "; ".join(f"{name} {doing}" for name, doing in late.items()) or "its manifest"
            problem = f"step {self._version} is not saved, an earlier one is still written: {words}"
            raise CheckpointError(problem) if beside else StallError(problem)
        saving = self._write_checkpoint(beside=beside)
        if beside:
            next(saving)  # what fails until here is of this step
            self._saving = self._version, saving
            return
        for _ in saving:
            self._hear()

    def _write_checkpoint(self, *, beside: bool) -> Iterator[object]:
        """Yield again and again until there is a checkpoint of the step that is completed now."""
        run, step, wait_s = self._config.run, self._version, 0.0 if beside else POLL_S
        with self._folder.new_checkpoint(step, queue_state=self._queue_state(), keep=run.keep_checkpoints) as path:
            self._ranks.ask("snapshot", beside, timeout_s=run.save_timeout_s)
            yield from self._ranks.asking("save", path, timeout_s=run.save_timeout_s, wait_s=wait_s)
            pool, deadline = ThreadPoolExecutor(1), time.monotonic() + run.save_timeout_s
            reading = pool.submit(seal, path.parent)
            pool.shutdown(wait=False)
            while wait([reading], wait_s).not_done:
                if time.monotonic() >= deadline:
                    raise StallError(
                        f"the controller must read what was saved, for its manifest, within run.save_timeout_s="
                        f"{run.save_timeout_s:g} s; it still reads {path.parent}: is that disk slow, or gone?"
                    )
                yield None
            reading.result()
        self._controller_lane.emit("checkpoint", step=step)
        if step > self._furthest:
            self._furthest, self._restarts_left = step, run.max_restarts

    def _go_on_saving(self) -> None:
        """Look after a save beside the steps; one that fails costs nothing but its checkpoint."""
        if self._saving is None:
            return
        step, saving = self._saving
        try:
            next(saving)
            return
        except StopIteration:
            pass
        except Exception as error:
            self._view.say(f"the save of step {step} failed: {error}", style="yellow")
        self._saving = None

    def _settle(self) -> None:
        """Wait for a save beside the steps: whoever saves, goes back or ends finds no other one under way."""
        if self._saving is not None:
            step, timeout_s = self._saving[0], self._config.run.save_timeout_s
            self._view.say(f"waiting for the save of step {step} (run.save_timeout_s={timeout_s:g}) ...")
        while self._saving is not None:
            self._go_on_saving()
            self._hear()
            time.sleep(_SETTLE_S)

    def _finish(self, status: str) -> dict[str, Any]:
        """Wind up, save, export, sum up, stop; in this order. After a notice, no more than is needed to go on."""
        status = self._wind_up(status)
        self._view.say("saving ...")
        self._save()
        checkpoint = self._folder.newest_checkpoint()
        if not self._interrupts.notice:
            self._ranks.ask("export", checkpoint / "model", timeout_s=self._config.run.save_timeout_s)
            seal(checkpoint)
        if self._interrupts:
            self._recorder.stopped_by = self._interrupts.why
            self._view.say(f"saved {checkpoint.name} after {self._interrupts.why}")
        summary = self._sum_up(status, failed=False)
        if not self._interrupts.notice:
            self._processes.stop()
        if status != "done":
            raise Interrupted(str(self._folder.path), None if self._interrupts.notice else summary)
        return summary

    def _rescue(self, error: BaseException) -> None:
        """After a failure: save if the weights are those of a step boundary, write the summary, say how to go on."""
        self._view.end()
        if self._interrupts.notice:
            self._view.say(str(error))
        self._save_what_is_whole()
        self._recorder.stopped_by = self._interrupts.why
        self._sum_up(f"failed: {type(error).__name__}: {error}", failed=True)
        self._view.say(self._folder.how_to_resume())

    def _save_what_is_whole(self) -> None:
        """After a failure: save if the weights are those of a step boundary, and everybody is there who is needed."""
        with contextlib.suppress(Exception):
            self._tick()
        self._settle()
        with contextlib.suppress(Exception):
            # A rank that is in the middle of something hangs: saving would wait for nothing.
            if self._at_boundary and self._version > 0 and not self._ranks.busy():
                self._view.say(f"saving step {self._version} ...")
                try:
                    self._save()
                except CheckpointError as error:
                    self._view.say(str(error), style="yellow")
