"""Recipes read: a YAML file, `section.field=value` overrides, and one `ConfigError` with a line per mistake."""

import contextlib
import json
import os.path
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar, get_args, get_origin

import yaml
from pydantic import BaseModel, ValidationError

from areal_lite.config.section import HERE, Section
from areal_lite.config.sections import COMMANDS
from areal_lite.config.suggestion import suggestion
from areal_lite.errors import ConfigError

Recipe = TypeVar("Recipe", bound=Section)


def recipe_folder() -> Path:
    """Folder of the shipped recipes."""
    return Path(__file__).parents[1] / "launch" / "recipes"


def shipped_recipes() -> list[str]:
    """Names of the shipped recipes."""
    return sorted(path.stem for path in recipe_folder().glob("*.yaml"))


def _resolver(tag: str, form: re.Pattern[str]) -> tuple[str, re.Pattern[str]]:
    """Return how YAML recognises a tag; for numbers without base 60 and 8, in which 4:00:00 is 14400 and 010 is 8."""
    is_number = tag.endswith((":int", ":float"))
    return tag, re.compile(rf"(?!.*:|[-+]?0\d){form.pattern}", re.VERBOSE) if is_number else form


_EXPONENT = ("tag:yaml.org,2002:float", re.compile(r"[-+]?\d+[eE][-+]\d+$"))


class _Loader(yaml.SafeLoader):
    """YAML without dates, numbers to base 60 or 8, and duplicate keys, of which the last would win.

    1e-6 is a number; PyYAML asks for a point. 1e5 is a text, as it may be a name.
    """

    yaml_implicit_resolvers = {
        first: [_resolver(*each) for each in forms if not each[0].endswith(":timestamp")]
        + [_EXPONENT] * (first in {*"-+0123456789"})
        for first, forms in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        seen = set[str]()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value in seen:
                raise yaml.MarkedYAMLError(problem=f"duplicate key {key.value!r}", problem_mark=key.start_mark)
            seen.add(str(key.value))
        return node


def _load(text: str) -> Any:
    return yaml.load(text, _Loader)


def read_recipe(recipe: str, overrides: Iterable[str] = (), *, command: str | None) -> dict[str, Any]:
    """Read a recipe's sections and apply overrides, unchecked.

    Args:
        recipe: Path of a YAML file, or the name of a shipped recipe.
        overrides: `section.field=value`; the value is read as YAML.
        command: What the recipe must be for, a key of `COMMANDS`; None = anything.

    Raises:
        ConfigError: The file is unreadable or holds no sections, or is for another command or an unknown one.
    """
    path = next(filter(os.path.isfile, (Path(recipe), recipe_folder() / f"{recipe}.yaml")), None)
    if path is None:
        raise ConfigError(
            f"a recipe is a YAML file or one of {', '.join(shipped_recipes())}; there is no {recipe!r}"
            + suggestion(recipe, shipped_recipes())
        )
    raw = read_yaml(path, holding="sections (run, model, data, ...)")
    apply_overrides(raw, overrides)
    meant = str(raw.setdefault("command", "train")).replace("-", "_")
    if meant not in COMMANDS:
        raise ConfigError(f"command must be one of {', '.join(COMMANDS)}, got {raw['command']!r} in {recipe}")
    if command is not None and meant != command:
        raise ConfigError(f"{recipe} is a recipe of areal-lite {COMMANDS[meant]}: run it with that")
    return raw | {"command": meant}


def read_yaml(path: Path, *, holding: str) -> dict[str, Any]:
    """Read a YAML file that holds a mapping; a `ConfigError` if it does not. `holding` describes it, for the message.

    A run's `config.json` is read as JSON: YAML would read its 1e-05 as a text.
    """
    try:
        raw = (json.loads if path.suffix == ".json" else _load)(path.read_text()) or {}
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:  # also what JSON and Unicode raise
        raise ConfigError(f"{path} is not readable as YAML: {error}") from error
    if not isinstance(raw, dict):
        raise ConfigError(f"{path} must hold {holding}, got a {type(raw).__name__}")
    return raw


def parse_override(text: str) -> tuple[str, Any]:
    """Split `section.field=value`, whose value is YAML; a `ConfigError` for any other form."""
    key, equals, value = text.partition("=")
    if not equals or not all(key.split(".")):
        raise ConfigError(f"an override is section.field=value, got {text!r}")
    try:
        read = _load(value)
    except (RecursionError, yaml.YAMLError) as error:
        raise ConfigError(f"the value of {key} must be YAML, got {value!r}: write it as '{key}=\"...\"'") from error
    typed = value.strip()
    is_cut = isinstance(read, str) and read and typed.startswith(read)
    if is_cut or typed.startswith("#"):  # YAML takes a leading "#", or what follows " #", for a comment
        return key, typed
    return key, read


def override(key: str, value: str) -> str:
    """Write an override that `parse_override` reads as this text: `run.dir=/a/b`, or `run.dir="/a: b"`."""
    with contextlib.suppress(ConfigError):
        if parse_override(word := f"{key}={value}") == (key, value):
            return word
    return f"{key}={json.dumps(value, ensure_ascii=False)}"


def set_value(raw: dict[str, Any], key: str, value: Any) -> None:
    """Set `section.field` of an unchecked recipe; a `ConfigError` if a parent is no section."""
    *parents, last = key.split(".")
    for parent in parents:
        if raw.get(parent) is None:
            raw[parent] = {}
        if not isinstance(raw[parent], dict):
            raise ConfigError(f"'{key}={value}' reaches into {parent!r}, which is a value, not a section")
        raw[parent] = dict(raw[parent])  # what an anchor names stands in other places too
        raw = raw[parent]
    raw[last] = value


def apply_overrides(raw: dict[str, Any], overrides: Iterable[str]) -> None:
    """Apply `section.field=value` to an unchecked recipe, as typed; a `ConfigError` for one of another form."""
    for override in overrides:
        set_value(raw, *parse_override(override))


def parse_section(raw: Mapping[str, Any], kind: type[Recipe], *, prefix: str = "") -> Recipe:
    """Turn a nested mapping into a checked recipe, or a section of one; a `ConfigError` has one line per problem.

    `prefix` is the section's place, with a dot.
    """
    try:
        return kind.model_validate(raw)
    except ValidationError as error:
        raise ConfigError("\n".join(explained(error, kind, prefix=prefix))) from None


def explained(error: ValidationError, kind: type[BaseModel], *, prefix: str = "") -> Iterable[str]:
    """Yield a sentence per mistake in what was read as `kind`; `prefix` is its place in the recipe, with a dot."""
    for item in error.errors():
        place = (prefix + ".".join(map(str, item["loc"]))).removesuffix(".")
        if place.endswith(".[key]"):
            section = prefix + ".".join(map(str, item["loc"][:-2]))
            message = re.sub("^(String|Input) should", "must", item["msg"])
            yield f"a name in {section} {message}, got {item['input']!r}: rename it"
        elif item["type"] == "extra_forbidden":
            near = suggestion(place, _known_keys(kind, item["loc"], prefix))
            is_recipe = "command" in kind.model_fields
            fix = " Fix: areal-lite check-config lists all settings, CHANGELOG.md those that were removed"
            yield f"unknown key {place}{near}" + is_recipe * f"{'' if near else '.'}{fix}"
        elif item["type"] == "value_error" and issubclass(kind, Section):
            yield str(item["ctx"]["error"]).replace(HERE, place)
        else:
            yield f"{place}: {item['msg'][0].lower()}{item['msg'][1:]}, got {item['input']!r}"


def _known_keys(kind: Any, place: tuple[str | int, ...], prefix: str = "") -> Iterable[str]:
    """Yield every setting's dotted name; of sections that the user has named, those of the one at `place`."""
    for name, field in kind.model_fields.items():
        yield f"{prefix}{name}"
        inside = place[1:] if place[:1] == (name,) else ()
        for section in (field.annotation, *get_args(field.annotation)):
            if isinstance(section, type) and issubclass(section, BaseModel):
                if get_origin(field.annotation) is not dict:
                    yield from _known_keys(section, inside, f"{prefix}{name}.")
                elif inside:
                    yield from _known_keys(section, inside[1:], f"{prefix}{name}.{inside[0]}.")
