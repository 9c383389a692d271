"""The built-in model: a tiny Qwen3, trained briefly on worked solutions of the recipe's tasks.

The result is an ordinary Hugging Face folder, cached under a hash of everything that shapes it.
"""

import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil
from transformers import PreTrainedTokenizerFast

from areal_lite.config.offline import OfflineConfig
from areal_lite.config.recipe import Config
from areal_lite.config.sections import WarmStartConfig
from areal_lite.data.completions import Example, OfflineData
from areal_lite.data.demonstrations import alphabet, content_of, demonstrations, turn_examples
from areal_lite.data.tasks import Task
from areal_lite.data.tokenizer import build_char_tokenizer
from areal_lite.record.writer import writable

Progress = Callable[[int, int, float], None]
"""Called after each step with (steps done, steps in all, loss)."""

_RECIPE_VERSION = 1
"""Raised when a change of the code below changes the model."""
_HEAD_DIM = 32
_SEED = 0
_NUM_EXAMPLES = 8192
_MAX_THREADS = 4
"""Matrices of this model are too small for more."""
_LOOK_S = 0.3
"""How long to measure which share of the cores others use."""


def ensure_warm_start(config: Config | OfflineConfig, *, cache_dir: Path, progress: Progress | None = None) -> Path:
    """Return the folder of the warm-started model, training it when it is not in the cache.

    Args:
        config: The recipe: `model.warm_start`, `model.max_context` and the sources' demonstrations shape the result.
        cache_dir: Created if missing.
        progress: Not called on a cache hit.

    Returns:
        `cache_dir/<hash>`, complete: it is renamed into place.

    Raises:
        ConfigError: There is nothing to learn from although `model.warm_start.steps` is not 0, or no room in the cache.
        DataError: A demonstration holds a character that is not in the model's alphabet.
    """
    shown = demonstrations(config, count=_NUM_EXAMPLES)
    folder = cache_dir / _content_hash(config, shown)
    if folder.is_dir():
        return folder
    with writable("the folder for the built-in model, in the one that you start in,", cache_dir):
        cache_dir.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="unfinished-", dir=cache_dir, ignore_cleanup_errors=True) as unfinished:
            tokenizer = build_char_tokenizer(alphabet(config))
            tokenizer.save_pretrained(unfinished)  # before the work, as a disk may be full
            model = build_model(config, tokenizer)
            if config.model.warm_start.steps > 0:
                _learn(model, turn_examples(shown, tokenizer), settings=config.model.warm_start, progress=progress)
            model.save_pretrained(unfinished)
            try:
                os.rename(unfinished, folder)
            except OSError:  # another process was faster; its folder has the same content
                if not folder.is_dir():
                    raise
    return folder


def _content_hash(config: Config | OfflineConfig, shown: Sequence[Task]) -> str:
    content = {
        "recipe": _RECIPE_VERSION,
        "warm_start": {**config.model.warm_start.model_dump(), "seed": _SEED, "tie_embeddings": True},
        "max_context": config.model.max_context,
        "characters": alphabet(config),
        "problems": list(map(content_of, shown)),
    }
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]


def _learn(model: Any, examples: Sequence[Example], *, settings: WarmStartConfig, progress: Progress | None) -> None:
    warmup_steps = min(20, settings.steps)
    recipe = {
        "command": "sft",
        "run": {"steps": settings.steps, "seed": _SEED},
        "trainer": {
            "batch_size": settings.batch_size,
            "lr": settings.lr,
            "schedule": "cosine",
            "warmup_steps": warmup_steps,
            "micro_batch_tokens": 1024,
        },
    }
    import torch

    from areal_lite.train.offline import OfflineTrainer

    trainer = OfflineTrainer(
        OfflineConfig.model_validate(recipe), model, OfflineData(train=list(examples), held_out=[])
    )
    num_threads = torch.get_num_threads()
    # On small matrices a thread mostly waits for the others. With two on two cores that six processes share, 40 steps
    # took 174 s, with one 16.
    idle_cores = num_threads * (1 - psutil.cpu_percent(_LOOK_S) / 100)
    torch.set_num_threads(max(1, min(round(idle_cores), _MAX_THREADS)))
    try:
        trainer.run(progress)
    finally:
        torch.set_num_threads(num_threads)


def build_model(config: Config | OfflineConfig, tokenizer: PreTrainedTokenizerFast) -> Any:
    """Make the built-in model, with random weights."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    warm_start = config.model.warm_start
    num_heads = max(2, warm_start.hidden_size // _HEAD_DIM)
    architecture = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=warm_start.hidden_size,
        intermediate_size=3 * warm_start.hidden_size,
        num_hidden_layers=warm_start.num_layers,
        num_attention_heads=num_heads,
        num_key_value_heads=num_heads // 2,
        head_dim=_HEAD_DIM,
        max_position_embeddings=config.model.max_context,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(_SEED)
        return Qwen3ForCausalLM(architecture).train()
