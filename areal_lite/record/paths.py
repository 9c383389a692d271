"""Makes the paths in a recipe absolute, as actors run in other folders: files, models and functions.

`Refers` of `config/section.py` marks the fields that hold files and models, in sections and in the arguments of a
verifier; a function is known by its form, path.py:function.
"""

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel

from areal_lite.config.data import is_hub_id
from areal_lite.config.offline import OfflineConfig
from areal_lite.config.plugins import arguments_model, plugin_file
from areal_lite.config.recipe import Config
from areal_lite.config.section import Refers, Section
from areal_lite.config.sections import BUILT_IN, SMOLLM2, SMOLLM2_FOLDER
from areal_lite.errors import CheckpointError, ConfigError
from areal_lite.record.checkpoints import damage, whole_checkpoints
from areal_lite.record.run_files import read_json
from areal_lite.record.run_folder import RunFolder

S = TypeVar("S", bound=Section)

EVALUATED = ("data", "rollout", "verifier", "reward_watch")
"""The sections that an evaluation reads."""


def with_absolute_paths(
    recipe: S, names: Iterable[str] | None = None, *, where: str = "", with_weights: bool = True
) -> S:
    """Return a recipe whose relative paths are resolved against the present folder.

    A run folder that stands for a model becomes the folder of that model, so that a resumed run keeps it.

    Args:
        recipe: Or a section of one.
        names: Fields to resolve; None = all.
        where: Place of the section in its recipe, with a dot, for messages.
        with_weights: As for `find_model_folder`.

    Raises:
        ConfigError: A model is missing.
    """
    return _Resolver(with_weights).section(recipe, names or type(recipe).model_fields, where)


def _marks(model: type[BaseModel]) -> dict[str, Refers]:
    fields = model.model_fields.items()
    return {name: mark for name, field in fields for mark in field.metadata if isinstance(mark, Refers)}


@dataclass(frozen=True)
class _Resolver:
    with_weights: bool

    def section(self, section: S, names: Iterable[str], where: str) -> S:
        marks = _marks(type(section))
        resolved = {name: self._value(getattr(section, name), marks.get(name), section, where + name) for name in names}
        return section.model_copy(update=resolved)

    def _value(self, value: Any, mark: Refers | None, section: Any, where: str) -> Any:
        if isinstance(value, Section):
            return self.section(value, type(value).model_fields, f"{where}.")
        if mark is Refers.NOTHING:
            return value
        if mark is Refers.ARGUMENTS:
            return self._arguments(value, section.function, where)
        if isinstance(value, dict):
            return {
                self._value(key, None, None, ""): self._value(one, None, None, f"{where}.{key}")
                for key, one in value.items()
            }
        if isinstance(value, list):
            return [self._value(one, None, None, where) for one in value]
        if not isinstance(value, str):
            return value
        if mark is Refers.MODEL:
            is_built_in = value == BUILT_IN
            return value if is_built_in else str(find_model_folder(value, option=where, with_weights=self.with_weights))
        if mark is Refers.FILE and not (getattr(section, "source", "") == "dataset" and is_hub_id(value)):
            return str(Path(os.path.expanduser(value)).resolve())  # `~no-such-user` stays as it is, and is missing
        path = plugin_file(value)
        return f"{Path(path).resolve()}{value.removeprefix(path)}" if path else value

    def _arguments(self, arguments: dict[str, Any], function: Any, where: str) -> dict[str, Any]:
        """Resolve what the function's model marks; of a function without one, `model` where that is a path."""
        model = arguments_model(function, kind="verifier") if isinstance(function, str) else None
        place = arguments.get("model")
        is_path = isinstance(place, str) and os.path.exists(os.path.expanduser(place))
        marks = _marks(model) if model else {"model": Refers.FILE} if is_path else {}
        return {name: self._value(one, marks.get(name), None, f"{where}.{name}") for name, one in arguments.items()}


def find_model_folder(path: str | Path, *, option: str, with_weights: bool = True) -> Path:
    """Return the absolute path of a model's folder.

    Args:
        path: A Hugging Face model folder, or the folder of a run that has ended: its newest checkpoint's model; or an
            id of the hub, `owner/name`, whose files are downloaded into its cache; or `builtin:smollm2-135m`.
        option: Where the path was given, for messages.
        with_weights: Also download weights from the hub, and compare those of a run with what was saved, which reads
            them all.

    Raises:
        ConfigError: It is none of these, the run has no model yet, or its model is damaged.
    """
    folder = Path(path).expanduser().resolve()
    if str(path) == SMOLLM2:
        folder = SMOLLM2_FOLDER.resolve()
        if not folder.is_dir():
            raise ConfigError(
                f"{option} was not found: expected {path} in {folder}, got nothing. Fix: run `areal-lite model "
                "smollm2-135m` here"
            )
    if is_hub_id(str(path)) and str(path).count("/") == 1 and ":" not in str(path):
        folder = _from_hub(str(path), option=option, with_weights=with_weights)
    if (folder / "checkpoints").is_dir():
        folder = _model_of_run(folder, option=option)
    if not (folder / "config.json").is_file():
        raise ConfigError(
            f"{option} must be a Hugging Face model folder, or the folder of a run that has ended, got {path}, which "
            "has no config.json. Fix: name the folder with config.json and the weights"
        )
    checkpoint = folder.parent
    of_a_run = folder.name == "model" and checkpoint in whole_checkpoints(checkpoint.parent).values()
    if with_weights and of_a_run and (problem := damage(checkpoint, "model/")):
        raise ConfigError(
            f"{option} must be an undamaged model, got {folder}: {problem}. Fix: name another, or copy the folder "
            "elsewhere to use it as it is"
        )
    return folder


_SINKS = "copies attention sinks past its weight loaders, so that a reload keeps the old ones"
_STATES = "loses parameters of state-space layers in a reload"
_RELOADED_WRONGLY = dict.fromkeys(("gpt_oss", "mimo_v2_flash", "deepseek_v4", "deepseek_v41", "hy_v4"), _SINKS)
_RELOADED_WRONGLY |= dict.fromkeys(
    ("bamba", "falcon_h1", "falcon_mamba", "granitemoehybrid", "jamba", "mamba", "mamba2", "nemotron_h", "zamba2"),
    _STATES,
)
_RELOADED_WRONGLY |= dict.fromkeys(("step3_text", "step3p5"), "copies projections past its weight loaders")
"""How vLLM damages reloaded weights, by model type: from its source (0.32) and its issues 48312 and 48284."""


def check_model(config: Config | OfflineConfig, model_folder: Path) -> None:
    """Compare a recipe with the model that it trains.

    Raises:
        ConfigError: The recipe wants a longer context than the model was made for, or a run's engines cannot take new
            weights of such a model.
    """
    problems: list[str] = []
    settings = read_json(model_folder / "config.json", problems)
    if problems:
        raise ConfigError(f"model.path={model_folder} must be a model: {problems[0]}. Fix: restore it")
    kind, longest = settings.get("model_type"), settings.get("max_position_embeddings", settings.get("n_positions"))
    if isinstance(config, Config) and kind in _RELOADED_WRONGLY:
        raise ConfigError(
            f"model.path={model_folder} is a {kind} model, of which vLLM {_RELOADED_WRONGLY[kind]}: its engines would "
            "generate with wrong weights after the first step. Fix: take a model of another family (docs/models.md)"
        )
    if longest is not None and config.model.max_context > longest:
        raise ConfigError(
            f"model.max_context must be at most what {model_folder} was made for, {longest}, got "
            f"{config.model.max_context}: lower it"
        )


def _from_hub(name: str, *, option: str, with_weights: bool) -> Path:
    from huggingface_hub import snapshot_download

    patterns = ["*.json", "*.model", "*.txt", "*.jinja"]
    if with_weights:
        patterns.append("*.safetensors")
    try:
        return Path(snapshot_download(name, allow_patterns=patterns))
    except Exception as error:  # connection errors of several libraries, and the library's own
        raise ConfigError(
            f"{option}={name} is no folder, and cannot be downloaded from the hub ({type(error).__name__}). Fix: "
            f"correct it; or run `hf download {name} --local-dir DIR` on another machine, copy DIR here, and name DIR"
        ) from error


def _model_of_run(folder: Path, *, option: str) -> Path:
    try:
        checkpoint = RunFolder(folder).newest_checkpoint()
    except CheckpointError as error:
        raise ConfigError(f"{option}={folder} is a run without a model: {error}") from error
    if not (checkpoint / "model" / "config.json").is_file():
        raise ConfigError(
            f"{option}={folder} must be a run that has ended, got one whose newest checkpoint, {checkpoint.name}, "
            "holds no model. Fix: wait until it ends, or resume it"
        )
    return checkpoint / "model"
