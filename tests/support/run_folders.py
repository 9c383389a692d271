"""Run folders without a run."""

from areal_lite.config.offline import OfflineConfig
from areal_lite.config.recipe import Config
from areal_lite.record.run_folder import RunFolder, run_path


def new_run_folder(config: Config | OfflineConfig) -> RunFolder:
    """Begin the folder of `run.dir`."""
    folder = RunFolder(run_path(config.run, recipe_name="test"))
    folder.begin(config)
    return folder
