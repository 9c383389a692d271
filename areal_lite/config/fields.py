"""Settings that name something outside the recipe, marked as such, so that it is found wherever an actor runs.

A field is marked through its type: `path: Annotated[str | None, Refers.FILE]`, or one of the short forms below. The
arguments of a verifier (`arguments_model`, see `plugins.py`) are marked in the same way.
"""

from enum import Enum
from typing import Annotated

__all__ = ["FunctionName", "ModelFolder", "Refers"]


class Refers(Enum):
    """What a setting refers to; relative paths start in the folder where the command was typed."""

    FILE = "file"
    """Or a folder."""
    FILE_OR_HUB = "file or hub id"
    """The latter of `source: dataset` alone."""
    MODEL = "folder"
    """Of a model, or of the run that made it."""
    FUNCTION = "function"
    """Wherever a text in it, its lists and its mappings has the form path.py:function."""
    ARGUMENTS = "arguments"
    """Whatever the `function` beside it says of them."""


ModelFolder = Annotated[str, Refers.MODEL]
FunctionName = Annotated[str, Refers.FUNCTION]
