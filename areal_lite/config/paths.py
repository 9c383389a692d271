"""Files that a recipe names: actors run in other folders, so their paths are made absolute before anything starts."""

from pathlib import Path
from typing import Any, TypeVar

from areal_lite.config.offline import OfflineConfig
from areal_lite.config.recipe import Config
from areal_lite.config.sections import (
    DataConfig,
    RolloutConfig,
    Section,
    SourceConfig,
    VerifierConfig,
    VerifierSettings,
)
from areal_lite.data.rows import is_hub_id
from areal_lite.errors import ConfigError
from areal_lite.record.model_folder import find_model_folder

__all__ = ["with_absolute_eval_paths", "with_absolute_paths"]

Recipe = TypeVar("Recipe", Config, OfflineConfig)
S = TypeVar("S", bound=Section)
Source = TypeVar("Source", bound=SourceConfig)
Settings = TypeVar("Settings", bound=VerifierSettings)

BUILTIN = "builtin:"
"""How `model.path` begins where it names no folder."""

REWARD_MODEL = "reward_model"
"""The verifier that `areal-lite reward-model` makes models for."""

JUDGE = "judge"
"""The verifier whose model is known to a server by its name, which may look like a path."""


def with_absolute_paths(config: Recipe) -> Recipe:
    """Return a recipe with every relative path of data, models and verifier taken from the present folder.

    A run folder that stands for a model becomes that of the model, so that a resumed run starts from, and is held
    near, the same one.

    Raises:
        ConfigError: A model is missing.
    """
    changed: dict[str, Section] = {"model": _with_model(config.model, "path", name="model")}
    if isinstance(config, OfflineConfig):
        changed["data"] = _resolved(config.data, "path", "eval_path")
        changed["preference"] = _with_model(config.preference, "reference_path", name="preference")
        return config.model_copy(update=changed)
    objective = _resolved(config.objective, "ptx_path")
    changed["objective"] = _with_model(objective, "reference_path", name="objective")
    changed["critic"] = _with_model(config.critic, "path", name="critic")
    return with_absolute_eval_paths(config).model_copy(update=changed)


def with_absolute_eval_paths(config: Config) -> Config:
    """Return a recipe with what an evaluation reads of it (data, workflows, verifier) taken from the present folder.

    Raises:
        ConfigError: The verifier's model is missing.
    """
    changed = {
        "data": _resolved_data(config.data),
        "rollout": _resolved_workflows(config.rollout),
        "verifier": _resolved_verifier(config.verifier),
    }
    return config.model_copy(update=changed)


def _resolved(section: S, *fields: str) -> S:
    paths = {name: getattr(section, name) for name in fields}
    return section.model_copy(update={name: str(Path(path).resolve()) for name, path in paths.items() if path})


def _resolved_data(data: DataConfig) -> DataConfig:
    mix = {name: _resolved_source(source) for name, source in data.mix.items()}
    return _resolved_source(data).model_copy(update={"mix": mix})


def _resolved_source(source: Source) -> Source:
    fields = ("path", "eval_path")
    from_hub = [name for name in fields if source.source == "dataset" and is_hub_id(getattr(source, name) or "")]
    resolved = _resolved(source, *(name for name in fields if name not in from_hub))
    return resolved.model_copy(update={"source": _resolved_function(source.source)})


def _with_model(section: S, field: str, *, name: str) -> S:
    path = getattr(section, field)
    if path is None or path.startswith(BUILTIN):
        return section
    return section.model_copy(update={field: str(find_model_folder(path, option=f"{name}.{field}"))})


def _resolved_verifier(verifier: VerifierConfig) -> VerifierConfig:
    named = {name: _resolved_settings(one, f"verifier.named.{name}") for name, one in verifier.named.items()}
    held_out = verifier.eval_function and _resolved_function(verifier.eval_function)
    changed = {"named": named, "eval_function": held_out}
    return _resolved_settings(verifier, "verifier").model_copy(update=changed)


def _resolved_settings(settings: Settings, where: str) -> Settings:
    function: Any = settings.function
    resolved: Any = (
        {_resolved_function(name): weight for name, weight in function.items()}
        if isinstance(function, dict)
        else _resolved_function(function)
    )
    return settings.model_copy(update={"function": resolved, "arguments": _resolved_arguments(settings, where)})


def _resolved_arguments(settings: VerifierSettings, where: str) -> dict[str, Any]:
    """Resolve `function`; and `model`, of the learned reward, and of a user's own verifier where it names a path."""
    arguments = dict(settings.arguments)
    if isinstance(function := arguments.get("function"), str):
        arguments["function"] = _resolved_function(function)
    model = arguments.get("model")
    if settings.function == REWARD_MODEL:
        if not isinstance(model, str):
            raise ConfigError(f"{REWARD_MODEL} needs {where}.arguments: {{model: folder}}, got {settings.arguments}")
        model = str(find_model_folder(model, option=f"{where}.arguments.model"))
    elif settings.function != JUDGE and isinstance(model, str) and Path(model).expanduser().exists():
        model = str(Path(model).expanduser().resolve())
    else:
        return arguments
    return arguments | {"model": model}


def _resolved_workflows(rollout: RolloutConfig) -> RolloutConfig:
    named = {
        name: one.model_copy(
            update={"function": _resolved_function(one.function), "arguments": _resolved_names(one.arguments)}
        )
        for name, one in rollout.workflows.items()
    }
    changed = {
        "workflow": _resolved_function(rollout.workflow),
        "workflow_arguments": _resolved_names(rollout.workflow_arguments),
        "workflows": named,
    }
    return rollout.model_copy(update=changed)


def _resolved_names(arguments: dict[str, Any]) -> dict[str, Any]:
    """Resolve the functions that arguments name: an environment's `step: game.py:step`, or a list of tools."""

    def resolved(value: Any) -> Any:
        if isinstance(value, list):
            return [resolved(item) for item in value]
        return _resolved_function(value) if isinstance(value, str) else value

    return {key: resolved(value) for key, value in arguments.items()}


def _resolved_function(name: str) -> str:
    path, colon, function = name.rpartition(":")
    return f"{Path(path).resolve()}{colon}{function}" if path.endswith(".py") else name
