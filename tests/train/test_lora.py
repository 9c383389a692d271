"""Adapters: their gradients, what is trained, saved and sent, the reference without them, ranks, export, targets."""

from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from families import save_family
from rank_processes import run_ranks
from safetensors.torch import load_file
from torch.distributed.checkpoint import FileSystemReader
from train_builders import make_config, save_tiny_model, shard_of
from transformers import AutoModelForCausalLM

from areal_lite.config.sections import LoraConfig
from areal_lite.errors import CheckpointError, ConfigError
from areal_lite.train.gathers import whole_parameters
from areal_lite.train.lora import add_adapters, model_parameters
from areal_lite.train.routes import check_layers
from areal_lite.train.trainer import Trainer
from areal_lite.weights.publisher import CastSource

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")

LORA = {"lora": {"rank": 4, "alpha": 8.0}}
SEQUENCE = ((2, 3), (4, 5, 6))


def make_trainer(model_folder: str, **sections: Any) -> Trainer:
    return Trainer(make_config(trainer=LORA, **sections), model_folder=model_folder, rank=0)


def adapt(model: Any, *, rank: int) -> None:
    """Add adapters that compute something, with a scale of 2."""
    add_adapters(model, LoraConfig(rank=rank, alpha=2.0 * rank), base_dtype=torch.float32, seed=0)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)


def trained_state(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in trainer.model.named_parameters() if value.requires_grad}


def test_gradients_are_those_of_the_weights_projected(model_folder: str) -> None:
    """With W' = W + s B A, and dW' the gradient of a loss by W': dA = s B^T dW' and dB = s dW' A^T.

    By the chain rule: W'_ij = W_ij + s sum_k B_ik A_kj, so dL/dA_kj = s sum_i B_ik dW'_ij and
    dL/dB_ik = s sum_j A_kj dW'_ij. dW' comes from the plain model with W' in it.

    Seen failing with s left out of `merged`.
    """
    adapted = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    plain: Any = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    adapt(adapted, rank=4)
    whole = dict(whole_parameters(adapted, torch.float32))
    plain.load_state_dict(whole, strict=False)
    tokens = torch.arange(24).view(2, 12) % 12
    losses = [model(input_ids=tokens, labels=tokens).loss for model in (adapted, plain)]
    for loss in losses:
        loss.backward()
    torch.testing.assert_close(losses[0], losses[1])
    layers = [(name, layer) for name, _, layer in model_parameters(adapted) if layer is not None]
    assert len(layers) == 2 * 7
    for name, layer in layers:
        dw, a, b = plain.get_parameter(name).grad, layer.lora_A.default.weight, layer.lora_B.default.weight
        torch.testing.assert_close(a.grad, 2.0 * b.T @ dw, rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(b.grad, 2.0 * dw @ a.T, rtol=1e-4, atol=1e-6)
        assert layer.base_layer.weight.grad is None


@pytest.mark.parametrize("family", ["GPT-2", "Qwen3-MoE"])
def test_merged_weights_compute_what_the_adapters_do(family: str, tmp_path: Path) -> None:
    """Of stacked experts too. Seen failing with the adapters of experts left out, and with B's experts in A's order."""
    folder = save_family(family, str(tmp_path))
    adapted, plain = (AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32) for _ in range(2))
    adapt(adapted, rank=2)
    assert {name for name, _ in CastSource(adapted, torch.float32)} == dict(plain.named_parameters()).keys()
    before = plain(torch.arange(12)[None]).logits
    plain.load_state_dict(dict(whole_parameters(adapted, torch.float32)), strict=False)
    logits, expected = (model(torch.arange(12)[None]).logits for model in (plain, adapted))
    assert (expected - before).abs().max() > 0.5
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-4)


def test_a_step_moves_and_a_checkpoint_has_adapters_alone(model_folder: str, tmp_path: Path) -> None:
    """With their optimiser state. Seen failing with the frozen weights in it. A resume: test_checkpoint.py."""
    trainer = make_trainer(model_folder)
    base = {name: value.clone() for name, value in trainer.model.named_parameters() if not value.requires_grad}
    trainer.train_step(shard_of(0))
    trainer.snapshot()(tmp_path)
    names = FileSystemReader(tmp_path).read_metadata().state_dict_metadata
    assert all(".lora_" in name for name in names)
    assert len([name for name in names if name.startswith("model.")]) == 2 * 7 * 2
    for name, value in base.items():
        assert torch.equal(trainer.model.get_parameter(name), value), name


def test_adapters_of_another_base_are_refused(model_folder: str, tmp_path: Path) -> None:
    """Seen failing without checksums in the fingerprint (and run with no limit on what the model says).

    And without the dtype in the advice, though the base may be kept in another one.
    """
    make_trainer(model_folder).snapshot()(tmp_path / "checkpoint")
    other = make_trainer(save_tiny_model(tmp_path / "other", seed=1), weights={"parity_limit": 0})
    with pytest.raises(CheckpointError, match=r"embed_tokens\.weight must be .* set model.path, .*model.compute_dtype"):
        other.load(tmp_path / "checkpoint")


def test_the_reference_is_the_policy_without_its_adapters(model_folder: str) -> None:
    """No second model, and the same numbers as with one; seen failing with the adapters left on (a KL of 0)."""
    kl = {"kl": "loss", "kl_coef": 0.1, "kl_estimator": "k3"}
    alone = make_trainer(model_folder, objective=kl)
    beside = make_trainer(model_folder, objective=kl | {"reference_path": model_folder})
    assert alone.reference is alone.model
    for version in range(2):
        figures = [trainer.train_step(shard_of(version))["kl_ref"] for trainer in (alone, beside)]
        assert figures[0] == pytest.approx(figures[1], abs=1e-6)
    assert figures[0] > 1e-3
    torch.testing.assert_close(trained_state(alone), trained_state(beside))


def export(rank: int, world_size: int, model_folder: str, out: str, dtype: str) -> None:
    """Train a step on this rank's half of the rows, export, and write down what is sent and what the model scores."""
    config = make_config(trainer={**LORA, "ranks": world_size}, model={"compute_dtype": dtype})
    trainer = Trainer(config, model_folder=model_folder, rank=rank)
    trainer.train_step(shard_of(0, rank=rank, ranks=world_size))
    kinds = {(value.requires_grad, value.dtype) for value in trainer.model.parameters()}
    assert kinds == {(True, torch.float32), (False, getattr(torch, dtype))}
    trainer.export(Path(out))
    results = {"sent": dict(CastSource(trainer.model, torch.float32)), "score": trainer.score([SEQUENCE])[0].tolist()}
    if rank == 0:
        torch.save(results, Path(out) / "results.pt")


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-4), ("bfloat16", 2e-2)])
def test_what_two_ranks_export_and_send_is_what_they_trained(
    model_folder: str, tmp_path: Path, dtype: str, tolerance: float
) -> None:
    """The merged folder and the adapter on its base score as the trainer does; against one rank: test_mesh.py.

    Seen failing with the adapters left out of what is sent, and with each rank's own shards gathered by nobody; with an
    adapter that names neither its base nor its kind.
    """
    run_ranks(export, model_folder, str(tmp_path), dtype)
    results, exported = torch.load(tmp_path / "results.pt"), load_file(tmp_path / "model.safetensors")
    assert results["sent"].keys() == exported.keys() == load_file(Path(model_folder) / "model.safetensors").keys()
    for name, value in exported.items():
        assert torch.equal(results["sent"][name], value.float()), name
    prompt, output = SEQUENCE
    for model in (
        AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32),
        peft.AutoPeftModelForCausalLM.from_pretrained(str(tmp_path / "adapter"), dtype=torch.float32),
    ):
        logits = model(input_ids=torch.tensor([[*prompt, *output]])).logits[0, len(prompt) - 1 : -1]
        logprobs = logits.log_softmax(dim=1).gather(1, torch.tensor(output)[:, None])[:, 0]
        torch.testing.assert_close(logprobs, torch.tensor(results["score"]), rtol=0, atol=tolerance)


def test_targets_must_be_linear_layers_of_the_model(model_folder: str) -> None:
    """Seen failing with every module's name taken for a layer's."""

    def check(*targets: str, folder: Path | None = Path(model_folder)) -> None:
        check_layers(make_config(trainer={"lora": {"targets": targets}}), folder)

    check("q_proj", "mlp.up_proj")
    check("o_proj", folder=None)
    for wrong in ("mlp", "lm_head", "query", "proj"):
        with pytest.raises(ConfigError, match=rf"down_proj, gate_proj, k_proj, .* got '{wrong}'"):
            check(wrong)
