"""Tiny models of the families that the docs list, with sharp weights: small random ones make any two models agree."""

from typing import Any

import torch
import transformers
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

from areal_lite.data.tokenizer import build_char_tokenizer

VOCABULARY = 100
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
    "GLM-4-MoE": ("Glm4Moe", GROUPED | {
        "head_dim": 32, "moe_intermediate_size": 48, "n_routed_experts": 4, "num_experts_per_tok": 2,
        "num_mtp_layers": 0,
    }),
}  # fmt: skip
"""By name: the configuration's class and its settings. benchmarks/bench_families.py adds further ones."""


@torch.no_grad()
def sharpen(model: nn.Module, seed: int) -> None:
    """Give every parameter, and every buffer that is saved with them, values that matter."""
    noise = torch.Generator().manual_seed(seed)
    for parameter in model.state_dict().values():
        size = 1.5 * parameter.shape[-1] ** -0.5 if parameter.ndim > 1 else 0.3
        own = parameter.to_local() if isinstance(parameter, DTensor) else parameter  # of one rank the whole
        mean = own.mean().round() if own.ndim == 1 else 0.0  # a norm's weights are about 1, or 0
        own.copy_(mean + size * torch.randn(own.shape, generator=noise))


def save_model(kind: str, settings: dict[str, Any], folder: str) -> str:
    """Save a model and a tokenizer; returns the folder."""
    model = AutoModelForCausalLM.from_config(getattr(transformers, f"{kind}Config")(**settings))
    sharpen(model, seed=0)
    model.save_pretrained(folder)
    build_char_tokenizer("0123456789").save_pretrained(folder)
    return folder


def save_family(family: str, folder: str, **others: Any) -> str:
    """Save a model with `others` among its settings."""
    kind, settings = FAMILIES[family]
    return save_model(kind, settings | others, folder)
