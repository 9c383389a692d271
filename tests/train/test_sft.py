"""Supervised learning, and the warm start of the built-in model with its cache."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from train_builders import make_config, save_tiny_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from areal_lite.config.offline import OfflineConfig
from areal_lite.config.recipe import Config, parse_config
from areal_lite.data.completions import Example, OfflineData
from areal_lite.train import offline, warm_start
from areal_lite.train.model import load_model
from areal_lite.train.offline import OfflineTrainer
from areal_lite.train.warm_start import ensure_warm_start

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


@pytest.mark.parametrize(("batch_size", "ranks"), [(7, 1), (1, 2)])
def test_an_impossible_batch_size_is_refused(model: nn.Module, batch_size: int, ranks: int) -> None:
    with pytest.raises(ValueError, match=f"(got |batch_size=){batch_size}"):
        loop(model, batch_size=batch_size, ranks=ranks)


# --- warm start -------------------------------------------------------------------------------------------------------


def tiny_config(**warm: Any) -> Config:
    settings = {"steps": 2, "batch_size": 4, "hidden_size": 32, "num_layers": 1, **warm}
    return parse_config({"model": {"warm_start": settings}, "data": {"arith": {"eval_size": 8, "train_size": 8}}})


@pytest.fixture(autouse=True)
def few_examples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warm_start, "_NUM_EXAMPLES", 32)


def test_warm_start_makes_a_model_folder(tmp_path: Path) -> None:
    steps: list[tuple[int, int]] = []
    config = tiny_config()
    folder = ensure_warm_start(
        config, cache_dir=tmp_path / "cache", progress=lambda done, of, loss: steps.append((done, of))
    )
    assert steps == [(1, 2), (2, 2)]
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.config.vocab_size == len(tokenizer)
    assert model.config.tie_word_embeddings
    assert model.config.eos_token_id == model.generation_config.eos_token_id == tokenizer.eos_token_id
    assert model.config.max_position_embeddings == config.model.max_context
    assert tokenizer.decode(tokenizer.encode("7+25=?")) == "7+25=?"


def test_warm_start_is_cached_by_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same settings train once; another task, carelessness or context gets a folder of its own.

    Seen failing with the carelessness, and with the context length, left out of the hash.
    """
    folder = ensure_warm_start(tiny_config(), cache_dir=tmp_path)
    before = folder.stat().st_mtime_ns
    calls: list[int] = []
    assert ensure_warm_start(tiny_config(), cache_dir=tmp_path, progress=lambda *call: calls.append(1)) == folder
    assert calls == []
    assert folder.stat().st_mtime_ns == before
    monkeypatch.setattr(warm_start, "_learn", lambda *arguments, **keywords: None)
    base = tiny_config().model_dump()
    base["model"]["max_context"] = 256
    terms = tiny_config().model_dump()
    terms["data"]["arith"]["max_terms"] = 3
    others = [tiny_config(carelessness=0.25), tiny_config(lr=1e-4), parse_config(base), parse_config(terms)]
    assert len({ensure_warm_start(other, cache_dir=tmp_path) for other in others} - {folder}) == len(others)


def test_the_run_seed_does_not_change_the_warm_start(tmp_path: Path) -> None:
    """Runs with different seeds start from the same model, and ask for it without disturbing the random state."""
    folder = ensure_warm_start(tiny_config(), cache_dir=tmp_path)
    config = parse_config({**tiny_config().model_dump(), "run": {"seed": 5}})
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    assert ensure_warm_start(config, cache_dir=tmp_path) == folder
    assert ensure_warm_start(tiny_config(carelessness=0.25), cache_dir=tmp_path) != folder
    assert torch.equal(torch.rand(2), expected)


def test_an_interrupted_warm_start_leaves_nothing(tmp_path: Path) -> None:
    """Seen failing with the model written into its final folder directly."""

    def interrupt(done: int, steps: int, loss: float) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ensure_warm_start(tiny_config(), cache_dir=tmp_path, progress=interrupt)
    assert list(tmp_path.iterdir()) == []
    folder = ensure_warm_start(tiny_config(), cache_dir=tmp_path)
    assert json.loads((folder / "config.json").read_text())["model_type"] == "qwen3"


def test_a_faster_process_wins(tmp_path: Path) -> None:
    """When the folder appears while this process still trains, it is used, and nothing is left over."""
    finished = ensure_warm_start(tiny_config(), cache_dir=tmp_path / "other")

    def overtake(done: int, steps: int, loss: float) -> None:
        if done == steps:
            (tmp_path / "cache" / finished.name).mkdir()
            (tmp_path / "cache" / finished.name / "config.json").write_text("{}")

    folder = ensure_warm_start(tiny_config(), cache_dir=tmp_path / "cache", progress=overtake)
    assert [path.name for path in (tmp_path / "cache").iterdir()] == [finished.name]
    assert (folder / "config.json").read_text() == "{}"
