"""The recipe: typed, checked, and complete before anything starts.

A recipe is a YAML file with the sections below. `load_config` reads one, applies `section.field=value`
overrides and returns a frozen `Config`; every mistake is one `ConfigError` that names field, value and
remedy. `resource_problems` holds the checks that need to know the machine. Recipes of other commands
(`offline_config.py`) are read by the same functions: `read_recipe` and `parse_section`.
"""

import difflib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, Self, TypeVar, get_args, get_origin

import yaml
from pydantic import BaseModel, ValidationError, model_validator

from areal_lite.config.combinations import combination_problems
from areal_lite.config.presets import ObjectiveConfig, expand_preset
from areal_lite.config.sections import (
    COMMANDS,
    CriticConfig,
    DataConfig,
    ModelConfig,
    QueueConfig,
    RolloutConfig,
    RunConfig,
    Section,
    TrainerConfig,
    VerifierConfig,
    WeightsConfig,
)
from areal_lite.errors import ConfigError

__all__ = [
    "Config",
    "load_config",
    "parse_config",
    "parse_override",
    "parse_section",
    "read_recipe",
    "read_yaml",
    "recipe_folder",
    "resource_problems",
    "set_value",
    "shipped_recipes",
    "suggestion",
]

Recipe = TypeVar("Recipe", bound=Section)


class Config(Section):
    """A whole recipe of `areal-lite train`."""

    command: Literal["train"] = "train"
    """what the recipe is for"""
    run: RunConfig = RunConfig()
    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    rollout: RolloutConfig = RolloutConfig()
    queue: QueueConfig = QueueConfig()
    verifier: VerifierConfig = VerifierConfig()
    objective: ObjectiveConfig = ObjectiveConfig()
    critic: CriticConfig = CriticConfig()
    trainer: TrainerConfig = TrainerConfig()
    weights: WeightsConfig = WeightsConfig()

    @model_validator(mode="before")
    @classmethod
    def _expand_preset(cls, raw: Any) -> Any:
        return expand_preset(raw)

    @property
    def samples_per_step(self) -> int:
        """B, samples of one trainer step."""
        return self.queue.groups_per_step * self.queue.samples_per_group

    @property
    def compute_dtype(self) -> str:
        """The dtype behind `auto`."""
        if self.model.compute_dtype != "auto":
            return self.model.compute_dtype
        return "float32" if self.run.device == "cpu" else "bfloat16"

    @model_validator(mode="after")
    def _check_combinations(self) -> Self:
        problems = list(combination_problems(self))
        if problems:
            raise ValueError("\n".join(problems))
        return self


def resource_problems(config: Config, *, num_cores: int, num_gpus: int) -> tuple[list[str], list[str]]:
    """Compare a recipe with what the machine or cluster has.

    Args:
        config: The recipe.
        num_cores: CPU cores.
        num_gpus: GPUs.

    Returns:
        Errors (nothing may start) and warnings (it will be slow), one sentence each.
    """
    errors, warnings = [], []
    if config.run.device == "cuda":
        shared = config.weights.transport == "ipc"
        rollout_gpus = config.rollout.workers * config.rollout.tensor_parallel
        needed = max(rollout_gpus, config.trainer.ranks) if shared else rollout_gpus + config.trainer.ranks
        if needed > num_gpus:
            errors.append(
                f"the recipe needs {needed} GPUs (rollout.workers {config.rollout.workers} x rollout.tensor_parallel "
                f"{config.rollout.tensor_parallel}, trainer.ranks {config.trainer.ranks}), got {num_gpus}: lower them, "
                "or join more nodes to the Ray cluster"
            )
    elif config.trainer.ranks > num_cores:
        warnings.append(
            f"trainer.ranks={config.trainer.ranks} on {num_cores} CPU cores: ranks will wait for each other; "
            f"set trainer.ranks={num_cores} or fewer"
        )
    return errors, warnings


def recipe_folder() -> Path:
    """Folder of the shipped recipes."""
    return Path(__file__).parents[1] / "launch" / "recipes"


def shipped_recipes() -> list[str]:
    """Names of the shipped recipes."""
    return sorted(path.stem for path in recipe_folder().glob("*.yaml"))


def load_config(recipe: str, overrides: Iterable[str] = ()) -> Config:
    """Read a recipe and apply overrides.

    Args:
        recipe: Path of a YAML file, or the name of a shipped recipe.
        overrides: `section.field=value` words; the value is read as YAML.

    Raises:
        ConfigError: The file is missing or unreadable, a key is unknown, a value or combination impossible.
    """
    return parse_config(read_recipe(recipe, overrides, command="train"))


def read_recipe(recipe: str, overrides: Iterable[str] = (), *, command: str | None) -> dict[str, Any]:
    """Read a recipe's sections and apply overrides, unchecked.

    Args:
        recipe: Path of a YAML file, or the name of a shipped recipe.
        overrides: `section.field=value` words; the value is read as YAML.
        command: What the recipe must be for, a key of `COMMANDS`; None = anything.

    Raises:
        ConfigError: The file is missing or unreadable, holds no sections, or is for another command or an unknown one.
    """
    path = Path(recipe)
    if not path.is_file():
        path = recipe_folder() / f"{recipe}.yaml"
    if not path.is_file():
        raise ConfigError(
            f"a recipe is a YAML file or one of {', '.join(shipped_recipes())}; there is no {recipe!r}"
            + suggestion(recipe, shipped_recipes())
        )
    raw = read_yaml(path, holding="sections (run, model, data, ...)")
    for word in overrides:
        set_value(raw, *parse_override(word))
    meant = str(raw.setdefault("command", "train")).replace("-", "_")
    if meant not in COMMANDS:
        raise ConfigError(f"command must be one of {', '.join(COMMANDS)}, got {raw['command']!r} in {recipe}")
    if command is not None and meant != command:
        raise ConfigError(f"{recipe} is a recipe of areal-lite {COMMANDS[meant]}: run it with that")
    return raw | {"command": meant}


def read_yaml(path: Path, *, holding: str) -> dict[str, Any]:
    """Read a YAML file that is a mapping; `holding` says of what.

    Raises:
        ConfigError: It is unreadable, or holds something else.
    """
    try:
        raw = yaml.safe_load(path.read_text()) or {}
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"{path} is not readable as YAML: {error}") from error
    if not isinstance(raw, dict):
        raise ConfigError(f"{path} must hold {holding}, got a {type(raw).__name__}")
    return raw


def parse_config(raw: Mapping[str, Any]) -> Config:
    """Turn a nested mapping into a checked `Config`.

    Raises:
        ConfigError: With one line per problem.
    """
    return parse_section(raw, Config)


def parse_section(raw: Mapping[str, Any], kind: type[Recipe]) -> Recipe:
    """Turn a nested mapping into a checked recipe of any kind.

    Raises:
        ConfigError: With one line per problem.
    """
    unknown = list(_unknown_keys(raw, kind, known=_all_keys(kind)))
    if unknown:
        raise ConfigError("\n".join(unknown))
    try:
        return kind.model_validate(raw)
    except ValidationError as error:
        raise ConfigError("\n".join(_explain(item) for item in error.errors())) from None


def _explain(item: Any) -> str:
    field = ".".join(str(part) for part in item["loc"])
    if item["type"] == "value_error":
        return str(item["ctx"]["error"])
    return f"{field}: {item['msg'][0].lower()}{item['msg'][1:]}, got {item['input']!r}"


def parse_override(word: str) -> tuple[str, Any]:
    """Split `section.field=value`; the value is read as YAML.

    Raises:
        ConfigError: It is no such word.
    """
    key, equals, text = word.partition("=")
    if not equals or not key:
        raise ConfigError(f"an override is section.field=value, got {word!r}")
    try:
        return key, yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"the value of {key} must be YAML, got {text!r}: write it as '{key}=\"...\"'") from error


def set_value(raw: dict[str, Any], key: str, value: Any) -> None:
    """Set `section.field` of an unchecked recipe.

    Raises:
        ConfigError: The key reaches into a value.
    """
    *parents, last = key.split(".")
    node = raw
    for parent in parents:
        if node.get(parent) is None:
            node[parent] = {}
        child = node[parent]
        if not isinstance(child, dict):
            raise ConfigError(f"'{key}={value}' reaches into {parent!r}, which is a value, not a section")
        node = child
    node[last] = value


def _unknown_keys(
    raw: Mapping[str, Any], section: type[BaseModel], *, known: list[str], prefix: str = ""
) -> Iterable[str]:
    for key, value in raw.items():
        field = section.model_fields.get(str(key))
        if field is None:
            yield f"unknown key {prefix}{key}" + suggestion(f"{prefix}{key}", known)
            continue
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel) and isinstance(value, Mapping):
            yield from _unknown_keys(value, kind, known=known, prefix=f"{prefix}{key}.")
        elif (entry := _entry_kind(kind)) is not None and isinstance(value, Mapping):
            for name, item in value.items():
                where = f"{prefix}{key}.{name}."
                if isinstance(item, Mapping):
                    yield from _unknown_keys(item, entry, known=_all_keys(entry, where), prefix=where)


def _entry_kind(kind: Any) -> type[BaseModel] | None:
    """Return the section behind `dict[str, section]`: settings that the recipe's user has given names."""
    values = get_args(kind)[1:] if get_origin(kind) is dict else ()
    return next((item for item in values if isinstance(item, type) and issubclass(item, BaseModel)), None)


def _all_keys(section: type[BaseModel], prefix: str = "") -> list[str]:
    keys = []
    for name, field in section.model_fields.items():
        keys.append(f"{prefix}{name}")
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            keys += _all_keys(field.annotation, f"{prefix}{name}.")
    return keys


def suggestion(word: str, known: list[str]) -> str:
    """Return a question about the nearest known word, or nothing."""
    near = difflib.get_close_matches(word, known, n=1, cutoff=0.4)
    return f"; did you mean {near[0]}?" if near else ""
