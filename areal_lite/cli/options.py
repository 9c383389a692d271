"""What several commands take: a recipe, and settings that replace its own."""

from typing import Annotated, Any

import typer

from areal_lite.config.reading import shipped_recipes


def word_list(metavar: str, help: str) -> Any:
    """Return an argument of any number of words."""
    return typer.Argument(metavar=metavar, default_factory=list, show_default=False, help=help)


Recipe = Annotated[
    str, typer.Argument(metavar="RECIPE", help=f"path of a YAML file, or one of: {', '.join(shipped_recipes())}")
]
Overrides = Annotated[
    list[str], word_list("[section.field=value]...", "settings that replace the recipe's, e.g. run.steps=50")
]
