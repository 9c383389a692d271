"""Whether a command fits a cluster: recipe against profile, before anything is submitted; and the files to ship."""

import os
from collections.abc import Iterator
from pathlib import Path

from areal_lite.config.data import is_hub_id
from areal_lite.config.offline import OfflineConfig, load_any_config
from areal_lite.config.plugins import plugin_files
from areal_lite.config.presets import expand_preset
from areal_lite.config.reading import override, read_recipe, recipe_folder
from areal_lite.config.recipe import Config
from areal_lite.config.sections import BUILT_IN, COMMANDS
from areal_lite.errors import ConfigError
from areal_lite.launch.clusters.job import Job, find_kind, is_override
from areal_lite.launch.clusters.profile import Profile
from areal_lite.launch.clusters.remote import render
from areal_lite.launch.run.plan import NOWHERE, Node, plan, table
from areal_lite.launch.run.recipe_check import Reach, check_recipe

_TYPED = (*COMMANDS.values(), "eval", "bench modes")


def recipe_of(words: list[str]) -> tuple[str, str, list[str]]:
    """Split words into command, recipe, overrides; a `ConfigError` if no cluster runs it, or it names no recipe."""
    length = 2 if words[0] == "bench" else 1
    command, rest = " ".join(words[:length]), words[length:]
    if command not in _TYPED:
        raise ConfigError(f"launch runs one of {', '.join(_TYPED)}, got {command!r}: check the others on one machine")
    if command == "eval":
        named = [word.partition("=")[2] or after for word, after in zip(rest, [*rest[1:], ""], strict=True)
                 if word.partition("=")[0] == "--recipe"]  # fmt: skip
    else:
        named = [word for word in rest[:1] if not is_override(word) and not word.startswith("-")]
    if not named:
        raise ConfigError(
            f"{command} needs a recipe right after it (eval: --recipe), got {' '.join(rest) or 'nothing'}"
        )
    own = ("--on", "--profile", "--name", "--dry-run", "--detach", "--status", "--logs", "--stop", "--new-profile")
    if late := [word for word in rest if word.partition("=")[0] in own]:
        raise ConfigError(f"options of launch belong before the command, got {' '.join(late)} after it: move them")
    if command in COMMANDS.values():  # they have no options: they would refuse what is no override
        return command, named[0], rest[1:]
    return command, named[0], [word for word in rest if is_override(word) and not word.startswith("-")]


def with_run_folder(job: Job) -> Job:
    """Return the job with `run.dir` and `run.resume` of the recipe's file among its words."""
    run = load_any_config(*recipe_of(job.words)[1:]).run
    named = [override(key, path) for key, path in (("run.dir", run.dir), ("run.resume", run.resume)) if path]
    return job.model_copy(update={"words": [*job.words, *(word for word in named if word not in job.words)]})


def problems(job: Job) -> Iterator[str]:
    """Yield a sentence for each reason why a job cannot run on its cluster; an error if the recipe itself is wrong."""
    command, recipe, overrides = recipe_of(job.words)
    named = {word: key for key, word in COMMANDS.items()}.get(command, "train")
    config = load_any_config(recipe, overrides, command=named)
    if command == "eval":
        assert isinstance(config, Config)
        config = config.model_copy(update={"rollout": config.rollout.model_copy(update={"workers": 1})})
    yield from gpu_problems(job.profile, config, with_ranks=command != "eval")
    yield from _folder_problems(job, recipe)
    if command != "eval":  # it has a model of its own
        check_recipe(config, _reach(job, config))


def node_problems(job: Job) -> Iterator[str]:
    """Yield a sentence if a kind without `nodes`, such as local, is to start Ray on several nodes."""
    kind, nodes = find_kind(job.kind), job.profile.nodes
    if nodes > 1 and not job.ships and kind.joined(job) is None and not kind.nodes(job):
        yield f"--on {job.kind} is one machine, got nodes={nodes}: choose a kind that has nodes(), or set nodes: 1"


def _reach(job: Job, config: Config | OfflineConfig) -> Reach:
    """Return how much of a job's recipe can be looked at from here."""
    if job.kind == "local":
        return Reach.MACHINE
    sources = config.data.sources.values() if config.command == "train" else [config.data]
    paths = [path for source in sources for path in (source.path, source.eval_path) if path is not None]
    if any(source.source == "dataset" and is_hub_id(str(source.path)) for source in sources):
        return Reach.RECIPE  # the nodes download it
    if config.model.path != BUILT_IN:
        paths.append(config.model.path)
    shared = job.profile.shared
    if any(os.path.isabs(path) and not (shared and Path(path).is_relative_to(shared)) for path in paths):
        return Reach.RECIPE  # each node has its own disk
    return Reach.RECIPE if job.ships else Reach.FILES


def gpu_problems(profile: Profile, config: Config | OfflineConfig, *, with_ranks: bool) -> Iterator[str]:
    """Yield a sentence if a profile's GPUs do not suffice for the engines, and the trainer ranks if it has them."""
    if config.run.device == "cpu":
        return
    gpus, size = profile.gpus_per_node, f"nodes={profile.nodes} x gpus_per_node={profile.gpus_per_node}"
    nodes = [Node(address=f"{index}", cores=1, gpus=gpus, free_gpus=gpus) for index in range(1, profile.nodes + 1)]
    kinds = ("rollout", "trainer") if with_ranks else ("rollout",)
    bundles = [bundle for bundle in plan(config, nodes) if any(lane.startswith(kinds) for lane in bundle.lanes)]
    if any(bundle.node == NOWHERE for bundle in bundles):
        yield (
            f"the run must fit into {size}, an engine on one node; it does not:\n{table(bundles, nodes)}\nlower"
            " rollout.workers, rollout.tensor_parallel or trainer.ranks, or set nodes or gpus_per_node in a --profile"
        )


def _folder_problems(job: Job, recipe: str) -> Iterator[str]:
    profile, files = job.profile, own_files(recipe, job)
    is_resumed = any(word.startswith("run.resume=") for word in job.words)
    if not job.ships and not is_resumed and job.run_folder and (job.run_folder / "config.json").exists():
        yield (
            f"the run folder must be a new one, got {job.run_folder}, which holds a run: choose another --name or "
            f"run.dir, or resume it with run.resume={job.run_folder}"
        )
    if job.run_folder and job.files.resolve().is_relative_to(job.run_folder.resolve()):
        yield f"a run folder must not hold {job.files}, got {job.run_folder}: choose another --name or run.dir"
    if job.ships:
        for path in {path.parent: path for path in reversed(files)}.values():
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
    """Return the recipe's file and the plug-in files `path.py:function` that it, its preset or an override names.

    Beside a plug-in lie the modules that it may import. A shipped recipe is on every node with the package.
    """
    path = Path(recipe)
    own = [path] if path.is_file() and not path.resolve().is_relative_to(recipe_folder().resolve()) else []
    raw = read_recipe(recipe, recipe_of(job.words)[2], command=None)
    preset = str((raw.get("objective") or {}).get("preset"))
    if preset.endswith((".yaml", ".yml")):
        own.append(Path(preset))
    named = set(map(Path, plugin_files(expand_preset(raw))))
    beside = {found for path in named for found in path.parent.glob("*.py") if found.is_file()}
    return [*own, *sorted(named), *sorted(beside - named)]


def shipped(job: Job, source: str) -> tuple[Job, dict[str, str]]:
    """Return the job as its head will see it, and the files to copy, by their path in its folder there.

    Args:
        source: The folder where `start.sh`, one of them, finds them; it copies them and supervises the job.

    Raises:
        ConfigError: A file that the recipe names cannot be read.
    """
    there = job.model_copy(update={"folder": f"{job.profile.shared}/{job.name}"})
    own = {str(path): _text(Path(job.folder) / path) for path in own_files(recipe_of(job.words)[1], job)}
    record = there.without_values().model_dump_json(indent=2, exclude_defaults=True) + "\n"
    own[str(there.record.relative_to(there.folder))] = record
    return there, own | {"start.sh": render("start.sh", job=there, source=source)}


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"the recipe's files, and modules beside its plug-ins, are shipped: expected {path} as UTF-8 text, got "
            f"{error}. Fix: correct the name in the recipe, or the file"
        ) from error
