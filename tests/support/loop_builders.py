"""Whole runs for the integration tests: real Ray, vLLM, ZeroMQ and FSDP2, on a very small model.

A start costs half a minute of two cores, so that tests look at one run several times.
"""

import io
import json
from pathlib import Path
from typing import Any

from places import SUPPORT
from rich.console import Console
from train_builders import save_tiny_model

from areal_lite.config.recipe import Config, parse_config
from areal_lite.launch.run.train import train
from areal_lite.record.run_folder import RunFolder

CHARACTERS = "0123456789"
"""All that the tiny model's tokenizer knows."""
SYNCHRONOUS_STEPS = 5


def write_prompts(path: Path, count: int, **row: Any) -> Path:
    """Write a data file of digit strings; the answer is the last digit."""
    with path.open("w") as file:
        for index in range(count):
            text = f"{index:04d}"
            file.write(json.dumps({"question": text, "answer": text[-1], **row}) + "\n")
    return path


def loop_config(folder: Path, *, run: dict[str, Any], **sections: dict[str, Any]) -> Config:
    """Build a recipe of 4 groups of 4 samples a step; data and model are made in `folder` when missing."""
    model, data = folder / "model", folder / "train.jsonl"
    if not model.exists():
        save_tiny_model(model, max_context=128)
    if not data.exists():
        write_prompts(data, 200)
        write_prompts(folder / "eval.jsonl", 8)
    raw: dict[str, Any] = {
        "run": {"stall_timeout_s": 60, "report": False, **run},
        "model": {"path": str(model), "max_context": 128},
        "data": {"source": "jsonl", "path": str(data), "eval_path": str(folder / "eval.jsonl")},
        "rollout": {"slots": 16, "max_new_tokens": 16, "kv_cache_mb": 64},
        "queue": {"max_staleness": 2, "groups_per_step": 4, "samples_per_group": 4, "lease_timeout_s": 5},
        "verifier": {"function": f"{SUPPORT / 'loop_verifiers.py'}:digit_share"},
        "trainer": {"minibatches": 2, "lr": 1e-3},
        "weights": {"timeout_s": 60, "parity_every": 1},
    }
    for name, section in sections.items():
        raw[name] = raw.get(name, {}) | section
    return parse_config(raw)


def synchronous_config(folder: Path, **run: Any) -> Config:
    """Build a recipe at eta = 0."""
    fixed = {"steps": SYNCHRONOUS_STEPS, "log_samples": 4, "checkpoint_every": 0}
    return loop_config(folder, run={**fixed, **run}, queue={"max_staleness": 0})


def run_loop(config: Config) -> tuple[dict[str, Any], RunFolder]:
    """Run a recipe to its end and return the summary and the run folder."""
    summary = train(config, recipe_name="test", console=Console(file=io.StringIO()))
    path = config.run.resume or config.run.dir
    assert path is not None
    return summary, RunFolder(Path(path))
