"""The command `areal-lite check-config`: a recipe checked, and printed in full."""

import math
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Literal, get_args, get_origin

import yaml

from areal_lite.config.offline import OfflineConfig, load_any_config, names_layers
from areal_lite.config.recipe import Config
from areal_lite.config.sections import COMMANDS
from areal_lite.errors import ConfigError
from areal_lite.launch.commands.options import Overrides, Recipe

if TYPE_CHECKING:
    from pydantic import BaseModel
    from pydantic.fields import FieldInfo


def check_config(recipe: Recipe, overrides: Overrides) -> int:
    """Check a recipe and print it in full.

    Every setting is shown with its value and meaning. Functions of yours are imported, the settings and the files of a
    model and the first rows of data files that are here are looked at; nothing else is started.
    """
    from areal_lite.config.plugin_check import check_plugins
    from areal_lite.rollout.vllm_engine import check_engine_arguments

    config = load_any_config(recipe, overrides)
    if isinstance(config, Config):
        check_plugins(config)
        check_engine_arguments(config)
    notes = list(_look_around(config))
    print(*explained_section(config), sep="\n")
    size = (
        f"{config.batch.batch_size} rows" if isinstance(config, OfflineConfig) else f"{config.samples_per_step} samples"
    )
    command = COMMANDS[config.command]
    print(
        "; ".join([f"# {recipe} is fine for areal-lite {command}: {size} per step, device {config.run.device}", *notes])
        + " (weights, and rows behind the first 100 of a file, are looked at when it starts)"
    )
    return 0


def _look_around(config: Config | OfflineConfig) -> Iterable[str]:
    """Look at the machine, a model's settings, files and layers to adapt, and first rows; yield what is absent.

    The built-in model has to be shown worked tasks; where there are none, a note says so, as another may be meant.
    """
    from areal_lite.data.demonstrations import demonstrations
    from areal_lite.data.encode import check_tokenizer_files
    from areal_lite.data.sources import look_at_files
    from areal_lite.node import check_memory
    from areal_lite.record.paths import check_model, find_model_folder
    from areal_lite.record.trackers import check_trackers

    try:
        check_trackers(config.run.trackers)
        check_memory(config.caches_mb if isinstance(config, Config) else 0)
    except ConfigError as error:  # the run may be meant for another
        yield f"but not on this machine: {error}"
    path, folder = config.model.path, None
    if is_built_in := path.startswith("builtin:"):
        try:
            demonstrations(config, count=1)
        except ConfigError as error:
            yield f"but not as it stands: {error}"
    elif Path(path).expanduser().exists():
        folder = find_model_folder(path, option="model.path", is_compared=False)
        check_model(config, folder)
        check_tokenizer_files(folder)
    else:
        yield f"there is no model.path={path} here"
    if names_layers(config):
        from areal_lite.train.routes import check_layers

        if folder or is_built_in:
            check_layers(config, folder)
    if isinstance(config, Config):
        for name, source in config.data.sources.items():
            yield from look_at_files(source, where=config.data.place_of(name))
    elif config.data.path is not None:
        yield f"data.path={config.data.path} is not looked into"


def explained_section(section: "BaseModel", indent: str = "") -> Iterable[str]:
    """Render a section as YAML with each field's meaning behind it."""
    from pydantic import BaseModel

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
            yield f"{indent}{name}: {_scalar(value)}".ljust(44) + meaning + _choices(field)


def _choices(field: "FieldInfo") -> str:
    """Return the words that a choice allows, in brackets."""
    words = get_args(field.annotation) if get_origin(field.annotation) is Literal else ()
    return f" [{' | '.join(words)}]" if len(words) > 1 else ""


def _scalar(value: object) -> str:
    """Write a value as YAML on one line."""
    style = '"' if isinstance(value, str) and "\n" in value else None
    text = yaml.safe_dump(value, default_style=style, default_flow_style=True, width=math.inf)
    return text.removesuffix("\n").removesuffix("\n...")
