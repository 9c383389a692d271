"""Arguments that several commands share: a recipe, overrides, a model, a file to write."""

from pathlib import Path
from typing import Annotated, Any

import typer

from areal_lite.config.reading import shipped_recipes


def word_list(metavar: str, help: str) -> Any:
    """Return an argument that takes any number of words."""
    return typer.Argument(metavar=metavar, default_factory=list, show_default=False, help=help)


def out_file(*names: str, help: str, **options: Any) -> Any:
    """Return an option that names a file to write; its folder must exist before any work is done."""
    return typer.Option(*names, help=help, callback=_in_a_folder, show_default=False, **options)


def _in_a_folder(path: Path | None) -> Path | None:
    if path is not None and not path.absolute().parent.is_dir():
        raise typer.BadParameter(
            f"expected a path in an existing folder, got {path}. Fix: mkdir -p {path.absolute().parent}"
        )
    return path


Model = Annotated[str, typer.Argument(metavar="MODEL_OR_RUN", help="model folder, or folder of a finished run")]
Recipe = Annotated[
    str, typer.Argument(metavar="RECIPE", help=f"path of a YAML file, or one of: {', '.join(shipped_recipes())}")
]
Overrides = Annotated[
    list[str], word_list("[section.field=value]...", "settings that override the recipe, e.g. run.steps=50")
]
