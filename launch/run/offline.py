"""`areal-lite sft | reward-model | dpo`: from a recipe to a finished run, checked before anything heavy starts."""

from pathlib import Path
from typing import Any

import ray
from rich.console import Console

from areal_lite.config.offline import OfflineConfig
from areal_lite.config.sections import COMMANDS
from areal_lite.data.completions import OfflineData, load_offline
from areal_lite.errors import ConfigError
from areal_lite.launch.run.offline_controller import OfflineController
from areal_lite.launch.run.offline_view import OfflineView
from areal_lite.launch.run.train import prepare_model, ray_session, report_of
from areal_lite.record.paths import with_absolute_paths
from areal_lite.record.run_folder import RunFolder

__all__ = ["run_offline"]


def run_offline(config: OfflineConfig, *, recipe_name: str, console: Console) -> dict[str, Any]:
    """Run a recipe and return its summary, with the path of its `report` where there is one.

    Raises:
        ArealLiteError: With what to do about it.
        Interrupted: After Ctrl-C, saved.
    """
    config = with_absolute_paths(config)
    model_folder = prepare_model(config, console=console)
    data = _load_data(config, model_folder)
    config = _with_steps(config, data)
    view = OfflineView(COMMANDS[config.command], console=console)
    with ray_session():
        _check_resources(config)
        folder = RunFolder.resume(config) if config.run.resume else RunFolder.create(config, recipe_name=recipe_name)
        console.print(f"run folder: {folder.path}", highlight=False, soft_wrap=True)
        view.say(f"{len(data.train)} training rows, {len(data.held_out)} held out")
        summary = OfflineController(config, folder=folder, model_folder=model_folder, view=view).run()
    return summary | ({"report": report_of(folder, console=console)} if config.run.report else {})


def _load_data(config: OfflineConfig, model_folder: Path) -> OfflineData:
    """Load the data once, so that mistakes in it are found before any actor starts."""
    from transformers import AutoTokenizer

    return load_offline(config, AutoTokenizer.from_pretrained(model_folder))


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
