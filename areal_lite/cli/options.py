"""What several commands take: a recipe, and settings that replace its own."""

from typing import Annotated

import typer

from areal_lite.config.reading import shipped_recipes

Recipe = Annotated[
    str,
    typer.Argument(metavar="RECIPE", help=f"path of a YAML file, or one of: {', '.join(shipped_recipes())}"),
]
Overrides = Annotated[
    list[str],
    typer.Argument(
        metavar="[section.field=value]...",
        default_factory=list,
        show_default=False,
        help="settings that replace the recipe's, e.g. run.steps=50",
    ),
]
