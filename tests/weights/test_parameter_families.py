"""Which parameters an engine did not get: vLLM's own layers, packed as a CPU engine packs them, without an engine; and
a trainer's fingerprints of what it publishes.
"""

import struct
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from rank_processes import run_ranks
from test_gloo_transport import make_publisher
from torch import Tensor, nn
from train_builders import make_config, save_tiny_model
from transformers import AutoModelForCausalLM
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.linear import MergedColumnParallelLinear, QKVParallelLinear, RowParallelLinear
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

from areal_lite.train.model import load_model
from areal_lite.weights import families
from areal_lite.weights.families import ParameterSquares, PublishedValues, bit_squares

HIDDEN, WIDTH, HEAD, VOCABULARY = 160, 96, 32, 100


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


def sums_of(weights: dict[str, Tensor]) -> dict[str, int]:
    return {name: int(bit_squares(value)) for name, value in weights.items()}


@pytest.mark.parametrize(
    ("altered", "name"),
    [
        ("k_proj", "0.self_attn.qkv_proj.weight"),
        ("up_proj", "0.mlp.gate_up_proj.weight"),
        ("down_proj", "0.mlp.down_proj.weight"),
        ("layernorm", "0.input_layernorm.weight"),
        ("lm_head", "lm_head.weight"),
    ],
)
def test_one_number_that_did_not_arrive_is_found(altered: str, name: str) -> None:
    """By one unit in its last place, in a second publication.

    Seen failing with sums of squares of the values, equal within 1e-7.
    """
    published, weights = PublishedValues(), trained()
    engine = {"rollout/0": [Worker(weights).parameter_squares()]}
    assert published.missed(sums_of(weights), engine) == {}
    (changed,) = (value for key, value in weights.items() if altered in key)
    changed.view(-1)[0] *= 1 + 2e-7
    assert published.missed(sums_of(weights), engine) == {"rollout/0": [name]}


def test_fingerprints_fit_into_the_messages_of_an_engine() -> None:
    """Of a wide layer, asked for in many parts. Seen failing with a sum that msgpack does not take."""
    weights = trained()
    weights["lm_head.weight"] *= 1e30
    sums, _ = Worker(weights).parameter_squares()
    assert all(0 <= value < 2**64 for value in sums.values())
    assert sums["lm_head.weight"] == int(bit_squares(weights["lm_head.weight"])) % 2**64


def test_the_first_comparison_says_what_differs_but_blames_nobody() -> None:
    """An engine may hold a parameter otherwise. Seen failing with every difference taken for a loss, and with the
    parameters of linear layers, which are empty once packed."""
    published, weights = PublishedValues(), trained()
    engine = Worker(weights).parameter_squares()
    weights["model.layers.0.mlp.up_proj.weight"] *= 2
    assert published.missed(sums_of(weights), {"rollout/0": [engine]}) == {}
    assert published.unequal("rollout/0") == ["0.mlp.gate_up_proj.weight"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("chunk", [1, 7, 2**20])
def test_a_fingerprint_is_the_sum_of_the_squares_of_the_bits(
    dtype: torch.dtype, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By Python's integers; zeros and subnormal numbers are nothing. Seen failing with negative zeros that count."""
    monkeypatch.setattr(families, "_CHUNK", chunk)
    values = torch.randn(6, 5, generator=torch.Generator().manual_seed(0)).to(dtype)
    bits = [struct.unpack("<i", struct.pack("<f", value))[0] for value in values.flatten().tolist()]
    expected = sum(bit**2 for bit in bits) % 2**64
    for same in (values, values.t(), torch.cat([values, torch.zeros(2, 5, dtype=dtype)]), values[torch.randperm(6)]):
        assert int(bit_squares(same)) % 2**64 == expected
    assert int(bit_squares(torch.tensor([0.0, -0.0, 1e-40, -1e-40]))) == 0
    assert sum(int(bit_squares(part)) for part in values.split(4)) % 2**64 == expected
    assert int(bit_squares(torch.tensor(1.0))) == 0x3F800000**2


def test_parts_in_several_processes_are_added_up() -> None:
    """But for what all have alike. Seen failing with norms added up."""
    parts = [{"layers.0.mlp.down_proj.weight": half, "norm.weight": 3} for half in (1, 4)]
    sent, published = {"layers.0.mlp.down_proj.weight": 5, "norm.weight": 3}, PublishedValues()
    assert published.missed(sent, {"rollout/0": [(part, {}) for part in parts]}) == {}
    assert published.unequal("rollout/0") == []
    changed = {"rollout/0": [(part, {}) for part in parts]}
    assert published.missed(sent | {"norm.weight": 6}, changed) == {"rollout/0": ["norm.weight"]}


def test_experts_of_a_layer_are_one_parameter() -> None:
    """Under whatever name vLLM has them. Seen failing without the cut behind `experts`."""
    held = {f"model.layers.{layer}.mlp.experts.w{part}_weight": 2 for layer in range(2) for part in (13, 2)}
    sent = {f"model.layers.{i}.mlp.experts.{name}_proj": 2 for i in range(2) for name in ("gate_up", "down")}
    published = PublishedValues()
    assert published.missed(sent, {"rollout/0": [(held, {})]}) == {}
    sent["model.layers.1.mlp.experts.down_proj"] = 7
    assert published.missed(sent, {"rollout/0": [(held, {})]}) == {"rollout/0": ["1.mlp.experts"]}


def test_what_an_engine_never_held_alike_must_change_when_it_is_published() -> None:
    """Quantised, transformed or under another name: `A_log` of a state-space model is `A` in vLLM.

    Seen failing with parameters compared only where both sides have a name in common.
    """
    published = PublishedValues()

    def missed(a_log: int, weight: int, held_a: int, held_weight: int) -> list[str]:
        sent = {"layers.0.mixer.A_log": a_log, "layers.0.mixer.in_proj.weight": weight}
        held = {"layers.0.mixer.A": held_a, "layers.0.mixer.in_proj.weight": held_weight}
        return published.missed(sent, {"rollout/0": [(held, {})]}).get("rollout/0", [])

    assert missed(1, 2, 30, 40) == []
    assert missed(2, 3, 31, 41) == []
    assert missed(2, 3, 31, 41) == []
    assert missed(2, 4, 31, 41) == ["0.mixer.in_proj.weight"]
    assert missed(3, 4, 31, 41) == ["parameters with other names in the engine"]


def test_a_tied_output_layer_is_compared_where_the_engine_has_a_copy_of_it() -> None:
    """Seen failing with the trainer's second name for one parameter among those that must change in the engine."""
    sent, copy = {"model.embed_tokens.weight": 5, "lm_head.weight": 5}, {"lm_head.weight": 5}
    held = {"model.embed_tokens.weight": 5}
    with_copy, without = PublishedValues(), PublishedValues()
    assert with_copy.missed(sent, {"rollout/0": [(held | copy, {})]}) == {}
    assert without.missed(sent, {"rollout/0": [(held, {})]}) == {}
    sent, held = dict.fromkeys(sent, 6), dict.fromkeys(held, 6)
    assert without.missed(sent, {"rollout/0": [(held, {})]}) == {}
    assert with_copy.missed(sent, {"rollout/0": [(held | copy, {})]}) == {"rollout/0": ["lm_head.weight"]}


def test_an_engine_that_was_restarted_is_held_to_what_others_hold() -> None:
    """It has the weights of the start, which it did not have the last time. Seen failing with changes alone."""
    published, held = PublishedValues(), {"norm.weight": 4}
    assert published.missed(held, {"rollout/0": [(held, {})], "rollout/1": [(held, {})]}) == {}
    new = {"rollout/0": [({"norm.weight": 5}, {})], "rollout/1": [({"norm.weight": 1}, {})]}
    assert published.missed({"norm.weight": 5}, new) == {"rollout/1": ["norm.weight"]}


# --- fingerprints of several ranks: rank 0 has those of the whole model ---


def check(rank: int, world_size: int, folder: str, mesh: dict[str, int]) -> None:
    config = make_config(trainer={"ranks": world_size, "mesh": mesh}, model={"compute_dtype": "bfloat16"})
    model = load_model(folder, config)
    publisher = make_publisher(model, dtype=torch.bfloat16, rank=rank)
    whole = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    expected = {name: int(bit_squares(value.bfloat16())) for name, value in whole.state_dict().items()}
    assert "lm_head.weight" in expected
    found = publisher.squares()
    assert rank or found == expected


@pytest.mark.parametrize("mesh", [{}, {"replicate": 2}, {"tensor": 2}])
def test_rank_0_has_the_sums_of_the_whole_model(tmp_path: Path, mesh: dict[str, int]) -> None:
    """Sharded, copied, split by tensor; a tied output layer has both its names.

    Seen failing with the sums of copies added up, and with the first name alone.
    """
    folder = str(save_tiny_model(tmp_path / "model", tie_embeddings=True, num_key_value_heads=2))
    run_ranks(check, folder, mesh, mesh=mesh)
