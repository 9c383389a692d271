"""A recipe compared with all that it refers to: functions, model, data, packages, memory. Nothing is started.

`train`, `check-config`, `launch` and `doctor` call `check_recipe`, so that they refuse the same fault with the same
sentence; `train` then uses what was loaded.
"""

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from itertools import chain
from pathlib import Path

from areal_lite.config.offline import OfflineConfig
from areal_lite.config.plugin_check import check_plugins
from areal_lite.config.recipe import Config
from areal_lite.config.sections import BUILT_IN, MeshConfig
from areal_lite.data.completions import OfflineData, load_offline
from areal_lite.data.demonstrations import alphabet, demonstrations
from areal_lite.data.encode import Tokenizer, load_tokenizer
from areal_lite.data.prompts import load_source, load_sources
from areal_lite.errors import ConfigError, DataError
from areal_lite.node import check_folders, check_memory, installed_version, memory_bytes
from areal_lite.record.paths import check_model, with_absolute_paths
from areal_lite.record.run_files import read_json
from areal_lite.record.trackers import check_trackers
from areal_lite.rollout.runner import load_workflows
from areal_lite.rollout.vllm_engine import check_engine_arguments
from areal_lite.types import Prompt
from areal_lite.verify.first_call import check_first_calls


class Reach(IntEnum):
    """How much of what a recipe refers to can be looked at from here."""

    RECIPE = 0
    """The recipe alone: it will run where other files are."""
    FILES = 1
    """Also model and data: other machines that share this one's files will run it."""
    CLUSTER = 2
    """Also functions and packages: this process will run it, together with other machines."""
    MACHINE = 3
    """Also memory, and calls of the recipe's own verifiers: everything will run here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """A checked recipe with what was loaded to check it; no weights."""

    config: Config | OfflineConfig
    """Its paths are absolute."""
    prompts: dict[str, list[Prompt]] = field(default_factory=dict)
    """Training prompts of `train` by source."""
    held_out: list[Prompt] = field(default_factory=list)
    """Held-out prompts of `train`."""
    rows: OfflineData | None = None
    """What `sft`, `reward-model` and `dpo` learn from."""

    @property
    def model_folder(self) -> Path | None:
        """Folder of the initial policy; None for the built-in one, which is made when a run starts."""
        path = self.config.model.path
        return None if path == BUILT_IN else Path(path)


def check_recipe(config: Config | OfflineConfig, reach: Reach = Reach.MACHINE, *, with_weights: bool = False) -> Loaded:
    """Look at everything that a recipe refers to, as far as it can be seen from here.

    Args:
        config: A parsed recipe; relative paths start in the present folder.
        reach: What can be seen. Anything beyond it is taken for granted.
        with_weights: Also download weights from the hub, and compare those of a run with what was saved.

    Raises:
        ArealLiteError: Whatever would end the run before its first step; the message has the remedy.
    """
    if reach >= Reach.CLUSTER:
        _check_packages(config)
        _check_machine(config, is_alone=reach >= Reach.MACHINE)
        if config.command == "train":
            check_plugins(config, loader=f"{__name__}:load_functions")
            check_engine_arguments(config)
    if reach < Reach.FILES:
        return Loaded(config=config)
    loaded = Loaded(config=with_absolute_paths(config, with_weights=with_weights))
    config, folder = loaded.config, loaded.model_folder
    if folder is not None:
        check_model(config, folder)
        if reach >= Reach.MACHINE and config.run.device == "cpu" and config.trainer.lora is None:
            _check_room(folder)
    if config.command == "train":
        is_special = config.rollout.replay_routes or config.objective.baseline == "critic"
    else:
        is_special = config.command == "reward_model"
    trainer = config.trainer
    if trainer.lora is not None or trainer.mesh != MeshConfig() or trainer.attention != "auto" or is_special:
        from areal_lite.train.routes import check_layers  # imports torch

        check_layers(config, folder)
    tokenizer = _tokenizer(config, folder)
    if config.command != "train":
        loaded = Loaded(config=config, rows=load_offline(config, tokenizer))
    else:
        if config.objective.reference_path is not None:
            _check_reference(Path(config.objective.reference_path), tokenizer, config)
        loaded = _load_prompts(config, tokenizer, reach)
    if folder is not None:
        _check_vocabulary(loaded, folder, tokenizer)
    return loaded


def _check_vocabulary(loaded: Loaded, folder: Path, tokenizer: Tokenizer) -> None:
    """Refuse data with tokens that the model has no embedding of."""
    size = read_json(folder / "config.json").get("vocab_size")
    texts: list[Sequence[int]] = [prompt.token_ids for prompt in chain(*loaded.prompts.values(), loaded.held_out)]
    if loaded.rows is not None:
        for row in chain(loaded.rows.train, loaded.rows.held_out):
            texts += [row.prompt, *row.completions]
    largest = max(map(max, filter(None, texts)), default=0)
    if size is not None and largest >= size:
        raise DataError(
            f"the data's tokens must be among the {size} that {folder} has embeddings of (vocab_size), got {largest} "
            f"({tokenizer.convert_ids_to_tokens(largest)!r}). Fix: save the model again after "
            "resize_token_embeddings(len(tokenizer)), or remove the token from the data"
        )


def _check_room(folder: Path) -> None:
    """Refuse a model whose float32 weights, gradients and moments alone exceed this machine's memory; without torch."""
    saved = read_json(folder / "config.json")
    itemsize = 2 if "16" in str(saved.get("dtype") or saved.get("torch_dtype")) else 4
    numbers = sum(path.stat().st_size for path in folder.glob("*.safetensors")) / itemsize
    if (need := 16 * numbers) > (there := memory_bytes()):
        raise ConfigError(
            f"the model does not fit: expected weights, gradients and moments of at most {there / 2**30:.1f} GiB, got "
            f"{need / 2**30:.1f} for {numbers / 1e9:.3g} billion parameters. Fix: take a smaller model, or train "
            "adapters alone (trainer.lora); areal-lite estimate shows all that a run needs"
        )


def _check_reference(folder: Path, tokenizer: Tokenizer, config: Config) -> None:
    """Refuse a reference or teacher that reads the policy's token ids as other tokens, where it has a tokenizer."""
    if not (folder / "tokenizer_config.json").is_file():
        return
    own, theirs = tokenizer.get_vocab(), load_tokenizer(folder, config.model).get_vocab()
    if differing := [token for token, number in own.items() if theirs.get(token) != number]:
        token = min(differing, key=own.__getitem__)
        raise ConfigError(
            f"objective.reference_path={folder} must have the policy's tokens, got {theirs.get(token)} for {token!r}, "
            f"which is {own[token]} in the policy's. Fix: name a model with the same tokenizer"
        )


def load_functions(config: Config) -> None:
    """Load workflows and loss function as the run's processes do; a `PluginError` if one cannot run."""
    load_workflows(config)
    if config.objective.loss_function is not None:
        from areal_lite.train.objective import find_loss_function  # imports torch

        find_loss_function(config.objective)


def _check_packages(config: Config | OfflineConfig) -> None:
    if config.trainer.attention == "flash_attention_2" and not any(map(installed_version, ("flash-attn", "kernels"))):
        raise ConfigError(
            "trainer.attention=flash_attention_2 needs the package flash-attn (2.3.3 or later) or kernels, got "
            "neither. Fix: install one, or set trainer.attention=auto"
        )


def _check_machine(config: Config | OfflineConfig, *, is_alone: bool) -> None:
    for name, value in config.run.env.items():
        if value is None and name not in os.environ:
            raise ConfigError(
                f"run.env.{name}=null keeps the value of an environment variable, got none here. Fix: export {name}=..."
            )

    if is_alone:
        check_folders()
    check_trackers(config.run.trackers)
    check_memory(config.caches_mb if is_alone and config.command == "train" else 0)


def _tokenizer(config: Config | OfflineConfig, folder: Path | None) -> Tokenizer:
    """Load the model's tokenizer; that of the built-in model follows from the recipe."""
    from areal_lite.data.tokenizer import build_char_tokenizer

    if folder is not None:
        return load_tokenizer(folder, config.model)
    demonstrations(config, count=1)  # raises where there is nothing to learn from
    return build_char_tokenizer(alphabet(config))


def _load_prompts(config: Config, tokenizer: Tokenizer, reach: Reach) -> Loaded:
    if reach < Reach.CLUSTER and any(":" in source.source for source in config.data.sources.values()):
        return Loaded(config=config)  # a function that is imported on other machines makes the rows
    prompts, held_out = load_sources(config, tokenizer, "train"), load_source(config, tokenizer, "eval")
    check_argument_names(config, chain(*prompts.values(), held_out))
    if reach >= Reach.MACHINE:  # elsewhere a verifier may find what is missing here
        check_first_calls(config, chain.from_iterable(prompts.values()))
    if config.reward_watch.verifiers and not held_out:
        raise ConfigError(
            "reward_watch compares rewards of held-out rows: expected some, got none. Fix: set data.eval_path, or "
            "remove reward_watch"
        )
    return Loaded(config=config, prompts=prompts, held_out=held_out)


def check_argument_names(config: Config, prompts: Iterable[Prompt]) -> None:
    """A verifier gets the recipe's arguments and a row's columns: a `ConfigError` where two have the same name."""
    columns = {"prompt", "completion", "answer", "messages"}.union(*(prompt.row for prompt in prompts))
    named = {f"verifier.named.{name}": settings for name, settings in config.verifier.named.items()}
    named |= {f"reward_watch.verifiers.{name}": one for name, one in config.reward_watch.verifiers.items()}
    for key, settings in {"verifier": config.verifier, **named}.items():
        if clash := settings.arguments.keys() & columns:
            raise ConfigError(
                f"{key}.arguments must have names of their own, got {', '.join(sorted(clash))}, which a verifier gets "
                "from the data row: rename the argument or the column"
            )
