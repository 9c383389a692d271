"""I4 for every family of models that the docs list: engine and trainer agree, from the folder and after a hand-over.

Weights are sharp: random ones that are small make any two models agree. An engine takes ten seconds to start, so the
tests run two of the families; all of them, for the table of docs/models.md, are measured by

    PYTHONPATH=tests/support python tests/rollout/test_families.py
"""

import json
import sys
import tempfile
from typing import Any

import pytest
import torch
import transformers
from engine_builders import vllm_engine
from places import DOCS
from test_engine_parity import Pair, expected_logprobs, largest_difference, make_config
from torch import nn
from transformers import AutoModelForCausalLM

from areal_lite.data.tokenizer import build_char_tokenizer
from areal_lite.launch.bench.harness import surroundings
from areal_lite.train.model import load_model

VOCABULARY = 100
LIMIT = 1e-3
"""Nats."""
DECODER = {
    "vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 2, "max_position_embeddings": 256, "pad_token_id": 0, "bos_token_id": None,
    "eos_token_id": 1,
}  # fmt: skip
GROUPED = DECODER | {"num_key_value_heads": 1}
WINDOWED = GROUPED | {"head_dim": 32, "sliding_window": 16, "query_pre_attn_scalar": 32}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama": ("Llama", GROUPED),
    "Llama, bfloat16, tied": ("Llama", GROUPED | {"tie_word_embeddings": True, "dtype": "bfloat16"}),
    "Qwen2": ("Qwen2", GROUPED),
    "Qwen3": ("Qwen3", GROUPED | {"head_dim": 32}),
    "Gemma 2": ("Gemma2", WINDOWED | {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 5.0}),
    "Gemma 3": ("Gemma3Text", WINDOWED),
    "GPT-2": ("GPT2", DECODER),
    "Phi": ("Phi", DECODER),
    "Phi-3": ("Phi3", GROUPED),
    "OPT": ("OPT", DECODER | {"ffn_dim": 96, "word_embed_proj_dim": 64}),
    "GPT-NeoX": ("GPTNeoX", DECODER),
    "Qwen3-MoE": ("Qwen3Moe", GROUPED | {
        "head_dim": 32, "moe_intermediate_size": 48, "num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": True,
        "decoder_sparse_step": 1, "mlp_only_layers": [],
    }),
}  # fmt: skip
"""By name: the configuration's class and its settings."""
tokens = torch.randint(2, VOCABULARY, (3, 60), generator=torch.Generator().manual_seed(0)).tolist()
SEQUENCES = [(row[:5], row[5:]) for row in tokens]
"""Longer than a sliding window."""


@torch.no_grad()
def sharpen(model: nn.Module, seed: int) -> None:
    """Give every parameter values that matter."""
    noise = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        size = 1.5 * parameter.shape[-1] ** -0.5 if parameter.ndim > 1 else 0.3
        mean = parameter.mean().round() if parameter.ndim == 1 else 0.0  # a norm's weights are about 1, or 0
        parameter.copy_(mean + size * torch.randn(parameter.shape, generator=noise))


def save_family(family: str, folder: str) -> str:
    kind, settings = FAMILIES[family]
    config = getattr(transformers, f"{kind}Config")(**settings)
    model = AutoModelForCausalLM.from_config(config)
    sharpen(model, seed=0)
    model.save_pretrained(folder)
    build_char_tokenizer("0123456789").save_pretrained(folder)
    return folder


def measure(family: str) -> dict[str, Any]:
    """Return nats between engine and trainer, and what the hand-over changed."""
    with tempfile.TemporaryDirectory() as temporary:
        folder, config = save_family(family, temporary), make_config("gloo")
        with vllm_engine(config, folder) as (engine, background):
            pair = Pair(engine, background, transport="gloo", model_folder=folder)
            pair.model = load_model(folder, config).eval()
            score = [background.call(engine.score(prompt, output)) for prompt, output in SEQUENCES]
            before = expected_logprobs(pair.model, SEQUENCES)
            loaded = largest_difference(score, before)
            sharpen(pair.model, seed=1)
            pair.hand_over(pair.connect())
            after = expected_logprobs(pair.model, SEQUENCES)
            score = [background.call(engine.score(prompt, output)) for prompt, output in SEQUENCES]
            return {
                "family": family,
                "loaded": loaded,
                "handed_over": largest_difference(score, after),
                "moved": largest_difference(before, after),
            }


@pytest.mark.loop
@pytest.mark.parametrize("family", ["Gemma 2", "Qwen3-MoE"])
def test_the_engine_is_the_trainers_model(family: str) -> None:
    """Seen failing with sdpa for Gemma 2, and with experts packed beside their kernel, which leaves them unpacked."""
    row = measure(family)
    assert row["moved"] > 1, row
    assert max(row["loaded"], row["handed_over"]) < LIMIT, row


if __name__ == "__main__":
    path = DOCS / "families.json"
    rows = {row["family"]: row for row in json.loads(path.read_text())["rows"]}
    rows |= {name: measure(name) for name in sys.argv[1:] or FAMILIES}
    path.write_text(json.dumps({**surroundings(), "rows": [rows[name] for name in FAMILIES if name in rows]}, indent=1))
