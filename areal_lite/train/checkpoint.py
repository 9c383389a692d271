"""Trainer checkpoints with torch DCP, and export to a Hugging Face folder.

    folder/  .metadata, *.distcp   model and optimiser, sharded; any number of ranks can read them; of a model with
                                   adapters these alone
             critic/               the same of the critic, where there is one
             rng-<rank>.pt         random state of each rank
             meta.json             version, KL coefficients, the models' parameter names, shapes and dtypes, and
                                   its outputs for a few tokens

Writing is not atomic: the caller passes a temporary folder, and renames it when every rank is done.

A manifest finds files that changed; outputs for a few tokens show whether intact files gave a wrong state.

Shape letters: `T` tokens, `V` vocabulary.
"""

import json
import logging
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.utils._pytree import tree_map_only
from transformers import AutoConfig, AutoTokenizer, GenerationConfig

from areal_lite.algo.logprobs import token_entropies, token_logprobs
from areal_lite.errors import CheckpointError
from areal_lite.record.run_files import read_json
from areal_lite.train.checkpoint_reader import SafeReader
from areal_lite.train.distributed import device_of, new_group_beside
from areal_lite.train.gathers import gathered, whole_parameters
from areal_lite.train.lora import adapter_parameters, bit_sum, save_adapter, saved_buffers
from areal_lite.train.micro_batch import MicroBatch
from areal_lite.train.model import completion_outputs, reshard
from areal_lite.train.optimiser import Learner

logger = logging.getLogger(__name__)

_CRITIC = "critic"
_NUMBER = re.compile(r"(?:__|rng-)(\d+)")
"""How the names of files begin that every rank writes."""
Fingerprint = dict[str, list[Any]]


def take_snapshot(
    learner: Learner,
    *,
    version: int,
    rank: int,
    limit: float,
    critic: Learner | None = None,
    coefficients: Mapping[str, float] | None = None,
    copied: bool = False,
) -> Callable[[Path], None]:
    """Take models, optimisers, version, coefficients and random state as they are; collective.

    Args:
        version: Completed trainer steps; the learning rate follows from it.
        limit: Nats by which the model's outputs may differ once it is loaded again.
        coefficients: Numbers that follow from the completed steps.
        copied: Copy everything to the host's memory, so that training continues while a thread writes.

    Returns:
        A function that writes the snapshot into a folder, created if missing, the same on all ranks; collective.
    """
    states = {"": _state(learner)}
    meta = {"version": version, "coefficients": dict(coefficients or {}), "model": _fingerprint(learner.model)}
    if critic is not None:
        states[_CRITIC], meta[_CRITIC] = _state(critic), _fingerprint(critic.model)
    if (outputs := model_outputs(learner.model)) is not None:
        meta["outputs"] = outputs | {"allowed": limit}
    on_gpu, group = torch.cuda.is_available(), None
    random = {"cpu": torch.get_rng_state()} | ({"cuda": torch.cuda.get_rng_state()} if on_gpu else {})
    if copied:
        states = tree_map_only(Tensor, lambda value: value.detach().to("cpu", copy=True), states)
        group = new_group_beside()

    def write(folder: Path) -> None:
        try:
            for name, state in states.items():
                save(state, checkpoint_id=folder / name, process_group=group)
            torch.save(random, folder / f"rng-{rank}.pt")
            if rank == 0:
                (folder / "meta.json").write_text(json.dumps(meta, indent=1))
        except (OSError, CheckpointException) as error:
            raise CheckpointError(
                f"the checkpoint in {folder} cannot be written: {_cause(error)!r}. Earlier ones are kept. "
                "Fix: check that disk"
            ) from error

    return write


def files_of(folder: Path, rank: int) -> list[Path]:
    """Return the files of a checkpoint that a rank wrote: those with its number; those without are rank 0's."""
    found = [(path, _NUMBER.match(path.name)) for path in folder.rglob("*") if path.is_file()]
    return [path for path, number in found if (int(number[1]) if number else 0) == rank]


def load_checkpoint(
    folder: Path, learner: Learner, *, rank: int, limit: float, critic: Learner | None = None
) -> tuple[int, dict[str, float]]:
    """Load a checkpoint that the same or another number of ranks wrote; collective.

    A rank that did not exist then keeps its own random state. A critic in the checkpoint is ignored where none is
    given.

    Args:
        limit: Nats by which the model's outputs may differ from the saved ones; 0 = any.

    Returns:
        The version, completed trainer steps, and the coefficients, empty where none were saved.

    Raises:
        CheckpointError: The checkpoint is missing, broken, of another model, or without the critic that is given, or
            the loaded model is not the saved one.
    """
    try:
        meta = json.loads((folder / "meta.json").read_text())
        version, coefficients = int(meta["version"]), dict(meta.get("coefficients", {}))
        saved = {key: dict(meta[key]) for key in ("model", _CRITIC) if key in meta or key == "model"}
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise CheckpointError(
            f"expected a trainer checkpoint in {folder}, got {error!r}. Fix: resume from an older checkpoint"
        ) from error
    if critic is not None and _CRITIC not in saved:
        raise CheckpointError(
            f"objective.baseline=critic needs a checkpoint with a critic, got none in {folder}. Fix: resume with the "
            "objective that it was made with"
        )
    setting = "model.path, trainer.lora and model.compute_dtype"
    _check_same_model(saved["model"], _fingerprint(learner.model), folder=folder, setting=setting)
    if critic is not None:
        _check_same_model(saved[_CRITIC], _fingerprint(critic.model), folder=folder / _CRITIC, setting="critic.path")
        _load_learner(folder / _CRITIC, critic)
    _load_learner(folder, learner)
    check_outputs(learner.model, meta.get("outputs"), folder=folder, limit=limit)
    if (random_file := folder / f"rng-{rank}.pt").exists():
        random = torch.load(random_file, weights_only=True)
        torch.set_rng_state(random["cpu"])
        if "cuda" in random and torch.cuda.is_available():
            torch.cuda.set_rng_state(random["cuda"])
    return version, coefficients


def _load_learner(folder: Path, learner: Learner) -> None:
    state = _state(learner)
    try:
        load(state, storage_reader=SafeReader(folder))
    except (Exception, CheckpointException) as error:  # torch's is not an Exception
        raise CheckpointError(
            f"the checkpoint in {folder} cannot be read: {_cause(error)!r}. Fix: resume from an older checkpoint"
        ) from error
    set_model_state_dict(learner.model, state["model"], options=StateDictOptions(strict=False))
    own = get_optimizer_state_dict(learner.model, learner.optimizer)
    set_optimizer_state_dict(learner.model, learner.optimizer, own | state["optimizer"])


def _cause(error: BaseException) -> BaseException:
    """Return what failed on the first rank that failed, for an error of torch's checkpoints."""
    failures: dict[int, tuple[BaseException, Any]] = getattr(error, "failures", {0: (error, None)})
    return next(iter(failures.values()))[0]


def export_model(folder: Path, model: nn.Module, *, base_folder: str, rank: int) -> None:
    """Write a Hugging Face folder that transformers and vLLM load; collective, rank 0 writes.

    Args:
        folder: Created if missing.
        model: A transformers model, sharded or not. Adapters are merged, and also written to `adapter/`.
        base_folder: The initial model; dtype, generation config and tokenizer are taken from there, with the chat
            template. The generation config gets the tokenizer's end of sequence, a scoring model's tokenizer the
            model's padding.
    """
    target = AutoConfig.from_pretrained(base_folder).dtype or torch.float32
    shards = {name: (value, value.dtype) for name, value in adapter_parameters(model)}
    adapter = gathered(shards, device=device_of(model))
    weights = {name: value.cpu() for name, value in whole_parameters(model, target)}
    if rank == 0:
        if adapter:
            save_adapter(folder / "adapter", model, {name: value.cpu() for name, value in adapter.items()})
        weights |= {name: value.detach().cpu() for name, value in saved_buffers(model)}
        saver: Any = model
        if (given := Path(base_folder, "generation_config.json")).is_file():
            # Copied below: transformers refuses to write some that it reads, such as a temperature without do_sample.
            saver.generation_config = GenerationConfig()
        saver.save_pretrained(folder, state_dict=weights)
        if given.is_file():
            shutil.copyfile(given, folder / given.name)
        config = deepcopy(saver.config)
        config.dtype = config.get_text_config().dtype = target  # transformers writes that of the float32 masters
        config.save_pretrained(folder)
        tokenizer = AutoTokenizer.from_pretrained(base_folder)
        _add_end(folder / given.name, tokenizer.eos_token_id)
        padding = config.get_text_config().pad_token_id
        if saver.get_output_embeddings() is None and padding in tokenizer.added_tokens_decoder:
            tokenizer.pad_token = tokenizer.convert_ids_to_tokens(padding)  # else scores are read at other tokens
        tokenizer.save_pretrained(folder)


def _add_end(generation_config: Path, end: int | None) -> None:
    """Let transformers stop where training ends completions, at the tokenizer's end of sequence."""
    settings = read_json(generation_config)
    saved = settings.get("eos_token_id")
    ends = saved if isinstance(saved, list) else [saved]
    if settings and end not in (None, *ends):
        settings["eos_token_id"] = [one for one in (*ends, end) if one is not None]
        generation_config.write_text(json.dumps(settings, indent=2))


def _state(learner: Learner) -> dict[str, Any]:
    """Return the state by parameter name, in tensors that loading fills in place.

    Without frozen parameters, and without the optimiser's settings, which are the recipe's.
    """
    parameters = learner.model.named_parameters(remove_duplicate=False)
    frozen = {name for name, parameter in parameters if not parameter.requires_grad}
    state = get_model_state_dict(learner.model)
    return {
        "model": {name: value for name, value in state.items() if name not in frozen},
        "optimizer": {"state": get_optimizer_state_dict(learner.model, learner.optimizer)["state"]},
    }


def _fingerprint(model: nn.Module) -> Fingerprint:
    """Return the global shape and dtype of every parameter, and a checksum of one that is frozen; collective."""
    fingerprint = {name: [list(value.shape), str(value.dtype)] for name, value in model.named_parameters()}
    frozen = {name: value for name, value in model.named_parameters() if not value.requires_grad}
    if frozen:
        sums = torch.stack([bit_sum(value) for value in frozen.values()])
        for name, checksum in zip(frozen, sums.tolist(), strict=True):
            fingerprint[name].append(checksum)
    return fingerprint


def _check_same_model(saved: Fingerprint, present: Fingerprint, *, folder: Path, setting: str) -> None:
    for name in sorted(saved.keys() | present.keys()):
        expected, got = present.get(name, "no such parameter"), saved.get(name, "no such parameter")
        if expected != got:
            raise CheckpointError(
                f"the checkpoint in {folder} is of another model or dtype: {name} must be {expected}, got {got}. "
                f"Fix: set {setting} as when it was made"
            )


@torch.no_grad()
def model_outputs(model: Any, tokens: Sequence[int] | None = None) -> dict[str, Any] | None:
    """Run a model over 4 sequences of 16 tokens; collective, with the same result on any number of ranks.

    Args:
        model: A transformers model, sharded or not; its gathered parameters are dropped afterwards.
        tokens: One for each place; None = the most likely ones.

    Returns:
        `tokens`, their `logprobs`, and the mean `entropy` in nats; None for a model of values or scores.
    """
    if model.get_output_embeddings() is None:
        return None
    places_T, vocabulary = torch.arange(64, device=device_of(model)), model.get_input_embeddings().num_embeddings
    input_ids = (places_T * 7919 % vocabulary).view(4, 16)
    batch = MicroBatch(
        input_ids_RS=input_ids, predictors_T=places_T, tokens_T=places_T, token_ids_T=places_T, rows=range(4)
    )

    def read(logits_TV: Tensor, *given: Tensor) -> Tensor:
        tokens_T = given[0] if given else logits_TV.argmax(dim=1)
        logprobs_T = token_logprobs(logits_TV, tokens_T, temperature=1.0)
        return torch.stack([tokens_T.float(), logprobs_T, token_entropies(logits_TV, temperature=1.0)], dim=1)

    given = () if tokens is None else (torch.tensor(tokens, device=places_T.device),)
    tokens_T, logprobs_T, entropies_T = completion_outputs(model, batch, read, *given).T.contiguous()
    reshard(model)
    return {"tokens": tokens_T.long().tolist(), "logprobs": logprobs_T.tolist(), "entropy": entropies_T.mean().item()}


def check_outputs(model: Any, saved: Mapping[str, Any] | None, *, folder: Path, limit: float) -> None:
    """Compare the outputs of a loaded model with those of the saved one; collective.

    Args:
        saved: From `model_outputs`, with the limit then, `allowed`; None in a checkpoint of an earlier version.
        folder: Where it was loaded from.
        limit: Nats by which mean log-probabilities and entropy may differ, or `allowed`, if that is more; 0 = any.

    Raises:
        CheckpointError: They differ by more.
    """
    found = model_outputs(model, None if saved is None else saved["tokens"])
    if found is None:
        return
    if saved is None:
        logger.warning("%s has no outputs of its model: the loaded model is not compared", folder)
        return
    difference = float(np.abs(np.subtract(found["logprobs"], saved["logprobs"])).mean())
    entropy, expected = found["entropy"], saved["entropy"]
    logger.info("%s: log-probabilities differ from the saved ones by %.2g nats on average", folder, difference)
    allowed = max(limit, saved.get("allowed", 0.0))
    if limit and not (difference <= allowed and abs(entropy - expected) <= allowed):  # neither holds of NaN
        raise CheckpointError(
            f"the model loaded from {folder} is not the saved one: expected a mean log-probability of "
            f"{np.mean(saved['logprobs']):.4g} nats and an entropy of {expected:.4g} at {len(found['tokens'])} fixed "
            f"tokens, got {np.mean(found['logprobs']):.4g} and {entropy:.4g}, {difference:.3g} apart per token (limit "
            f"{allowed:g}). Fix: choose an older checkpoint with run.resume_from=step-N, or use the packages and the "
            "machine that it was saved with; an RL run may allow more (weights.parity_limit)"
        )
