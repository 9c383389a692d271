"""What several commands take: a recipe, and settings that replace its own."""

from pathlib import Path
from typing import Annotated, Any

import typer

from areal_lite.config.reading import shipped_recipes


def word_list(metavar: str, help: str) -> Any:
    """Return an argument of any number of words."""
    return typer.Argument(metavar=metavar, default_factory=list, show_default=False, help=help)


def out_file(*names: str, help: str, **options: Any) -> Any:
    """Return an option that names a file to write: its folder is looked for before any work is done."""
    return typer.Option(*names, help=help, callback=_in_a_folder, show_default=False, **options)


def _in_a_folder(path: Path | None) -> Path | None:
    if path is not None and not path.absolute().parent.is_dir():
        raise typer.BadParameter(f"must be in a folder that is there, got {path}: make {path.absolute().parent} first")
    return path


Model = Annotated[
    str, typer.Argument(metavar="MODEL_OR_RUN", help="model folder, or the folder of a run that has ended")
]
Recipe = Annotated[
    str, typer.Argument(metavar="RECIPE", help=f"path of a YAML file, or one of: {', '.join(shipped_recipes())}")
]
Overrides = Annotated[
    list[str], word_list("[section.field=value]...", "settings that replace the recipe's, e.g. run.steps=50")
]
