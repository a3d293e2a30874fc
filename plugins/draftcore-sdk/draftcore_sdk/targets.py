"""A target small enough for any test: random weights, real config, tokenizer and chat template."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


SHAPE = {
    "vocab_size": 259,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": 257,
    "pad_token_id": 258,
    "dtype": "float32",
}
SEES = {
    "depth": 1, "num_hidden_layers": 1, "hidden_size": 32, "num_heads": 2, "num_attention_heads": 2,
    "intermediate_size": 32, "image_size": 28, "patch_size": 14, "out_hidden_size": 48,
}  # fmt: skip
EXPERTS = {
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": 16, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
    "n_shared_experts": 1, "shared_expert_intermediate_size": 16,
}  # fmt: skip
LATENT = {
    "q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8,
    "v_head_dim": 8, "head_dim": 8, "num_key_value_heads": 4,
}  # fmt: skip
DELTA = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8,
    "linear_value_head_dim": 8, "layer_types": (["linear_attention"] * 2 + ["full_attention"]) * 2,
}  # fmt: skip
MAMBA = {
    "mamba_d_ssm": 48, "mamba_n_heads": 4, "mamba_d_head": 12, "mamba_d_state": 8,
    "mamba_n_groups": 1, "mamba_expand": 1, "mamba_chunk_size": 8,
}  # fmt: skip
KIMI = {
    "num_heads": 2, "head_dim": 8, "short_conv_kernel_size": 4, "full_attn_layers": [3, 6],
    "kda_layers": [1, 2, 4, 5],
}  # fmt: skip
WINDOW = {"sliding_window": 8, "query_pre_attn_scalar": 16}
SHARED = {
    **WINDOW, "layer_types": ["sliding_attention", "full_attention"] * 3, "num_kv_shared_layers": 2,
    "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 259,
}  # fmt: skip
ROPE_3D = {"rope_type": "default", "rope_theta": 10000.0}
NARROW_3D = {"head_dim": 12, "rope_parameters": {**ROPE_3D, "mrope_section": [2, 2, 2]}}
WIDE_3D = {"rope_parameters": {**ROPE_3D, "mrope_section": [4, 2, 2]}}
# By transformers' `model_type`, what a target of few weights sets beside SHAPE: of one that sees, in
# its text part. Any other type can be asked for too, with a `config` of its own.
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": WINDOW,
    "ministral3": {},
    "qwen2": {},
    "qwen3": {},
    "phi3": {},
    "gemma": {"tie_word_embeddings": True},
    "gemma2": {**WINDOW, "tie_word_embeddings": True, "final_logit_softcapping": 3.0},
    "gemma3_text": {**WINDOW, "tie_word_embeddings": True},
    "granite": {"logits_scaling": 4.0},
    "cohere": {"logit_scale": 0.25, "tie_word_embeddings": True},
    "cohere2": {**WINDOW, "tie_word_embeddings": True},
    "olmo2": {},
    "olmo3": WINDOW,
    "glm4": {},
    "exaone4": WINDOW,
    "smollm3": {},
    "starcoder2": {},
    "gpt_neox": {},
    "apertus": {},
    "seed_oss": {},
    "nemotron": {},
    "hunyuan_v1_dense": {},
    "qwen2_moe": EXPERTS,
    "qwen3_moe": EXPERTS,
    "mixtral": EXPERTS,
    "gpt_oss": {**EXPERTS, **WINDOW},
    "minimax_m2": EXPERTS,
    "glm4_moe": EXPERTS,
    "olmoe": {**EXPERTS, "head_dim": 12},
    "granitemoe": {**EXPERTS, "logits_scaling": 4.0},
    "ernie4_5_moe": EXPERTS,
    "llama4_text": {**EXPERTS, "intermediate_size_mlp": 64, "attention_chunk_size": 8},
    "deepseek_v2": {**EXPERTS, **LATENT},
    "deepseek_v3": {**EXPERTS, **LATENT},
    "qwen3_next": {**EXPERTS, **DELTA},
    "qwen3_5_text": DELTA,
    "qwen3_5_moe_text": {**EXPERTS, **DELTA},
    "falcon_h1": {**MAMBA, "lm_head_multiplier": 0.5},
    "bamba": {**MAMBA, "attn_layer_indices": [2, 5]},
    "granitemoehybrid": {
        **MAMBA, **EXPERTS, "shared_intermediate_size": 16, "layer_types": ["mamba", "attention"] * 3
    },
    "lfm2": {"full_attn_idxs": [2, 5], "block_auto_adjust_ff_dim": False},
    "olmo_hybrid": DELTA,
    "qwen2_vl": NARROW_3D,
    "qwen2_5_vl": NARROW_3D,
    "qwen3_vl": WIDE_3D,
    "qwen3_vl_moe": {**EXPERTS, **WIDE_3D},
    "qwen3_5": DELTA,
    "gemma3": WINDOW,
    "gemma4": {**SHARED, "global_head_dim": 16},
    "mistral3": {},
    "llama4": {**EXPERTS, "intermediate_size_mlp": 64, "attention_chunk_size": 8},
    "glm4v": NARROW_3D,
    "paligemma": {},
    "internvl": {},
    "llava": {},
    "nemotron_h": {
        **EXPERTS, "mamba_num_heads": 4, "mamba_head_dim": 8, "ssm_state_size": 8, "n_groups": 1,
        "chunk_size": 8, "hybrid_override_pattern": "M*-M*-", "num_hidden_layers": 6,
    },
    "kimi_linear": {**EXPERTS, **LATENT, "linear_attn_config": KIMI},
    "gemma3n_text": {**SHARED, "activation_sparsity_pattern": None},
    "jamba": {
        **EXPERTS, "attn_layer_period": 3, "attn_layer_offset": 2, "mamba_d_state": 8,
        "mamba_dt_rank": 8,
    },
    "minimax": EXPERTS,
    "deepseek_v32": {**EXPERTS, **LATENT, "index_n_heads": 2, "index_head_dim": 16, "index_topk": 512},
    "deepseek_v4": {**EXPERTS, **LATENT},
    "longcat_flash": {**EXPERTS, **LATENT},
    "phi": {},
    "gpt2": {"n_embd": 48, "n_head": 4, "n_layer": 6},
    "bloom": {"n_head": 4},
    "mamba2": {"num_heads": 4, "head_dim": 24, "state_size": 8, "n_groups": 1},
}  # fmt: skip


def tiny_target(
    folder: Path,
    family: str = "qwen3",
    *,
    seed: int = 0,
    std: float = 0.1,
    chat_template: str | None = CHATML,
    **config: Any,
) -> Path:
    """Write a model of a family, with byte-level tokens, into `folder`; `config` overrides its shape.

    Weights of std 0.1 are wide enough that greedy continuations differ from prompt to prompt; at
    0.5 they also vary from token to token, and the next token is a clear choice.
    """
    import torch
    from transformers import (
        CONFIG_MAPPING,
        MODEL_FOR_CAUSAL_LM_MAPPING,
        MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    )

    tokenizer = byte_tokenizer(chat_template)
    shape = {**SHAPE, **FAMILIES.get(family, {}), **config}
    kind, models = CONFIG_MAPPING[family], MODEL_FOR_CAUSAL_LM_MAPPING
    if kind in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING:
        models, parts = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING, kind()
        shape["model_type"] = parts.text_config.model_type
        tied = shape["tie_word_embeddings"]
        shape = {"text_config": shape, "tie_word_embeddings": tied}
        if parts.vision_config is not None:
            shape["vision_config"] = {**SEES, "model_type": parts.vision_config.model_type}
    state = torch.random.get_rng_state()
    torch.manual_seed(seed)
    made = kind(**shape)
    model = models[kind](made)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, std)
    torch.random.set_rng_state(state)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def byte_tokenizer(chat_template: str | None = CHATML) -> Any:
    """A tokenizer of 256 bytes and three special tokens; it can encode any text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {symbol: index for index, symbol in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>", "<|endoftext|>"])
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>"
    )
    wrapped.chat_template = chat_template
    return wrapped


def conversations(file: Path, answers: Sequence[str] | int) -> Path:
    """Write single-turn conversations as JSONL: the given answers, or that many made-up ones."""
    if isinstance(answers, int):
        answers = [f"{'abcdefgh'[i % 8] * (3 + i % 7)} is answer {i * i}" for i in range(answers)]
    lines = [
        {
            "messages": [
                {"role": "user", "content": f"q{i}?"},
                {"role": "assistant", "content": answer},
            ]
        }
        for i, answer in enumerate(answers)
    ]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file
