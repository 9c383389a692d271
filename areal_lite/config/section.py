"""The base of a recipe's sections: typed settings, marks of what they refer to, and checks beside them."""

from collections.abc import Iterable
from enum import Enum
from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, model_validator

HERE = "<here>"
"""Stands in a section's messages for its own place in the recipe, such as `data.mix.easy`."""


class Refers(Enum):
    """Marks a setting by what it names outside the recipe, so that it is found wherever an actor runs.

    As `path: Annotated[str | None, Refers.FILE]`, or by a short form below, also in the model of a verifier's
    arguments. Relative paths start in the folder where the command was typed.
    """

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


class Arguments(BaseModel):
    """A verifier with its arguments: what a recipe may say in `verifier.arguments`, checked as it is read.

    Frozen; no unknown names, no number for a text nor a boolean for a number, no infinity. What a field means stands in
    a docstring below it.
    """

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )


class Section(BaseModel):
    """Frozen, unknown keys forbidden, numbers finite; an empty section has its defaults.

    What a setting means (unit, range) is said under it: `check-config` shows it.
    """

    model_config = ConfigDict(
        frozen=True, extra="forbid", coerce_numbers_to_str=True, allow_inf_nan=False, use_attribute_docstrings=True
    )

    _fill_empty = model_validator(mode="before")(lambda value: {} if value is None else value)

    @model_validator(mode="after")
    def _check(self) -> Self:
        if problems := list(self._problems()):
            raise ValueError("\n".join(problems))
        return self

    def _problems(self) -> Iterable[str]:
        """Yield a sentence (setting, value, what to do) for each combination of settings that makes no sense."""
        return ()

    def changed(self, keys: Iterable[str]) -> dict[str, Any]:
        """Return those settings that have other values than the default; a saved recipe names all of them."""
        defaults = {key: type(self).model_fields[key].get_default() for key in keys}
        return {key: value for key in defaults if (value := getattr(self, key)) != defaults[key]}

    def unread(self, keys: Iterable[str], because: str, *, to_do: str = "") -> Iterable[str]:
        """Yield a sentence for each of these settings that was made, though nothing reads it."""
        for key, value in self.changed(keys).items():
            setting = f"{HERE}.{key}" if isinstance(value, Section) else f"{HERE}.{key}={value}"
            yield f"{setting} is not read {because}: {to_do or 'set that too, or leave it out'}"
