"""Does a command fit a cluster? Recipe against profile, before anything is asked of anybody."""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from areal_lite.config.offline import OfflineConfig, check_resources, load_any_config
from areal_lite.config.reading import read_recipe, recipe_folder
from areal_lite.config.recipe import Config
from areal_lite.config.sections import COMMANDS
from areal_lite.errors import ConfigError
from areal_lite.launch.clusters.job import Job

_TYPED = (*COMMANDS.values(), "eval", "bench modes")


def recipe_of(words: list[str]) -> tuple[str, str, list[str]]:
    """Split what one types into the command, its recipe, and the overrides.

    Raises:
        ConfigError: It is no command that a cluster runs, or names no recipe.
    """
    length = 2 if words[0] == "bench" else 1
    command, rest = " ".join(words[:length]), words[length:]
    if command not in _TYPED:
        raise ConfigError(f"launch runs one of {', '.join(_TYPED)}, got {command!r}: check the others on one machine")
    if command == "eval":
        named = [word.partition("=")[2] or after for word, after in zip(rest, [*rest[1:], ""], strict=True)
                 if word.partition("=")[0] == "--recipe"]  # fmt: skip
    else:
        named = [word for word in rest[:1] if "=" not in word and not word.startswith("-")]
    if not named:
        raise ConfigError(
            f"{command} needs a recipe right behind it (eval: --recipe), got {' '.join(rest) or 'nothing'}"
        )
    return command, named[0], [word for word in rest if "=" in word and not word.startswith("-")]


def problems(job: Job) -> Iterator[str]:
    """Yield a sentence (expected, got, what to do) for everything that cannot run on the job's cluster.

    Raises:
        ConfigError: The command or its recipe is wrong by itself.
    """
    command, recipe, overrides = recipe_of(job.words)
    named = {word: key for key, word in COMMANDS.items()}.get(command, "train")
    config = load_any_config(recipe, overrides, command=named)
    if command == "eval":
        assert isinstance(config, Config)
        config = config.model_copy(update={"rollout": config.rollout.model_copy(update={"workers": 1})})
    yield from _gpu_problems(job, config, with_ranks=command != "eval")
    yield from _folder_problems(job, recipe)


def _gpu_problems(job: Job, config: Config | OfflineConfig, *, with_ranks: bool) -> Iterator[str]:
    profile = job.profile
    there = profile.nodes * profile.gpus_per_node
    if config.run.device == "cpu":
        return
    try:
        if with_ranks:
            check_resources(config, num_cores=1, num_gpus=there)
    except ConfigError as error:
        yield f"{error}; the profile says nodes={profile.nodes} x gpus_per_node={profile.gpus_per_node}"
        return
    if not isinstance(config, Config):
        return
    workers, parallel = config.rollout.workers, config.rollout.tensor_parallel
    per_node = profile.gpus_per_node // parallel
    if per_node == 0:
        yield (
            f"an engine must fit on a node, got rollout.tensor_parallel={parallel} and "
            f"gpus_per_node={profile.gpus_per_node}: lower rollout.tensor_parallel"
        )
    elif workers > per_node * profile.nodes:
        yield (
            f"engines are not split over nodes: {profile.nodes} nodes of {profile.gpus_per_node} GPUs hold "
            f"{per_node * profile.nodes} of rollout.tensor_parallel={parallel}, got rollout.workers={workers}: lower "
            "it, or choose a tensor_parallel that divides a node's GPUs"
        )


def _folder_problems(job: Job, recipe: str) -> Iterator[str]:
    profile, files = job.profile, own_files(recipe, job)
    is_resumed = any(word.startswith("run.resume=") for word in job.words)
    if not job.ships and not is_resumed and job.run_folder and (job.run_folder / "config.json").exists():
        yield (
            f"the run folder must be a new one, got {job.run_folder}, which holds a run: choose another --name or "
            f"run.dir, or go on from it with run.resume={job.run_folder}"
        )
    if job.ships:
        for path in files:
            if path.is_absolute() or ".." in path.parts:
                yield f"files that are shipped must lie below {job.folder}, got {path}: start launch in a folder above"
        if profile.shared is None:
            yield f"--on {job.kind} writes the run into the profile's shared folder, got none: set shared"
    elif profile.nodes > 1 and profile.shared is None:
        yield f"nodes={profile.nodes} need a folder that all see, got shared: null: set it, and start launch below it"
    elif profile.nodes > 1:
        inside = [job.files, *filter(None, [job.run_folder]), *(Path(job.folder) / path for path in files)]
        for path in inside:
            if not path.resolve().is_relative_to(Path(str(profile.shared)).resolve()):
                yield f"every node must see {path}, got shared={profile.shared}: start launch below it, or move files"


def own_files(recipe: str, job: Job) -> list[Path]:
    """Return the recipe's file and the plug-in files `path.py:function` that it or an override names.

    A shipped recipe is on every node with the package.
    """
    path = Path(recipe)
    own = [path] if path.is_file() and not path.resolve().is_relative_to(recipe_folder().resolve()) else []
    raw = read_recipe(recipe, recipe_of(job.words)[2], command=None)
    plugins = {Path(text.rpartition(":")[0]) for text in _texts(raw) if text.rpartition(":")[0].endswith(".py")}
    return [*own, *sorted(plugins)]


def _texts(value: Any) -> Iterable[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from (*_texts(key), *_texts(item))
    elif isinstance(value, list):
        for item in value:
            yield from _texts(item)
