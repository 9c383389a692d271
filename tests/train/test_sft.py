"""Supervised learning: its loss and gradient, and the order of its examples."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from train_builders import make_config, save_tiny_model

from areal_lite.config.offline import OfflineConfig
from areal_lite.data.completions import Example, OfflineData
from areal_lite.train import offline
from areal_lite.train.model import load_model
from areal_lite.train.offline import OfflineTrainer

EXAMPLES = [Example([2, 3 + index], ([4 + index, 5, 1][: 2 + index % 2],)) for index in range(6)]
SETTINGS = {"lr": 1e-2, "micro_batch_tokens": 12, "max_grad_norm": 1e9}


@pytest.fixture
def model(tmp_path: Path) -> nn.Module:
    return load_model(save_tiny_model(tmp_path), make_config())


def loop(
    model: nn.Module, examples: list[Example] = EXAMPLES, *, batch_size: int | None = None, ranks: int = 1, **run: Any
) -> OfflineTrainer:
    batch = {"batch_size": batch_size or len(examples)}
    raw = {"command": "sft", "run": {"steps": 1, **run}, "trainer": {**SETTINGS, **batch, "ranks": ranks}}
    return OfflineTrainer(OfflineConfig.model_validate(raw), model, OfflineData(train=examples, held_out=[]))


def test_loss_and_gradient_are_those_of_completion_tokens(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against one plain forward pass per example with prompts ignored, averaged over all completion tokens.

    Seen failing with prompt tokens in the loss, and with a mean of the examples' means.
    """
    total, count = torch.zeros(()), 0
    for prompt, (output,) in EXAMPLES:
        logits = model(input_ids=torch.tensor([[*prompt, *output]])).logits[0, len(prompt) - 1 : -1]
        total = total + nn.functional.cross_entropy(logits, torch.tensor(output), reduction="sum")
        count += len(output)
    (total / count).backward()
    expected = {name: value.grad.clone() for name, value in model.named_parameters()}
    model.zero_grad()
    gradients: dict[str, torch.Tensor] = {}

    def keep(optimizer: torch.optim.Optimizer) -> None:
        gradients.update({name: value.grad.clone() for name, value in model.named_parameters()})

    monkeypatch.setattr(torch.optim.AdamW, "step", keep)
    assert loop(model).step()["loss"] == pytest.approx(float(total.detach()) / count, rel=1e-5)
    for name, value in expected.items():
        torch.testing.assert_close(gradients[name], value, atol=1e-6, rtol=1e-4)


def test_every_epoch_uses_every_example_once(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    rows = offline.TokenRows
    monkeypatch.setattr(offline, "TokenRows", lambda pairs: rows(seen.append(pair[0][1] - 3) or pair for pair in pairs))
    loop(model, steps=6, batch_size=2).run()
    assert sorted(seen[:6]) == sorted(seen[6:]) == list(range(6))
    assert seen[:6] != seen[6:]
