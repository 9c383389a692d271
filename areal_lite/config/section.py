"""The base of a recipe's sections: typed settings, marks of what they refer to, and checks beside them."""

import contextlib
import json
from collections.abc import Collection, Iterable
from enum import Enum
from typing import Annotated, Any, Self

from pydantic import AfterValidator, BaseModel, Field, model_validator

from areal_lite.errors import ConfigError

HERE = "<here>"
"""Placeholder in a section's messages for its place in the recipe, such as `data.mix.easy`."""


class Refers(Enum):
    """Marks a setting by what it names outside the recipe, so that it is found wherever an actor runs.

    As `path: Annotated[str | None, Refers.FILE]`, also in the model of a verifier's arguments. Relative paths start in
    the folder where the command was typed. A function needs no mark: it has the form path.py:function.
    """

    FILE = "file"
    """Or a folder; beside `source: dataset` a hub id, too."""
    MODEL = "folder"
    """Of a model, or of the run that made it."""
    ARGUMENTS = "arguments"
    """Arguments of the `function` beside it, whose model marks them."""
    NOTHING = "nothing"
    """A text may look like a function, and is none."""


ModelFolder = Annotated[str, Refers.MODEL]
OwnName = Annotated[str, Field(pattern="^[^:]+$")]
"""Of a recipe, for rows to choose: with a colon it would be code."""


def _unchanged_by_json(values: dict[str, Any]) -> dict[str, Any]:
    """Verifier processes and resumed runs read them from JSON, which turns the key 1 into "1"."""
    with contextlib.suppress(TypeError, ValueError):
        if json.loads(json.dumps(values, allow_nan=False)) == values:
            return values
    to_do = "quote keys that are numbers or yes and no, and convert other objects"
    raise ValueError(f"{HERE} must hold what JSON can (texts as keys, lists), got {values!r:.200}: {to_do}")


JsonArguments = Annotated[dict[str, Any], AfterValidator(_unchanged_by_json)]
"""Keyword arguments of a function."""


class _Settings(BaseModel, frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True):
    def __setattr__(self, name: str, value: Any) -> None:
        raise ConfigError(
            f"{name} was not set: a recipe that is loaded never changes. Fix: load it again with an override, such as "
            'areal_lite.load_recipe("arith_cpu", {"run.steps": 20})'
        )


class Arguments(_Settings, strict=True):
    """A verifier with its arguments, the fields that a recipe sets in `verifier.arguments`.

    Frozen and strict: no unknown names, no number for a text, no boolean for a number, no infinity. A docstring below
    each field describes it.
    """


class Section(_Settings, coerce_numbers_to_str=True):
    """Frozen, unknown keys forbidden, numbers finite; an empty section has its defaults.

    A docstring below each setting describes it (unit, range); `check-config` prints it.
    """

    _fill_empty = model_validator(mode="before")(lambda value: {} if value is None else value)

    @model_validator(mode="after")
    def _check(self) -> Self:
        if problems := list(self._problems()):
            raise ValueError("\n".join(problems))
        return self

    def _problems(self) -> Iterable[str]:
        """Yield a sentence (setting, value, what to do) for each impossible combination of settings."""
        return ()

    def unread(
        self,
        keys: Iterable[str],
        because: str,
        *,
        at: str = f"{HERE}.",
        to_do: str = "set that too, or leave it out",
        made: Collection[str] = (),
    ) -> Iterable[str]:
        """Yield a sentence for each of these settings that was made, though nothing reads it.

        One that has its default was not, unless `made` has it: a saved recipe names all of them. `at` is the section,
        with a dot.
        """
        for key in keys:
            if (value := getattr(self, key)) != type(self).model_fields[key].get_default() or key in made:
                yield f"{at}{key}{'' if isinstance(value, Section) else f'={value}'} is not read {because}: {to_do}"
