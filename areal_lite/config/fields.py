"""Settings that name something outside the recipe, marked as such, so that it is found wherever an actor runs.

A field is marked through its type: `path: Annotated[str | None, Refers.FILE]`, or one of the short forms below. The
arguments of a verifier (`arguments_model`, see `plugins.py`) are marked in the same way.
"""

from enum import Enum
from typing import Annotated

__all__ = ["FunctionName", "ModelFolder", "Refers"]


class Refers(Enum):
    """What a setting refers to; relative paths start in the folder where the command was typed."""

    FILE = "a file or folder"
    FILE_OR_HUB = "a file or folder; of source: dataset also a hub id"
    MODEL = "a model's folder, or that of the run that made it"
    FUNCTION = "functions, wherever texts in it have the form path.py:function"
    ARGUMENTS = "whatever the function beside it says of its arguments"


ModelFolder = Annotated[str, Refers.MODEL]
FunctionName = Annotated[str, Refers.FUNCTION]
