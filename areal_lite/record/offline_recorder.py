"""What an offline run writes: see `recorder.py`."""

from collections.abc import Mapping
from typing import Any

from areal_lite.config.offline import OfflineConfig
from areal_lite.record.metrics import OFFLINE_METRICS
from areal_lite.record.recorder import Recorder, mean_of_ends
from areal_lite.record.run_folder import RunFolder

__all__ = ["OfflineRecorder"]


class OfflineRecorder(Recorder):
    """Everything that is written about one run of `sft`, `reward-model` or `dpo`."""

    def __init__(self, config: OfflineConfig, folder: RunFolder) -> None:
        super().__init__(folder, OFFLINE_METRICS)
        self._command = config.command

    def step(self, figures: Mapping[str, float], *, step: int, train_s: float) -> dict[str, Any]:
        """Write the row of one completed step, with the evaluation of that step if there was one, and return it."""
        evaluation = {f"eval_{name}": value for name, value in self.evaluations.get(step, {}).items()}
        return self.write(step, train_s=train_s, **figures, **evaluation)

    def summary(self, status: str) -> dict[str, Any]:
        """Write `summary.json` and `trace.json`, and return the summary."""
        tokens, seconds = (sum(row[key] for row in self.rows) for key in ("tokens", "train_s"))
        figures = {
            "command": self._command,
            "trained_tokens": tokens,
            "trained_tokens_per_s": tokens / seconds if seconds else 0.0,
            **mean_of_ends(self.rows, "loss", "loss"),
            "eval": {str(step): found for step, found in sorted(self.evaluations.items())},
        }
        return self.sum_up(status, figures)
