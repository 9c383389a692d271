"""Arguments that several commands share: a recipe, overrides, a model and the recipe of its run, a file to write."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from areal_lite.config.data import is_hub_id
from areal_lite.config.reading import apply_overrides, shipped_recipes
from areal_lite.config.recipe import Config, load_config, parse_config
from areal_lite.errors import ConfigError
from areal_lite.record.run_files import read_json


def argument(metavar: str, help: str, **more: Any) -> Any:
    """Declare a positional argument; `help` says what it stands for."""
    return typer.Argument(metavar=metavar, help=help, **more)


def option(metavar: str, help: str, *names: str, **more: Any) -> Any:
    """Declare an option that takes a value; without `names` it is called as its parameter is."""
    return typer.Option(*names, metavar=metavar, help=help, **more)


def optional(metavar: str, help: str) -> Any:
    """Declare an argument that may be left out, which is "" then."""
    return argument(metavar, help, default_factory=str, show_default=False)


def word_list(metavar: str, help: str) -> Any:
    """Declare an argument that takes any number of words."""
    return argument(metavar, help, default_factory=list, show_default=False)


def out_file(metavar: str, help: str, *names: str) -> Any:
    """Declare an option that names a file to write; its folder must exist before any work is done."""
    return option(metavar, help, *names, callback=_in_a_folder, show_default=False)


def _in_a_folder(path: Path | None) -> Path | None:
    if path is not None and path.is_dir():
        raise typer.BadParameter(f"expected a file to write, got the folder {path}. Fix: add the file's name")
    if path is not None and not path.absolute().parent.is_dir():
        raise typer.BadParameter(
            f"expected a path in an existing folder, got {path}. Fix: mkdir -p {path.absolute().parent}"
        )
    return path


Model = Annotated[str, argument("MODEL_OR_RUN", "model folder, or folder of a finished run")]
Recipe = Annotated[str, argument("RECIPE", f"path of a YAML file, or one of: {', '.join(shipped_recipes())}")]
RecipeOption = Annotated[
    str | None,
    typer.Option("--recipe", help=f"a file, or {', '.join(shipped_recipes())} (default: that of the model's run)"),
]
Overrides = Annotated[
    list[str], word_list("[section.field=value]...", "settings that override the recipe, e.g. run.steps=50")
]
Gpu = Annotated[str, option("NAME", "A100, A100-40GB, B200, H100, H200, L40S or RTX4090", "--gpu")]
ProfileFile = Annotated[
    str | None, option("FILE", "cluster profile whose GPUs are used (default: as many as needed)", "--profile")
]
Json = Annotated[Path | None, out_file("OUT", "write all figures to this file", "--json")]


def run_of(model: str) -> Path | None:
    """Return the folder of the run of `areal-lite train` that a model belongs to, if any."""
    folder = Path(model).expanduser().resolve()
    for one in (folder, *folder.parents[:3]):  # checkpoints/step-n/model
        if (one / "checkpoints").is_dir() and (one / "config.json").is_file():
            return one if read_json(one / "config.json").get("command", "train") == "train" else None
    return None


def recipe_for(model: str, recipe: str | None, overrides: Sequence[str], *, console: Console) -> Config:
    """Load the recipe of --recipe, or else, and say so, the one that the model's run was trained with.

    Raises:
        ConfigError: Neither is there, or the model is missing.
    """
    from areal_lite.record.paths import find_model_folder
    from areal_lite.record.run_folder import RunFolder

    if recipe is not None:
        return load_config(recipe, overrides)
    if (run := run_of(model)) is None:
        if not (Path(model).expanduser().exists() or ("/" in model and is_hub_id(model))):
            find_model_folder(model, option="MODEL_OR_RUN")  # which raises
        raise ConfigError(
            f"--recipe must name the settings to use, got none, and {model} belongs to no run of areal-lite "
            "train. Fix: give --recipe"
        )
    console.print(f"recipe: {run}/config.json", highlight=False, soft_wrap=True)
    raw = RunFolder(run).recipe().model_dump()
    apply_overrides(raw, overrides)
    return parse_config(raw)
