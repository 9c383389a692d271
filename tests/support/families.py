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
"""By name: the configuration's class and its settings."""
MIXTURE = GROUPED | {"head_dim": 32, "num_experts_per_tok": 2}
DEEPSEEK = DECODER | {
    "moe_intermediate_size": 48, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1,
    "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "kv_lora_rank": 16, "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16, "v_head_dim": 16,
}  # fmt: skip
MORE_FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "Mistral": ("Mistral", WINDOWED),
    "Ministral": ("Ministral", WINDOWED),
    "SmolLM3": ("SmolLM3", GROUPED | {"no_rope_layers": [1, 0]}),
    "Gemma": ("Gemma", GROUPED | {"head_dim": 32}),
    "OLMo": ("Olmo", GROUPED),
    "OLMo 2": ("Olmo2", GROUPED),
    "OLMo 3": ("Olmo3", GROUPED | {"sliding_window": 16}),
    "Granite": ("Granite", GROUPED | {
        "embedding_multiplier": 2.0, "logits_scaling": 2.0, "residual_multiplier": 0.5, "attention_multiplier": 0.2,
    }),
    "GLM-4": ("Glm4", GROUPED | {"head_dim": 32}),
    "Exaone 4": ("Exaone4", GROUPED | {
        "sliding_window": 16, "sliding_window_pattern": 2, "layer_types": ["sliding_attention", "full_attention"],
    }),
    "Ernie 4.5": ("Ernie4_5", GROUPED | {"head_dim": 32}),
    "Cohere": ("Cohere", GROUPED),
    "Cohere 2": ("Cohere2", GROUPED | {"sliding_window": 16, "head_dim": 32}),
    "StarCoder 2": ("Starcoder2", GROUPED),
    "StableLM": ("StableLm", GROUPED),
    "Nemotron": ("Nemotron", GROUPED | {"head_dim": 32}),
    "Seed-OSS": ("SeedOss", GROUPED | {"head_dim": 32}),
    "Hunyuan": ("HunYuanDenseV1", GROUPED | {"head_dim": 32}),
    "Mixtral": ("Mixtral", MIXTURE | {"num_local_experts": 4}),
    "OLMoE": ("Olmoe", GROUPED | {"num_experts": 4, "num_experts_per_tok": 2}),
    "Qwen2-MoE": ("Qwen2Moe", MIXTURE | {
        "num_experts": 4, "moe_intermediate_size": 48, "shared_expert_intermediate_size": 48, "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }),
    "Phi-MoE": ("Phimoe", GROUPED | {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "Ernie 4.5 MoE": ("Ernie4_5_Moe", MIXTURE | {
        "moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 48, "moe_num_shared_experts": 1,
        "moe_layer_start_index": 0, "moe_layer_end_index": 1,
    }),
    "Granite-MoE": ("GraniteMoe", GROUPED | {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "DeepSeek-V2": ("DeepseekV2", DEEPSEEK | {"q_lora_rank": None}),
    "DeepSeek-V3": ("DeepseekV3", DEEPSEEK | {"q_lora_rank": 16, "topk_method": "noaux_tc"}),
    "MiniMax-M2": ("MiniMaxM2", MIXTURE | {"num_local_experts": 4, "rotary_dim": 32}),
    "Qwen3-Next": ("Qwen3Next", MIXTURE | {
        "num_experts": 4, "moe_intermediate_size": 48, "shared_expert_intermediate_size": 48, "mlp_only_layers": [],
        "linear_num_value_heads": 2, "linear_num_key_heads": 2, "linear_key_head_dim": 32,
        "linear_value_head_dim": 32, "layer_types": ["linear_attention", "full_attention"], "decoder_sparse_step": 1,
    }),
}  # fmt: skip
"""Further ones, which no test runs."""


@torch.no_grad()
def sharpen(model: nn.Module, seed: int) -> None:
    """Give every parameter, and every buffer that is saved with them, values that matter."""
    noise = torch.Generator().manual_seed(seed)
    for parameter in model.state_dict().values():
        size = 1.5 * parameter.shape[-1] ** -0.5 if parameter.ndim > 1 else 0.3
        own = parameter.to_local() if isinstance(parameter, DTensor) else parameter  # of one rank the whole
        mean = own.mean().round() if own.ndim == 1 else 0.0  # a norm's weights are about 1, or 0
        own.copy_(mean + size * torch.randn(own.shape, generator=noise))


def save_family(family: str, folder: str, **others: Any) -> str:
    """Save a model, `others` among its settings, and a tokenizer; returns the folder."""
    kind, settings = (FAMILIES | MORE_FAMILIES)[family]
    model = AutoModelForCausalLM.from_config(getattr(transformers, f"{kind}Config")(**settings | others))
    sharpen(model, seed=0)
    model.save_pretrained(folder)
    build_char_tokenizer("0123456789").save_pretrained(folder)
    return folder
