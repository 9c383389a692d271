"""Files that a recipe names: actors run in other folders, so their paths are made absolute before anything starts."""

from pathlib import Path
from typing import TypeVar

from areal_lite.config import Config
from areal_lite.errors import ConfigError
from areal_lite.model_folder import find_model_folder
from areal_lite.offline_config import OfflineConfig
from areal_lite.sections import Section, VerifierConfig

__all__ = ["with_absolute_eval_paths", "with_absolute_paths"]

Recipe = TypeVar("Recipe", Config, OfflineConfig)
S = TypeVar("S", bound=Section)

BUILTIN = "builtin:"
"""How `model.path` begins where it names no folder."""

REWARD_MODEL = "areal_lite.verify.reward_model:reward_model"
"""The verifier that `areal-lite reward-model` makes models for."""


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
    """Return a recipe with what an evaluation reads of it, data and verifier, taken from the present folder.

    Raises:
        ConfigError: The verifier's model is missing.
    """
    changed = {
        "data": _resolved(config.data, "path", "eval_path"),
        "verifier": _resolved_arguments(_resolved_functions(config.verifier)),
    }
    return config.model_copy(update=changed)


def _resolved(section: S, *fields: str) -> S:
    paths = {name: getattr(section, name) for name in fields}
    return section.model_copy(update={name: str(Path(path).resolve()) for name, path in paths.items() if path})


def _with_model(section: S, field: str, *, name: str) -> S:
    path = getattr(section, field)
    if path is None or path.startswith(BUILTIN):
        return section
    return section.model_copy(update={field: str(find_model_folder(path, option=f"{name}.{field}"))})


def _resolved_arguments(verifier: VerifierConfig) -> VerifierConfig:
    """Resolve the argument `model`: of the learned reward, and of a user's own verifier where it names a path."""
    model = verifier.arguments.get("model")
    if verifier.function == REWARD_MODEL:
        if not isinstance(model, str):
            raise ConfigError(f"{REWARD_MODEL} needs verifier.arguments: {{model: folder}}, got {verifier.arguments}")
        model = str(find_model_folder(model, option="verifier.arguments.model"))
    elif isinstance(model, str) and Path(model).expanduser().exists():
        model = str(Path(model).expanduser().resolve())
    else:
        return verifier
    return verifier.model_copy(update={"arguments": verifier.arguments | {"model": model}})


def _resolved_functions(verifier: VerifierConfig) -> VerifierConfig:
    names = {name: getattr(verifier, name) for name in ("function", "eval_function")}
    return verifier.model_copy(update={name: _resolved_function(value) for name, value in names.items() if value})


def _resolved_function(name: str) -> str:
    path, colon, function = name.rpartition(":")
    return f"{Path(path).resolve()}{colon}{function}" if path.endswith(".py") else name
