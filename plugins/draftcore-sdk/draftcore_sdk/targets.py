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


def tiny_target(
    folder: Path,
    *,
    seed: int = 0,
    std: float = 0.1,
    chat_template: str | None = CHATML,
    **config: Any,
) -> Path:
    """Write a Qwen3-shaped model with byte-level tokens into `folder`; `config` overrides its shape.

    Weights of std 0.1 are wide enough that greedy continuations differ from prompt to prompt; at
    0.5 they also vary from token to token, and the next token is a clear choice.
    """
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    tokenizer = byte_tokenizer(chat_template)
    shape = {
        "vocab_size": len(tokenizer),
        "hidden_size": 48,
        "intermediate_size": 64,
        "num_hidden_layers": 6,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 512,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "dtype": "float32",
    }
    state = torch.random.get_rng_state()
    torch.manual_seed(seed)
    model = Qwen3ForCausalLM(Qwen3Config(**{**shape, **config}))
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
