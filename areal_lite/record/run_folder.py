"""The run folder: every file a run leaves behind, and nothing else that writes there.

`runs/<recipe>-<time>/` holds `config.json`, `metrics.jsonl` (one row per trainer step), `samples.jsonl`,
`events.jsonl`, `trace.json`, `summary.json`, `logs/`, `checkpoints/step-<n>/` and TensorBoard events.
"""

import contextlib
import json
import os
import shutil
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Self

from areal_lite.config.offline import OfflineConfig
from areal_lite.config.reading import parse_section
from areal_lite.config.recipe import Config
from areal_lite.config.sections import LaunchConfig, RunConfig, WeightsConfig
from areal_lite.errors import CheckpointError, ConfigError
from areal_lite.events import Event
from areal_lite.record.differences import differences
from areal_lite.record.trace import to_trace

__all__ = ["RunFolder", "read_rows", "write_whole"]

Row = Mapping[str, Any]

_FREE_ON_RESUME = {
    *(f"run.{name}" for name in RunConfig.model_fields if name != "seed"),
    *(f"launch.{name}" for name in LaunchConfig.model_fields),
    *(f"weights.{name}" for name in WeightsConfig.model_fields),
    "rollout.workers", "rollout.slots", "rollout.threads", "rollout.kv_cache_mb", "rollout.gpu_memory_fraction",
    "rollout.tensor_parallel", "queue.lease_timeout_s", "queue.bind", "queue.max_message_mb", "verifier.timeout_s",
    "verifier.processes", "verifier.workers", "trainer.ranks", "trainer.threads", "trainer.micro_batch_tokens",
    "trainer.activation_checkpointing", "sft.epochs", "preference.epochs",
}  # fmt: skip
"""Settings that may change on a resume because they do not change what is learned."""


class RunFolder:
    """Paths and append-only files of one run."""

    def __init__(self, path: Path) -> None:
        self.path, self.logs, self.checkpoints = path, path / "logs", path / "checkpoints"

    @classmethod
    def create(cls, config: Config | OfflineConfig, *, recipe_name: str) -> Self:
        """Make a new folder and write the resolved config; a `ConfigError` where `run.dir` already holds a run."""
        default = Path("runs") / f"{recipe_name}-{time.strftime('%Y%m%d-%H%M%S')}"
        folder = cls(Path(config.run.dir).resolve() if config.run.dir else default.resolve())
        if (folder.path / "config.json").exists():
            raise ConfigError(
                f"run.dir must be a new folder, got {folder.path}, which holds a run: choose another, or continue it "
                f"with run.resume={folder.path}"
            )
        for path in (folder.logs, folder.checkpoints):
            path.mkdir(parents=True, exist_ok=True)
        folder.write_json("config.json", config.model_dump())
        return folder

    @classmethod
    def resume(cls, config: Config | OfflineConfig) -> Self:
        """Open the folder of `run.resume`; rows beyond its newest checkpoint move to `*.orphaned.jsonl`.

        Raises:
            CheckpointError: There is no checkpoint, another version wrote the recipe, or it differs in what is learned.
        """
        assert config.run.resume is not None
        folder = cls(Path(config.run.resume).resolve())
        if not (folder.path / "config.json").is_file():
            raise CheckpointError(f"run.resume must name a run folder, got {folder.path}, which has no config.json")
        raw = json.loads((folder.path / "config.json").read_text())
        if (purpose := raw.get("command", config.command)) != config.command:
            raise CheckpointError(
                f"run.resume must name a run of command: {config.command}, got {folder.path}, which is one of "
                f"command: {purpose}"
            )
        try:
            saved = parse_section(raw, type(config))
        except ConfigError as error:
            raise CheckpointError(
                f"run.resume must name a run that this version of areal-lite can read, got {folder.path}, whose "
                "config.json was written by an earlier version, or beside plug-ins that are not installed now: "
                f"{error}: resume with those, or start anew without run.resume"
            ) from error
        found = differences([saved.model_dump(), config.model_dump()]).items()
        if different := [f"{key} was {was!r}, is {now!r}" for key, (was, now) in found if key not in _FREE_ON_RESUME]:
            raise CheckpointError(
                f"the checkpoint belongs to another recipe: {'; '.join(different)}: resume with the recipe and "
                "overrides of the first start, or start anew without run.resume"
            )
        checkpoint = folder.newest_checkpoint()
        meta = json.loads((checkpoint / "meta.json").read_text())
        for name, key in (("metrics.jsonl", "step"), ("samples.jsonl", "step"), ("events.jsonl", "time")):
            folder._orphan_rows(name, key, last=meta[key])
        folder.write_json("config.json", config.model_dump())
        return folder

    def newest_checkpoint(self) -> Path:
        """Return the newest complete checkpoint; a `CheckpointError` where there is none."""
        complete = sorted(path.parent for path in self.checkpoints.glob("step-*/meta.json"))
        if not complete:
            raise CheckpointError(
                f"expected a complete checkpoint under {self.checkpoints}, got none: the run ended before its first "
                "one (run.checkpoint_every), start anew"
            )
        return complete[-1]

    def write_checkpoint(
        self, step: int, *, queue_state: bytes | None, save_trainer: Callable[[Path], None], keep: int
    ) -> Path:
        """Write a checkpoint that exists whole or not at all, and delete the oldest beyond the `keep` newest.

        Args:
            step: Completed steps.
            queue_state: The sample queue's; None for an offline run, which has no queue.
            save_trainer: Writes the trainer's part into a folder.
        """
        final = self.checkpoints / f"step-{step:06d}"
        for leftover in self.checkpoints.glob(".step-*"):
            shutil.rmtree(leftover)
        temporary = self.checkpoints / f".step-{step:06d}.tmp"
        temporary.mkdir(parents=True)
        moment = time.time()
        save_trainer(temporary / "trainer")
        if queue_state is not None:
            (temporary / "queue.msgpack").write_bytes(queue_state)
        (temporary / "meta.json").write_text(json.dumps({"step": step, "time": moment}))
        if final.exists():
            _remove(final)
        os.replace(temporary, final)
        for old in sorted(self.checkpoints.glob("step-*"))[:-keep]:
            _remove(old)
        return final

    def append(self, name: str, rows: Iterable[Row]) -> None:
        """Append rows to a `.jsonl` file; a killed run leaves whole lines."""
        text = "".join(json.dumps(row, default=float) + "\n" for row in rows)
        if text:
            with (self.path / name).open("a") as file:
                file.write(text)

    def read(self, name: str) -> list[dict[str, Any]]:
        """Read a `.jsonl` file; a last line cut off by a kill is left out."""
        return read_rows(self.path / name)[0]

    def write_json(self, name: str, content: Any) -> None:
        """Write a JSON file, whole or not at all."""
        write_whole(self.path / name, json.dumps(content, indent=2, default=float) + "\n")

    def write_trace(self) -> None:
        """Turn `events.jsonl` into `trace.json` for Perfetto."""
        events: list[Event] = self.read("events.jsonl")
        write_whole(self.path / "trace.json", json.dumps(to_trace(events)))

    def _orphan_rows(self, name: str, key: str, *, last: float) -> None:
        path, rows = self.path / name, self.read(name)
        self.append(f"{path.stem}.orphaned.jsonl", (row for row in rows if row[key] > last))
        if path.is_file():
            write_whole(path, "".join(json.dumps(row) + "\n" for row in rows if row[key] <= last))


def write_whole(path: Path, text: str) -> None:
    """Write a file whole or not at all."""
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)


def _remove(checkpoint: Path) -> None:
    """Delete a checkpoint; one that a kill left half deleted is never taken for whole."""
    hidden = checkpoint.with_name(f".{checkpoint.name}.old")
    os.replace(checkpoint, hidden)
    shutil.rmtree(hidden)


def read_rows(path: Path) -> tuple[list[dict[str, Any]], int]:
    """Return the whole rows of a `.jsonl` file, none where there is no file, and how many lines were cut off or broken.

    NaN and infinity, which JSON does not have, are None.
    """
    rows: list[dict[str, Any]] = []
    lines = path.read_text(errors="replace").split("\n") if path.is_file() else []
    for line in filter(None, lines):
        with contextlib.suppress(ValueError):
            row = json.loads(line, parse_constant=lambda _: None)
            rows += [row] if isinstance(row, dict) else []
    return rows, len(lines) - len(rows) - lines.count("")
