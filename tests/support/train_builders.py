"""Tiny models, recipes and shards for the tests of the training code."""

from collections.abc import Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import torch
from families import DECODER
from ledger_builders import version_spans
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_optimizer_state_dict
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from areal_lite.config.recipe import Config, parse_config
from areal_lite.data.tokenizer import build_char_tokenizer
from areal_lite.train.trainer import Trainer
from areal_lite.types import Row, Sample, Shard, StopReason

VOCABULARY = 12


def save_tiny_model(
    folder: Path,
    *,
    tie_embeddings: bool = True,
    num_layers: int = 2,
    seed: int = 0,
    max_context: int = 64,
    num_key_value_heads: int = 1,
    tokenizer: PreTrainedTokenizerFast | None = None,
) -> str:
    """Save a Qwen3 of width 32 with random weights, large enough to prefer some tokens, and a tokenizer, of digits."""
    torch.manual_seed(seed)
    tokenizer = tokenizer or build_char_tokenizer("0123456789")
    sizes = {"vocab_size": len(tokenizer), "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": num_layers}
    heads = {"num_key_value_heads": num_key_value_heads, "head_dim": 32, "max_position_embeddings": max_context}
    config = Qwen3Config(**DECODER | sizes | heads, tie_word_embeddings=tie_embeddings, initializer_range=0.2)
    Qwen3ForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def make_config(*, groups: int = 3, samples: int = 4, **sections: dict[str, Any]) -> Config:
    """Build a recipe for `groups` x `samples` rows; further sections are merged in."""
    raw: dict[str, Any] = {
        "run": {"steps": 10},
        "queue": {"groups_per_step": groups, "samples_per_group": samples, "max_staleness": 2},
        "trainer": {"minibatches": 2, "lr": 1e-2, "micro_batch_tokens": 64},
        "rollout": {"temperature": 0.8, "max_new_tokens": 32},
    }
    for name, section in sections.items():
        raw[name] = raw.get(name, {}) | section
    return parse_config(raw)


def make_sample(length: int, *, rng: np.random.Generator, version: int = 5, old_tokens: int = 0) -> Sample:
    """Build a sample of random tokens; the first `old_tokens` are three versions older."""
    versions = [version - 3] * old_tokens + [version] * (length - old_tokens)
    return Sample(
        token_ids=rng.integers(2, VOCABULARY, length).astype(np.int32),
        logprobs=rng.uniform(-3.0, -1.0, length).astype(np.float32),
        spans=version_spans(versions),
        stop_reason=StopReason.STOP if length % 2 else StopReason.LENGTH,
    )


def make_rows(
    *, groups: int = 3, samples: int = 4, minibatches: int = 2, version: int = 5, seed: int = 0, old_tokens: int = 0
) -> list[Row]:
    """Build the rows of a whole batch, of different lengths, dealt to minibatches in turn."""
    rng = np.random.default_rng(seed)
    rows = []
    for index in range(groups * samples):
        length = int(rng.integers(3, 14))
        rows.append(
            Row(
                group_index=index // samples,
                sample_index=index % samples,
                minibatch=index % minibatches,
                prompt_token_ids=tuple(int(token) for token in rng.integers(2, VOCABULARY, 1 + index % 3)),
                sample=make_sample(length, rng=rng, version=version, old_tokens=old_tokens if index % 2 else 0),
            )
        )
    return rows


def make_shard(rows: Sequence[Row], *, rewards: np.ndarray | None = None, version: int = 5, rank: int = 0) -> Shard:
    """Put rows into a shard; rewards default to a fixed pattern of zeros and ones over 3 groups of 4."""
    if rewards is None:
        rewards = np.array([[1, 0, 0, 1], [0, 0, 0, 1], [1, 1, 0, 1]])
    return Shard(batch_id="batch-0", rank=rank, version=version, rewards=rewards.astype(np.float32), rows=tuple(rows))


def shard_of(version: int, *, rank: int = 0, ranks: int = 1) -> Shard:
    """Return a rank's part of the rows of a version, dealt in pairs."""
    rows = make_rows(version=version, seed=version)
    mine = [row for index, row in enumerate(rows) if index // 2 % ranks == rank]
    return make_shard(mine, version=version, rank=rank)


def full_state(trainer: Trainer) -> dict[str, Any]:
    """Return weights and optimiser state as whole tensors; collective."""
    options = StateDictOptions(full_state_dict=True, cpu_offload=True, flatten_optimizer_state_dict=True)
    state: dict[str, Any] = {}
    for prefix, learner in (("", trainer.learner), ("critic.", trainer.critic)):
        if learner is not None:
            optimizer = get_optimizer_state_dict(learner.model, learner.optimizer, options=options)
            whole = {**get_model_state_dict(learner.model, options=options), **optimizer}
            state |= {prefix + name: value for name, value in whole.items()}
    return deepcopy(state)  # of one rank it is the trainer's own
