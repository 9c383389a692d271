"""Small offline runs on a tiny model, for the tests of the offline objectives."""

import json
from pathlib import Path
from typing import Any

from train_builders import save_tiny_model

from areal_lite.config.offline import OfflineConfig
from areal_lite.config.reading import parse_section
from areal_lite.train.offline import OfflineTrainer


def offline_config(folder: Path, command: str = "sft", **sections: dict[str, Any]) -> OfflineConfig:
    """Build a recipe of 4 rows a step with 4 held out; data and model are made in `folder` when missing."""
    model, data = folder / "model", folder / "rows.jsonl"
    if not model.exists():
        save_tiny_model(model, num_key_value_heads=2)
    if not data.exists():
        data.write_text("".join(json.dumps(_row(index)) + "\n" for index in range(12)))
    raw: dict[str, Any] = {
        "command": command,
        "run": {"steps": 6, "checkpoint_every": 2, "eval_every": 3, "report": False},
        "model": {"path": str(model), "max_context": 64},
        "data": {"source": "jsonl", "path": str(data), "eval_fraction": 0.34},
        "trainer": {"batch_size": 4, "lr": 1e-2, "micro_batch_tokens": 32},
    }
    for name, section in sections.items():
        raw[name] = raw.get(name, {}) | section
    return parse_section(raw, OfflineConfig)


def offline_trainer(config: OfflineConfig, *, rank: int = 0) -> OfflineTrainer:
    """Load the recipe's model as one rank does, with the reference it names."""
    return OfflineTrainer.from_recipe(config, model_folder=config.model.path, rank=rank)


def _row(index: int) -> dict[str, str]:
    """Rows of very different lengths; good answers repeat the prompt's last digit, bad ones count down."""
    digit, length = index % 10, 2 + 3 * (index % 4)
    bad = "".join(str((digit - step) % 10) for step in range(1, 2 + index % 3))
    return {"prompt": f"{index:03d}"[: 1 + index % 3] + str(digit), "completion": str(digit) * length,
            "chosen": str(digit) * length, "rejected": bad}  # fmt: skip
