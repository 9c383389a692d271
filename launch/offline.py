"""`areal-lite sft | reward-model | dpo`: from a recipe to a finished run, checked before anything heavy starts."""

from pathlib import Path
from typing import Any

import ray
from rich.console import Console

from areal_lite.data.offline import OfflineData, load_offline
from areal_lite.errors import ConfigError
from areal_lite.launch.offline_controller import OfflineController
from areal_lite.launch.offline_view import OfflineView
from areal_lite.launch.train import prepare_model, ray_session
from areal_lite.model_folder import find_model_folder
from areal_lite.offline_config import COMMANDS, OfflineConfig
from areal_lite.run_folder import RunFolder

__all__ = ["run_offline"]


def run_offline(config: OfflineConfig, *, recipe_name: str, console: Console) -> dict[str, Any]:
    """Run a recipe and return its summary.

    Raises:
        ArealLiteError: With what to do about it.
        Interrupted: After Ctrl-C, saved.
    """
    model_folder = prepare_model(config, console=console)
    config = _with_absolute_paths(config)
    data = _load_data(config, model_folder)
    config = _with_steps(config, data)
    view = OfflineView(COMMANDS[config.command], console=console)
    with ray_session():
        _check_resources(config)
        folder = RunFolder.resume(config) if config.run.resume else RunFolder.create(config, recipe_name=recipe_name)
        console.print(f"run folder: {folder.path}", highlight=False, soft_wrap=True)
        view.say(f"{len(data.train)} training rows, {len(data.held_out)} held out")
        return OfflineController(config, folder=folder, model_folder=model_folder, view=view).run()


def _load_data(config: OfflineConfig, model_folder: Path) -> OfflineData:
    """Load the data once, so that mistakes in it are found before any actor starts."""
    from transformers import AutoTokenizer

    return load_offline(config, AutoTokenizer.from_pretrained(model_folder))


def _with_absolute_paths(config: OfflineConfig) -> OfflineConfig:
    """Actors run in other folders: files named by relative paths are found from here."""
    paths = {"path": config.data.path, "eval_path": config.data.eval_path}
    data = config.data.model_copy(update={name: str(Path(path).resolve()) for name, path in paths.items() if path})
    preference = config.preference
    if preference.reference_path is not None:
        reference = find_model_folder(preference.reference_path, option="preference.reference_path")
        preference = preference.model_copy(update={"reference_path": str(reference)})
    return config.model_copy(update={"data": data, "preference": preference})


def _with_steps(config: OfflineConfig, data: OfflineData) -> OfflineConfig:
    """Turn `epochs` into steps; what is left of an epoch behind its last full batch is passed over."""
    if config.batch.epochs is None:
        return config
    steps = max(1, round(config.batch.epochs * (len(data.train) // config.batch.batch_size)))
    return config.model_copy(update={"run": config.run.model_copy(update={"steps": steps})})


def _check_resources(config: OfflineConfig) -> None:
    num_gpus = int(ray.cluster_resources().get("GPU", 0))
    if config.run.device == "cuda" and config.trainer.ranks > num_gpus:
        raise ConfigError(
            f"the recipe needs {config.trainer.ranks} GPUs (trainer.ranks), got {num_gpus}: lower it, or join more "
            "nodes to the Ray cluster"
        )
