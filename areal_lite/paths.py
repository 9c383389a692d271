"""Files that a recipe names: actors run in other folders, so their paths are made absolute before anything starts."""

from pathlib import Path
from typing import TypeVar

from areal_lite.config import Config
from areal_lite.errors import ConfigError
from areal_lite.model_folder import find_model_folder
from areal_lite.sections import Section, VerifierConfig

__all__ = ["with_absolute_paths"]

S = TypeVar("S", bound=Section)

REWARD_MODEL = "areal_lite.verify.reward_model:reward_model"
"""The verifier that `areal-lite reward-model` makes models for."""


def with_absolute_paths(config: Config) -> Config:
    """Return the recipe with every relative path of data, models and verifier taken from the present folder.

    A run folder that stands for a model becomes that of the model, so that a resumed run finds the same one.

    Raises:
        ConfigError: A model is missing.
    """
    changed = {
        "data": _resolved(config.data, "path", "eval_path"),
        "objective": _with_model(_resolved(config.objective, "ptx_path"), "reference_path", name="objective"),
        "critic": _with_model(config.critic, "path", name="critic"),
        "verifier": _resolved_arguments(_resolved_functions(config.verifier)),
    }
    return config.model_copy(update=changed)


def _resolved(section: S, *fields: str) -> S:
    paths = {name: getattr(section, name) for name in fields}
    return section.model_copy(update={name: str(Path(path).resolve()) for name, path in paths.items() if path})


def _with_model(section: S, field: str, *, name: str) -> S:
    path = getattr(section, field)
    if path is None:
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
