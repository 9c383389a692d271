"""Run folders without a run."""

from collections.abc import Callable
from pathlib import Path

from areal_lite.config.offline import OfflineConfig
from areal_lite.config.recipe import Config
from areal_lite.record.checkpoints import new_checkpoint
from areal_lite.record.run_folder import RunFolder, run_path


def new_run_folder(config: Config | OfflineConfig) -> RunFolder:
    """Begin the folder of `run.dir`."""
    folder = RunFolder(run_path(config.run, recipe_name="test"))
    folder.begin(config)
    return folder


def write_checkpoint(folder: Path, step: int, fill: Callable[[Path], object], *, keep: int) -> Path:
    """Write a checkpoint whose files a function makes; returns its path."""
    with new_checkpoint(folder, step, keep=keep) as path:
        fill(path)
    return folder / f"step-{step:06d}"


def save_run(
    folder: RunFolder, step: int, save: Callable[[Path], object], *, queue: bytes | None = None, keep: int = 1
) -> Path:
    """Write a checkpoint of a run whose trainer's part a function makes; returns its path."""
    with folder.new_checkpoint(step, queue_state=queue, keep=keep) as path:
        save(path)
    return folder.newest_checkpoint()
