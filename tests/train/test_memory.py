"""What a recipe takes: traced sizes against published ones, a deeper trace, and what a process really takes."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from places import ROOT
from resident import recipe
from train_builders import make_config
from transformers import AutoConfig, AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

from areal_lite.config.recipe import Config
from areal_lite.errors import ConfigError
from areal_lite.train import memory, pieces

PUBLISHED = {
    "Qwen/Qwen2.5-0.5B": 494_032_768,
    "Qwen/Qwen2.5-1.5B": 1_543_714_304,
    "Qwen/Qwen2.5-3B": 3_085_938_688,
    "Qwen/Qwen2.5-7B": 7_615_616_512,
    "Qwen/Qwen2.5-14B": 14_770_033_664,
    "Qwen/Qwen2.5-32B": 32_763_876_352,
    "Qwen/Qwen3-0.6B": 596_049_920,
    "Qwen/Qwen3-1.7B": 1_720_574_976,
    "Qwen/Qwen3-4B": 4_022_468_096,
    "Qwen/Qwen3-8B": 8_190_735_360,
    "Qwen/Qwen3-14B": 14_768_307_200,
    "Qwen/Qwen3-32B": 32_762_123_264,
    "Qwen/Qwen3-30B-A3B": 30_532_122_624,
    "meta-llama/Llama-3.2-1B": 1_235_814_400,
    "meta-llama/Llama-3.2-3B": 3_212_749_824,
    "meta-llama/Llama-3.1-8B": 8_030_261_248,
    "meta-llama/Llama-3.1-70B": 70_553_706_496,
    "mistralai/Mistral-7B-v0.3": 7_248_023_552,
}
"""Parameters, as the models' own pages count them."""


def architecture(*, num_layers: int = 4, width: int = 256) -> Qwen3Config:
    return Qwen3Config(
        vocab_size=4000,
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=1,
    )


def sharded_recipe(**trainer: Any) -> Config:
    return make_config(
        groups=2,
        model={"max_context": 256, "compute_dtype": "bfloat16"},
        rollout={"max_new_tokens": 200},
        trainer={"ranks": 4, "minibatches": 1, "micro_batch_tokens": 1024, "activation_checkpointing": True} | trainer,
    )


@pytest.fixture(scope="module")
def plain() -> memory.RankSize:
    """What a rank of the sharded recipe takes."""
    return memory.rank_size(architecture(), sharded_recipe())


def test_known_models_have_as_many_parameters_as_their_makers_say() -> None:
    """Seen failing with Qwen3-4B untied."""
    counted = {}
    for name, settings in memory.KNOWN["models"].items():
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**settings))
        counted[name] = sum(parameter.numel() for parameter in model.parameters())
    assert counted == PUBLISHED


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "total", "active"),
    [("deepseek_v3", 671.03, 36.63), ("gpt_oss", 116.83, 5.13), ("mixtral", 46.70, 12.75)],
)
def test_of_experts_only_those_chosen_work(family: str, total: float, active: float) -> None:
    """Billions, as their makers count DeepSeek-V3 (37 with embeddings), gpt-oss-120b and Mixtral-8x7B (12.9 with them).

    Each family has another name for the number of experts. Seen failing with `num_experts` alone, 1 where it is
    missing: 5.3 trillion for DeepSeek-V3, and a speed 139 times too low.
    """
    with torch.device("meta"):
        found = memory.num_parameters(AutoModelForCausalLM.from_config(AutoConfig.for_model(family)))
    assert (found["all"] / 1e9, found["active"] / 1e9) == pytest.approx((total, active), abs=0.01)


def test_experts_that_are_not_counted_in_the_config_are_asked_for() -> None:
    """Seen failing with 1 in place of what is unknown."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model("deepseek_v2", num_hidden_layers=1))
    assert model.config.num_experts_per_tok is None
    with pytest.raises(ConfigError, match=r"expected num_experts_per_tok and one of num_experts, .* got None and 64"):
        memory.num_parameters(model)


def test_latent_attention_keeps_one_vector_for_all_heads() -> None:
    """DeepSeek-V3: 61 layers of 512 + 64 numbers in bfloat16 are 70.272 KB a token (arXiv 2505.09343, table 1).

    Seen failing with a key and a value of every head: 28 times as much.
    """
    config = make_config(model={"compute_dtype": "bfloat16"})
    assert memory.kv_bytes_per_token(AutoConfig.for_model("deepseek_v3"), config) == 70272


def test_two_depths_say_what_a_full_trace_says() -> None:
    """Seen failing with a line too flat."""
    deep, config = architecture(num_layers=8), sharded_recipe()
    line, full = memory.rank_size(deep, config), memory.rank_size(deep, config, depths=(8, 8))
    assert line.num_parameters == full.num_parameters == 8 * line.layer_parameters + line.outer_parameters
    assert line.outer_parameters == 4000 * 256 + 256  # tied embeddings and a norm
    assert line.peak == pytest.approx(full.peak, rel=0.01)
    states = 4 * full.num_parameters / 4
    assert full.parts["optimiser"] == pytest.approx(2 * states, rel=0.01)
    assert full.parts["gradients"] == pytest.approx(states, rel=0.01)
    # A checkpoint of each layer: 4 rows of 256 tokens of width 256, two bytes each.
    assert line.parts["activations kept by layers"] == pytest.approx(8 * 4 * 256 * 256 * 2, rel=0.02)


@pytest.mark.slow
def test_two_pieces_of_the_logits_say_what_all_say(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen failing with one piece."""
    monkeypatch.setattr(pieces, "_PIECE_ELEMENTS", 4000 * 250)
    sizes = []
    for most in (memory._TRACED_PIECES, 1000):
        monkeypatch.setattr(memory, "_TRACED_PIECES", most)
        sizes.append(memory.rank_size(architecture(), sharded_recipe()).parts)
    assert sizes[0] == pytest.approx(sizes[1], rel=0.001)


@pytest.mark.slow
def test_the_estimate_is_what_a_process_takes(tmp_path: Path) -> None:
    """Seen failing without the second micro-batch, whose gradients wait.

    Whatever is freed goes back to the system here: as set by itself, glibc keeps some of it, 20 to 60 % on top.
    """
    Qwen3ForCausalLM(architecture()).save_pretrained(tmp_path)
    width, rows = 256, 8
    child = subprocess.run(
        [sys.executable, ROOT / "tests/support/resident.py", tmp_path, str(width), str(rows)],
        capture_output=True, text=True, check=True,
        env=os.environ | {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": "65536"},
    )  # fmt: skip
    size = memory.rank_size(architecture(), recipe(width=width, rows=rows))
    assert size.peak == pytest.approx(int(child.stdout), rel=0.1)


@pytest.mark.slow
def test_reference_and_critic_are_beside_the_policy(plain: memory.RankSize) -> None:
    """Seen failing with a critic whose moments are left out."""
    config = sharded_recipe().model_copy(update={"objective": make_config(objective={"preset": "ppo"}).objective})
    both = memory.rank_size(architecture(), config)
    assert both.parts["critic"] == 12 * plain.num_parameters / 4
    assert "reference model" in both.parts
    assert "reference model" not in plain.parts


@pytest.mark.slow
def test_what_is_offloaded_waits_in_the_host(plain: memory.RankSize) -> None:
    """Weights, gradients and two moments in float32; nothing else changes. Seen failing with gradients on the GPU."""
    offloaded = memory.rank_size(architecture(), sharded_recipe(offload=True))
    assert offloaded.host == pytest.approx(16 * plain.num_parameters / 4, rel=0.01)
    assert offloaded.peak == pytest.approx(plain.peak - offloaded.host, rel=0.01)
    assert offloaded.parts["optimiser"] == 0


def test_engines_and_hand_overs_by_hand() -> None:
    """A token's cache: keys and values, 4 layers, 2 heads of 64, 2 bytes. Seen failing with all 4 heads.

    Rank 0 holds a layer and what is outside of layers, or over ipc all copies. Seen failing with the largest parameter.
    """
    config = make_config(
        run={"device": "cuda"}, model={"max_context": 256}, weights={"transport": "nccl"},
        rollout={"max_new_tokens": 128, "slots": 10, "gpu_memory_fraction": 0.5, "workers": 3},
        trainer={"minibatches": 1, "activation_checkpointing": True},
    )  # fmt: skip
    shape = architecture()
    size = memory.RankSize(
        num_parameters=1000, num_active=900, largest_parameter=500, layer_parameters=90, outer_parameters=640, parts={}
    )
    assert memory.handover_bytes(size, config) == 2 * (640 + 90) + 2**29
    over_ipc = config.model_copy(update={"weights": config.weights.model_copy(update={"transport": "ipc"})})
    assert memory.handover_bytes(size, over_ipc) == 2 * 1000
    assert memory.kv_bytes_per_token(shape, config) == 2 * 4 * 2 * 64 * 2
    parts = memory.engine_parts(shape, size, config, gib=2)
    assert parts["parameters"] == 2000
    assert parts["transfers"] == 2 * 500 + 2**29
    assert sum(parts.values()) == 2**30
    # A step reads 2000 bytes of weights and 10 caches of 256 - 64 tokens: it makes 10 tokens, in each of 3 engines.
    read = 2000 + 10 * 192 * 2048
    speed = memory.engine_tokens_per_s(shape, size, config, gib=2, tflops=1e9, tb_per_s=1e-12)
    assert speed == pytest.approx(3 * 10 / read)
    # Three passes and one again for the checkpoints; 4 heads of 64 look at half the context, twice, in each layer.
    flops = 4 * (2 * 900 + 2 * 2 * 4 * 4 * 64 * 128)
    assert memory.trainer_tokens_per_s(shape, size, config, tflops=1e-12) == pytest.approx(1 / flops)


@pytest.mark.parametrize(
    ("name", "hidden_size"),
    [
        ("meta-llama/Llama-3.1-8B-Instruct", 4096),
        ("Qwen/Qwen3-30B-A3B-Instruct-2507", 2048),
        ("Qwen/Qwen3-4B-Base", 2560),
    ],
)
def test_a_model_trained_further_has_the_sizes_of_the_known_one(name: str, hidden_size: int) -> None:
    """Seen failing with exact names alone."""
    assert memory.architecture_of(make_config(model={"path": name})).hidden_size == hidden_size


def test_an_unknown_model_is_named_with_the_nearest() -> None:
    """Seen failing without the suggestion."""
    with pytest.raises(ConfigError, match=r"Qwen2\.5-7b; did you mean Qwen/Qwen2\.5-7B\?"):
        memory.architecture_of(make_config(model={"path": "Qwen/Qwen2.5-7b"}))
