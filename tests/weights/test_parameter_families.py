"""Which families an engine has otherwise: vLLM's own layers, packed as a CPU engine packs them, without an engine."""

from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.linear import MergedColumnParallelLinear, QKVParallelLinear, RowParallelLinear
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

from areal_lite.weights.families import ParameterSquares, differing, squares

HIDDEN, WIDTH, HEAD, VOCABULARY = 64, 96, 32, 100


class Worker(ParameterSquares):
    """The process of an engine with one layer."""

    def __init__(self, weights: dict[str, Tensor]) -> None:
        self.model_config = SimpleNamespace(dtype=torch.float32)
        model, layer, attention, mlp = (nn.Module() for _ in range(4))
        own: dict[str, Any] = {"bias": False, "params_dtype": torch.float32, "disable_tp": True}
        alone = mock.patch("vllm.distributed.parallel_state._TP", SimpleNamespace(rank_in_group=0, world_size=1))
        with set_current_vllm_config(VllmConfig()), alone:
            attention.qkv_proj = QKVParallelLinear(HIDDEN, HEAD, 2, 1, **own)
            mlp.gate_up_proj = MergedColumnParallelLinear(HIDDEN, [WIDTH, WIDTH], **own)
            mlp.down_proj = RowParallelLinear(WIDTH, HIDDEN, **own)
            model.lm_head = ParallelLMHead(VOCABULARY, HIDDEN, params_dtype=torch.float32, disable_tp=True)
        layer.input_layernorm, layer.self_attn, layer.mlp = nn.LayerNorm(HIDDEN, bias=False), attention, mlp
        model.layers = nn.ModuleList([layer])
        model.packed_modules_mapping = {
            "qkv_proj": ["q_proj", "k_proj", "v_proj"],
            "gate_up_proj": ["gate_proj", "up_proj"],
        }
        self.model = model
        parts = {name.removeprefix("model.layers.0.").removesuffix(".weight"): value for name, value in weights.items()}
        layer.input_layernorm.weight.data.copy_(parts["input_layernorm"])
        for linear, names in (
            (attention.qkv_proj, "qkv"),
            (mlp.gate_up_proj, ("gate", "up")),
            (mlp.down_proj, ["down"]),
        ):
            place = "self_attn" if linear is attention.qkv_proj else "mlp"
            linear.weight.data.copy_(torch.cat([parts[f"{place}.{name}_proj"] for name in names]))
        model.lm_head.weight.data.zero_()[:VOCABULARY] = parts["lm_head"]
        for linear in (attention.qkv_proj, mlp.gate_up_proj, mlp.down_proj, model.lm_head):
            linear.quant_method.process_weights_after_loading(linear)

    def get_model(self) -> nn.Module:
        return self.model


def trained() -> dict[str, Tensor]:
    torch.manual_seed(0)
    shapes = {
        "self_attn.q_proj": (2 * HEAD, HIDDEN), "self_attn.k_proj": (HEAD, HIDDEN), "self_attn.v_proj": (HEAD, HIDDEN),
        "mlp.gate_proj": (WIDTH, HIDDEN), "mlp.up_proj": (WIDTH, HIDDEN), "mlp.down_proj": (HIDDEN, WIDTH),
        "input_layernorm": (HIDDEN,),
    }  # fmt: skip
    layer = {f"model.layers.0.{name}.weight": torch.randn(shape) for name, shape in shapes.items()}
    return layer | {"lm_head.weight": torch.randn(VOCABULARY, HIDDEN)}


@pytest.mark.parametrize(
    ("altered", "family"),
    [
        ("k_proj", "self_attn.qkv_proj.weight"),
        ("up_proj", "mlp.gate_up_proj.weight"),
        ("down_proj", "mlp.down_proj.weight"),
        ("layernorm", "input_layernorm.weight"),
        ("lm_head", "lm_head.weight"),
    ],
)
def test_one_tensor_that_is_another_in_the_engine_is_named(altered: str, family: str) -> None:
    """A single number of it. Seen failing with the parameters of linear layers, which are empty once packed."""
    weights = trained()
    sent = squares(weights.items())
    assert differing(sent, [Worker(weights).parameter_squares()]) == (
        "all 5 parameter families that both have by one name are equal"
    )
    (name,) = (name for name in weights if altered in name)
    weights[name].view(-1)[0] += 0.1
    assert differing(sent, [Worker(weights).parameter_squares()]) == f"the parameter families that differ are {family}"


def test_parts_in_several_processes_are_added_up() -> None:
    """But for what all have alike. Seen failing with norms added up."""
    parts = [{"layers.0.mlp.down_proj.weight": half, "norm.weight": 3.0} for half in (1.0, 4.0)]
    sent = {"layers.0.mlp.down_proj.weight": 5.0, "norm.weight": 3.0}
    assert "all 2 parameter" in differing(sent, [(part, {}) for part in parts])
    assert differing(sent | {"norm.weight": 6.0}, [(part, {}) for part in parts]).endswith("are norm.weight")


def test_experts_and_layers_are_one_family() -> None:
    """Under whatever name vLLM has them. Seen failing without the cut behind `experts`."""
    held = {f"model.layers.{layer}.mlp.experts.w{part}_weight": 2.0 for layer in range(2) for part in (13, 2)}
    sent = {f"model.layers.{i}.mlp.experts.{name}_proj": 2.0 for i in range(2) for name in ("gate_up", "down")}
    assert "all 1 parameter" in differing(sent, [(held, {})])
    sent["model.layers.1.mlp.experts.down_proj"] = 2.1
    assert differing(sent, [(held, {})]).endswith("differ are mlp.experts")
