"""The controller of an offline run (SFT, reward model, DPO): the ranks train on rows of a file."""

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from areal_lite.actors.trainer import OfflineTrainerActor
from areal_lite.config.offline import OfflineConfig
from areal_lite.launch.run.controller import Controller
from areal_lite.launch.run.ranks import Ranks
from areal_lite.record.recorder import OfflineRecorder


class OfflineController(Controller):
    """Runs `areal-lite sft`, `reward-model` and `dpo`, which have trainer ranks only."""

    _config: OfflineConfig
    _recorder_kind = OfflineRecorder

    def _spawn(self, checkpoint: Path | None) -> Ranks:
        if hasattr(self, "_ranks"):
            self._ranks.kill()
        self._ranks = Ranks(OfflineTrainerActor, self._places)
        return self._ranks

    def _start(self, checkpoint: Path | None) -> None:
        self._view.print("starting the trainer ranks ...")
        starting = self._ranks.start(model_folder=str(self._model_folder))
        self._places.wait_until_started(starting, self._view.print)

    def _prepare(self, checkpoint: Path | None) -> None:
        if self._config.has_reference:
            self._view.print("running the reference model over all pairs ...")
        self._ask("prepare", waiting_for="the reference model")
        if checkpoint is not None:
            self._version = self._ranks.load(checkpoint)
        self._at_boundary = True
        if not self._recorder.evaluations:
            self._evaluate()

    def _step(self) -> bool:
        run, begun = self._config.run, time.monotonic()
        self._trainer_lane.emit("train", step=self._version + 1)
        self._at_boundary = False
        (figures, *_) = self._ask("step", waiting_for=f"step {self._version + 1} to be trained")
        self._version += 1
        self._at_boundary = True
        self._trainer_lane.emit("trained", version=self._version)
        record = {"figures": figures, "train_s": time.monotonic() - begun}
        try:
            if self._version == run.steps or self._is_due(run.eval_every):
                self._evaluate()
        finally:  # the step is trained and will be saved, even if its evaluation failed
            self._unwritten = record
        self._save_if_due()
        return True

    def _before_last_save(self, status: str) -> str:
        if status == "done" and not self._interrupts.notice and self._version not in self._recorder.evaluations:
            self._evaluate()  # it failed before a restart or a resume
        return status

    def _evaluate(self) -> None:
        (measured, *_) = self._ask("evaluate", waiting_for="an evaluation")
        if measured:
            self._recorder.evaluations[self._version] = figures = measured["figures"]
            self._controller_lane.emit("eval", step=self._version, **measured)
            found = ", ".join(f"{name} {value:.3f}" for name, value in figures.items())
            self._view.print(f"step {self._version}, held out: {found}")

    def _poll_processes(self) -> None:
        self._recorder.feed([*self._trainer_lane.drain(), *self._controller_lane.drain()])

    def _write(self, record: dict[str, Any]) -> Mapping[str, Any]:
        row: Mapping[str, Any] = self._recorder.step(record["figures"], step=self._version, train_s=record["train_s"])
        self._unwritten = None
        self._view.step(row, evaluations=self._recorder.evaluations)
        return row

    def _summarize(self, status: str, *, failed: bool) -> dict[str, Any]:
        self._poll_processes()
        summary: dict[str, Any] = self._recorder.summary(status)
        return summary
