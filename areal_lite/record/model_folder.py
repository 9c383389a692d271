"""From what a recipe calls a model to the folder with its weights: a Hugging Face folder, or a run that made one.

Called by whoever loads a model: policy, reference, critic, learned reward. Loads nothing itself.
"""

from pathlib import Path

from areal_lite.errors import CheckpointError, ConfigError
from areal_lite.record.run_folder import RunFolder

__all__ = ["find_model_folder"]


def find_model_folder(path: str | Path, *, option: str) -> Path:
    """Return the absolute path of a model's folder.

    Args:
        path: A Hugging Face model folder, or the folder of a run that has ended: its newest checkpoint's model.
        option: Where the path was given, for messages.

    Raises:
        ConfigError: It is neither, or the run has no model to give yet.
    """
    folder = Path(path).expanduser().resolve()
    if (folder / "checkpoints").is_dir():
        return _model_of_run(folder, option=option)
    if not (folder / "config.json").is_file():
        raise ConfigError(
            f"{option} must be a Hugging Face model folder, or the folder of a run that has ended, got {path}, which "
            "has no config.json: give the folder that holds config.json and the weights"
        )
    return folder


def _model_of_run(folder: Path, *, option: str) -> Path:
    try:
        checkpoint = RunFolder(folder).newest_checkpoint()
    except CheckpointError as error:
        raise ConfigError(f"{option}={folder} is a run without a model: {error}") from error
    if not (checkpoint / "model" / "config.json").is_file():
        raise ConfigError(
            f"{option}={folder} must be a run that has ended, got one whose newest checkpoint, {checkpoint.name}, "
            "holds no model: let it end, or continue it with run.resume"
        )
    return checkpoint / "model"
