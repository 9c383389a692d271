"""The command `areal-lite check-config`: a recipe checked, and printed in full."""

import math
from collections.abc import Iterable
from typing import Literal, get_args, get_origin

import yaml
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from areal_lite.config.offline import load_any_config
from areal_lite.config.sections import COMMANDS
from areal_lite.launch.commands.estimate import memory_here
from areal_lite.launch.commands.options import Overrides, Recipe


def check_config(recipe: Recipe, overrides: Overrides) -> int:
    """Check a recipe and print all its settings.

    Print every setting with its value and meaning. Then import your functions, read the model's configuration and all
    data, and check that this machine is large enough, as a run does before it starts. Weights are not loaded.
    """
    from areal_lite.launch.run.recipe_check import check_recipe

    config = load_any_config(recipe, overrides)
    print(*explained_section(config), sep="\n", flush=True)
    check_recipe(config)
    memory = memory_here(config)
    size = f"{config.samples_per_step} samples" if config.command == "train" else f"{config.trainer.batch_size} rows"
    command = COMMANDS[config.command]
    print(f"# {recipe} is fine for areal-lite {command}: {size} per step, device {config.run.device}")
    for line in memory:
        print(f"# {line}")
    return 0


def explained_section(section: BaseModel, indent: str = "") -> Iterable[str]:
    """Render a section as YAML with a comment on each setting."""
    for name, field in type(section).model_fields.items():
        value = getattr(section, name)
        meaning = f"  # {' '.join(str(field.description).split())}"
        if isinstance(value, BaseModel):
            yield f"{indent}{name}:"
            yield from explained_section(value, indent + "  ")
        elif isinstance(value, dict) and any(isinstance(item, BaseModel) for item in value.values()):
            yield f"{indent}{name}:".ljust(44) + meaning
            # Sources, verifiers or workflows: only what they set, as there may be many.
            entries = {key: item.model_dump(exclude_unset=True) for key, item in value.items()}
            yield from (f"{indent}  {line}" for line in yaml.safe_dump(entries, sort_keys=False).splitlines())
        else:
            value = dict.fromkeys(value) if name == "env" else value  # its values may be secrets
            yield f"{indent}{name}: {_scalar(value)}".ljust(44) + meaning + _choices(field)


def _choices(field: FieldInfo) -> str:
    """Return the words that a choice allows, in brackets."""
    words = get_args(field.annotation) if get_origin(field.annotation) is Literal else ()
    return f" [{' | '.join(words)}]" if len(words) > 1 else ""


def _scalar(value: object) -> str:
    """Write a value as YAML on one line."""
    style = '"' if isinstance(value, str) and "\n" in value else None
    text = yaml.safe_dump(value, default_style=style, default_flow_style=True, width=math.inf)
    return text.removesuffix("\n").removesuffix("\n...")
