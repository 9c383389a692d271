"""Whole runs for the integration tests: real Ray, vLLM, ZeroMQ and FSDP2, on a very small model.

A start costs half a minute of two cores, so that tests look at one run several times.
"""

import io
import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml
from places import SUPPORT
from rich.console import Console
from train_builders import save_tiny_model

from areal_lite.config.offline import OfflineConfig
from areal_lite.config.recipe import Config, parse_config
from areal_lite.launch.run.train import train
from areal_lite.record.run_files import read_summary
from areal_lite.record.run_folder import RunFolder

CHARACTERS = "0123456789"
"""All that the tiny model's tokenizer knows."""
GROUPS = 4
"""Of a step."""
PARITY = 1e-4
"""How many nats the log-probabilities of engine and trainer may be apart in float32."""


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
        "queue": {"max_staleness": 2, "groups_per_step": GROUPS, "samples_per_group": 4, "lease_timeout_s": 5},
        "verifier": {"function": f"{SUPPORT / 'loop_verifiers.py'}:digit_share"},
        "trainer": {"minibatches": 2, "lr": 1e-3},
        "weights": {"timeout_s": 60, "parity_every": 1},
    }
    for name, section in sections.items():
        raw[name] = raw.get(name, {}) | section
    return parse_config(raw)


def write_recipe(path: Path, config: Config) -> Path:
    """Write a recipe as a user would, for a command."""
    path.write_text(yaml.safe_dump(config.model_dump(exclude_unset=True)))
    return path


def run_loop(
    config: Config | OfflineConfig, on_step: Callable[..., object] | None = None
) -> tuple[dict[str, Any], RunFolder]:
    """Run a recipe to its end and return the summary and the run folder."""
    summary = train(config, recipe_name="test", console=Console(file=io.StringIO()), on_step=on_step)
    path = config.run.resume or config.run.dir
    assert path is not None
    return summary, RunFolder(Path(path))


def trained_groups(folder: RunFolder) -> list[str]:
    """Group ids of all trained batches, in order (needs `run.log_samples` as large as a batch)."""
    return [row["group"] for row in folder.read("samples.jsonl")]


def saved_step(folder: RunFolder) -> int:
    return int(folder.newest_checkpoint().name.removeprefix("step-"))


def conserved(ledger: dict[str, int]) -> bool:
    """I2 by counts."""
    terminal = ("trained", "rejected", "failed", "stale", "abandoned", "outstanding")
    return ledger["admitted"] == sum(ledger[state] for state in terminal)


def check_books(folder: RunFolder, *, total: int) -> None:
    """Every step once, no group trained twice, every group accounted for (I2); the run has ended."""
    assert [row["step"] for row in folder.read("metrics.jsonl")] == list(range(1, total + 1))
    assert max(Counter(trained_groups(folder)).values()) == 1
    ledger = read_summary(folder.path)["ledger"]
    assert ledger["trained"] == total * GROUPS
    assert conserved(ledger)
