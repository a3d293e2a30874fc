"""The large target of the benchmarks: a random Llama of a billion parameters, as no download is made."""

import shutil
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

QUICKSTART = Path(__file__).parent.parent / "examples" / "quickstart"
LAYERS, WIDTH = 16, 2048


def random_llama(folder: Path, device: str, layers: int = LAYERS, width: int = WIDTH) -> float:
    """Write one, in bfloat16, with the quickstart's tokenizer; returns its billions of parameters."""
    config = LlamaConfig(
        hidden_size=width,
        intermediate_size=8192,
        num_hidden_layers=layers,
        num_attention_heads=32,
        num_key_value_heads=8,
        vocab_size=32_000,
    )
    with torch.device(device):
        model = LlamaForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(folder)
    for file in QUICKSTART.glob("target/tokenizer*.json"):
        shutil.copy(file, folder)
    return sum(p.numel() for p in model.parameters()) / 1e9
