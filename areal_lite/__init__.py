"""areal-lite: asynchronous reinforcement learning for language models, small enough to read."""

from areal_lite.api import Run, load_recipe, open_run, run
from areal_lite.errors import ArealLiteError, ConfigError

__version__ = "0.10.0"
__all__ = ["ArealLiteError", "ConfigError", "Run", "__version__", "load_recipe", "open_run", "run"]
