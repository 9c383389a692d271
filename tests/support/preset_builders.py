"""Recipes and trainers for the tests of presets and knobs."""

import dataclasses
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from plain_trainer import row_logprobs
from torch import nn
from train_builders import make_config
from transformers import AutoModelForCausalLM

from areal_lite.config.presets import expand_preset
from areal_lite.config.recipe import Config
from areal_lite.train.trainer import Trainer
from areal_lite.types import Row

LIMIT = 12
"""rollout.max_new_tokens: some of the rows are longer than four fifths of it."""


def config_of(sections: dict[str, Any], reference_folder: str | None = None) -> Config:
    """Build a recipe; the reference and the critic's learning rate are set where the objective has use for them."""
    sections = {"rollout": {"max_new_tokens": LIMIT}, "objective": {}, **sections}
    knobs = expand_preset({"objective": sections["objective"]})["objective"]
    if knobs.get("kl", "none") != "none":
        sections["objective"] = {"reference_path": reference_folder, **sections["objective"]}
    if knobs.get("baseline") == "critic":
        sections["critic"] = {"lr": 3e-3, **sections.get("critic", {})}
    return make_config(**sections)


def make_trainer(model_folder: str, config: Config) -> Trainer:
    trainer = Trainer(config, model_folder=model_folder, rank=0)
    trainer.version = 5
    return trainer


def save_model_near(model_folder: str, folder: Path) -> str:
    """Save a model near another, so that the KL to it is neither nothing nor everything."""
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_pretrained(model_folder)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.05 * torch.randn_like(parameter)
    model.save_pretrained(folder)
    return str(folder)


def near_behaviour(rows: Iterable[Row], model_folder: str, *, noise: float) -> list[Row]:
    """Give rows behaviour logprobs that lie near the model's own, as after a few steps of training."""
    rng, model = np.random.default_rng(1), AutoModelForCausalLM.from_pretrained(model_folder)
    moved = []
    for row in rows:
        logprobs_T = row_logprobs(model, row, 0.8).detach().numpy()
        logprobs_T = (logprobs_T + rng.normal(0, noise, len(logprobs_T))).astype(np.float32)
        moved.append(dataclasses.replace(row, sample=dataclasses.replace(row.sample, logprobs=logprobs_T)))
    return moved


def assert_same(got: nn.Module, expected: nn.Module, *, atol: float = 2e-4) -> None:
    """Compare all parameters; of each matrix one element in a thousand may differ by five times as much.

    Adam divides a gradient by its size: one that rounding alone decides moves its element as far as any other, and
    which elements these are depends on the processor.
    """
    for name, value in expected.named_parameters():
        apart = (got.get_parameter(name) - value).abs() - 1e-3 * value.abs()
        assert apart.max() <= 5 * atol, f"{name}: one element is {apart.max():.2e} off"
        allowed = value.numel() // 1000
        assert (apart > atol).sum() <= allowed, f"{name}: {(apart > atol).sum()} of {value.numel()} elements are off"


def assert_same_stats(got: Any, expected: Any) -> None:
    assert got.keys() == expected.keys()
    for name, wanted in expected.items():
        if wanted is None or name.endswith("_s"):
            assert (got[name] is None) == (wanted is None), name
        elif isinstance(wanted, dict):
            assert got[name] == wanted
        else:
            assert got[name] == pytest.approx(wanted, rel=1e-3, abs=1e-5), name
