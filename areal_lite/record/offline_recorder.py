"""Turns what an offline run tells about itself into the files of its folder.

The controller feeds it figures of steps and evaluations; it writes `metrics.jsonl`, `events.jsonl`, `summary.json` and
TensorBoard events. It starts nothing and waits for nothing.
"""

import time
from collections.abc import Mapping
from typing import Any

from areal_lite.config.offline import OfflineConfig
from areal_lite.events import Event
from areal_lite.record.lane_clock import mean
from areal_lite.record.recorder import finite, package_versions
from areal_lite.record.run_folder import RunFolder

__all__ = ["OfflineRecorder"]

_ENDS = 10
"""Steps averaged into `loss_first` and `loss_last`."""


class OfflineRecorder:
    """Everything that is written about one run."""

    def __init__(self, config: OfflineConfig, folder: RunFolder) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._config, self._folder = config, folder
        self.rows: list[dict[str, Any]] = list(folder.read("metrics.jsonl"))
        """Rows of `metrics.jsonl`; a resumed run goes on behind those it finds."""
        steps_before = self.rows[-1]["step"] if self.rows else 0
        self._board = SummaryWriter(str(folder.path / "tensorboard"), purge_step=steps_before + 1)
        self._started = time.time() - (self.rows[-1]["time_s"] if self.rows else 0.0)
        self.evaluations: dict[int, dict[str, float]] = {
            event["step"]: event["figures"] for event in folder.read("events.jsonl") if event["kind"] == "eval"
        }
        """Figures over the held-out rows, by completed steps."""

    def feed(self, events: list[Event]) -> None:
        """Write events down."""
        self._folder.append("events.jsonl", events)

    def step(self, figures: Mapping[str, float], *, step: int, train_s: float) -> dict[str, Any]:
        """Write the row of one completed step, with the evaluation of that step if there was one.

        Args:
            figures: From the trainer.
            step: Number of completed steps, from 1; also the new version.
            train_s: Seconds it took.

        Returns:
            The row.
        """
        evaluation = {f"eval_{name}": value for name, value in self.evaluations.get(step, {}).items()}
        times = {"time_s": time.time() - self._started, "train_s": train_s}
        row = {"step": step, "version": step, **times, **figures, **evaluation}
        row = {name: finite(value) for name, value in row.items()}
        self.rows.append(row)
        self._folder.append("metrics.jsonl", [row])
        for name, value in row.items():
            if name not in ("step", "version") and value is not None:
                self._board.add_scalar(
                    name.replace("eval_", "eval/") if "eval_" in name else f"train/{name}", value, step
                )
        return row

    def summary(self, status: str) -> dict[str, Any]:
        """Write `summary.json` and `trace.json`, and return the summary."""
        rows = self.rows
        seconds = sum(row["train_s"] for row in rows)
        content = {
            "status": status,
            "command": self._config.command,
            "steps": len(rows),
            "version": rows[-1]["version"] if rows else 0,
            "wall_s": time.time() - self._started,
            "trained_tokens": sum(row["tokens"] for row in rows),
            "trained_tokens_per_s": sum(row["tokens"] for row in rows) / seconds if seconds else 0.0,
            "loss_first": mean(row["loss"] for row in rows[:_ENDS]),
            "loss_last": mean(row["loss"] for row in rows[-_ENDS:]),
            "eval": {str(step): figures for step, figures in sorted(self.evaluations.items())},
            "versions": package_versions(),
        }
        self._folder.write_json("summary.json", content)
        self._folder.write_trace()
        self._board.close()
        return content
