"""The library's own handle: load a recipe, run it, read its results. What the command line does, for programs.

    import areal_lite

    recipe = areal_lite.load_recipe("arith_cpu", {"run.steps": 20, "verifier.function": my_verifier})
    run = areal_lite.run(recipe, on_step=lambda row: print(row["step"], row["reward_mean"]))
    print(run.summary["reward_last"], run.model)

Everything heavy is imported inside the functions, so that `import areal_lite` stays light.
"""

import hashlib
import io
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from areal_lite.errors import ConfigError

if TYPE_CHECKING:
    from areal_lite.config.offline import OfflineConfig
    from areal_lite.config.recipe import Config

OnStep: TypeAlias = Callable[[Mapping[str, Any]], object]
"""Gets each trainer step's row (the keys of `metrics.jsonl`); returning False ends the run, saved."""

_CACHE = Path(".cache") / "areal-lite"


def load_recipe(
    recipe: str | Path | Mapping[str, Any], overrides: Mapping[str, Any] | None = None
) -> "Config | OfflineConfig":
    """Load and check a recipe of any command: train, sft, reward-model or dpo.

    Args:
        recipe: A shipped recipe's name, a YAML file, or the same content as nested mappings.
        overrides: Values by `section.field`. Where a setting names a function (a verifier, a workflow, a loss, an
            advantage), the value may be the function itself, also one defined in a notebook. In place of a path
            of data, it may be the rows: a list of mappings, for `data.source: jsonl`.

    Raises:
        ConfigError: With one line per problem.
    """
    from areal_lite.config.offline import parse_any_config
    from areal_lite.config.reading import read_recipe, set_value

    if not isinstance(recipe, str | Path | Mapping):
        raise ConfigError(
            f"recipe was not loaded: expected a name, a path or a mapping, got {type(recipe).__name__}. Fix: give the "
            "name, or the loaded recipe's model_dump()"
        )
    if not isinstance(overrides, Mapping | None):
        raise ConfigError(
            f"overrides were not read: expected a mapping, got {type(overrides).__name__}. Fix: write "
            '{"run.steps": 20} for the command line\'s run.steps=20'
        )
    raw = _with_names(recipe if isinstance(recipe, Mapping) else read_recipe(str(recipe), command=None))
    for key, value in (overrides or {}).items():
        set_value(raw, key, _with_names(value, key))
    return parse_any_config(raw)


def _with_names(value: Any, key: str = "") -> Any:
    """Copy the value of a setting with functions replaced by names, and rows by files, that workers find them under."""
    from areal_lite.config.plugins import reference_to

    if isinstance(value, Mapping):
        return {_with_names(name): _with_names(item, str(name)) for name, item in value.items()}
    if key.rpartition(".")[2] in ("path", "eval_path") and isinstance(value, list | tuple):
        return _write_rows(value, key)
    if isinstance(value, list | tuple):
        return [_with_names(item) for item in value]
    return reference_to(value, _CACHE / "functions") if callable(value) else value


def _write_rows(rows: Sequence[Any], key: str) -> str:
    """Write rows to a JSONL file that is named by its content, and return its absolute path."""
    try:
        if not rows or not all(isinstance(row, Mapping) for row in rows):
            raise TypeError("not one mapping for each row")
        text = "".join(json.dumps(dict(row), allow_nan=False) + "\n" for row in rows)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"{key}: the rows were not written: expected mappings of what JSON can hold, got {error}. Fix: convert "
            "their values, or give the path of a file"
        ) from error
    path = _CACHE.resolve() / "rows" / f"{hashlib.sha256(text.encode()).hexdigest()[:16]}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return str(path)


def run(
    recipe: "Config | OfflineConfig | str | Path | Mapping[str, Any]",
    overrides: Mapping[str, Any] | None = None,
    *,
    on_step: OnStep | None = None,
    quiet: bool = False,
) -> "Run":
    """Run a recipe to its end, on this machine or on the Ray cluster that RAY_ADDRESS names; blocks until then.

    Works inside a running event loop (a notebook), and in a thread, which no signal reaches. Ctrl-C, or a callback
    that returns False, finishes the step, saves and returns; `run.summary["status"]` is then "interrupted", and
    `{"run.resume": run.path}` resumes it.

    Args:
        recipe: What `load_recipe` returned, or what it takes.
        overrides: As for `load_recipe`; only for a recipe that is not loaded yet.
        on_step: Called after every trainer step; what it raises ends the run, saved, and is raised here.
        quiet: Print nothing.

    Raises:
        ArealLiteError: What ended the run, with a fix; a completed step is saved.
    """
    from pydantic import BaseModel
    from rich.console import Console

    from areal_lite.launch.run.controller import Interrupted
    from areal_lite.launch.run.train import train

    if isinstance(recipe, BaseModel):
        if overrides:
            raise ConfigError(
                "overrides must be given to load_recipe, got them beside a loaded recipe: load it with them"
            )
        config = recipe
    else:
        config = load_recipe(recipe, overrides)
    name = Path(recipe).stem if isinstance(recipe, str | Path) else config.command.replace("_", "-")
    # In a notebook, rich shows what it prints in the cell, whatever the file.
    console = Console(file=io.StringIO(), force_jupyter=False) if quiet else Console()
    try:
        summary = train(config, recipe_name=name, console=console, on_step=on_step, named=overrides or ())
    except Interrupted as stop:
        return Run(Path(str(stop)).resolve())
    return Run(Path(summary["folder"]).resolve())


def open_run(folder: str | Path) -> "Run":
    """Open the folder of a run: finished, stopped or active.

    Raises:
        ConfigError: It holds no run.
    """
    path = Path(folder)
    if not (path / "config.json").is_file():
        raise ConfigError(
            f"a run folder holds a config.json, got {folder}, which has none: give the folder a run printed"
        )
    return Run(path.resolve())


@dataclass(frozen=True, slots=True)
class Run:
    """What a run left in its folder, read when asked for.

    The files are described in docs/runs.md; this class adds no state of its own.
    """

    path: Path
    """Absolute."""

    @property
    def config(self) -> dict[str, Any]:
        """Every setting, resolved; a `ConfigError` if the file is damaged."""
        from areal_lite.record.run_files import read_json

        problems: list[str] = []
        content = read_json(self.path / "config.json", problems)
        if problems:
            raise ConfigError(f"{self.path}: {problems[0]}. Fix: restore the file")
        return content

    @property
    def summary(self) -> dict[str, Any]:
        """Final figures; empty while the run is active."""
        from areal_lite.record.run_files import read_summary

        return read_summary(self.path)

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """One row per trainer step (`pandas.DataFrame(run.metrics)` makes a table)."""
        return self._rows("metrics.jsonl")

    @property
    def samples(self) -> list[dict[str, Any]]:
        """Some groups of every batch, readable: prompt, texts, rewards, versions."""
        return self._rows("samples.jsonl")

    @property
    def checkpoints(self) -> list[Path]:
        """Resumable states, oldest first."""
        from areal_lite.record.checkpoints import whole_checkpoints

        return list(whole_checkpoints(self.path / "checkpoints").values())

    @property
    def model(self) -> Path | None:
        """The newest exported model, a Hugging Face folder; None before there is one."""
        models = [path / "model" for path in self.checkpoints if (path / "model").is_dir()]
        return models[-1] if models else None

    def _rows(self, name: str) -> list[dict[str, Any]]:
        from areal_lite.record.run_files import read_rows

        return read_rows(self.path / name)[0]
