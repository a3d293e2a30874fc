"""A Qwen3 in plain torch, with the interface of transformers' models: those take seconds to import.

`PlainTarget` runs it in place of transformers' own: the same files, config and tokenizer, the same capture,
caches and masks.

Shape letters: B batch, T tokens, H width, D width of a head.
"""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from draftcore_hf.target import TransformersModel, TransformersTarget
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional
from transformers import AutoConfig, Qwen3Config, cache_utils

from draftcore.contracts.capture import FeatureRequest
from draftcore_sdk.targets import SHAPE, byte_tokenizer, tiny_target

STD = 0.5  # of random weights


class PlainTarget(TransformersTarget):
    """A folder that has a Qwen3 in one file."""

    @cached_property
    def running(self) -> PlainModel:
        return PlainModel(self)

    def load_model(self) -> PlainModel:
        return self.running

    def require_layers(self, request: FeatureRequest, here: bool = False) -> None:
        super().require_layers(request)  # that it loads is known


class PlainModel(TransformersModel):
    """Runs it, frozen."""

    def load(self, spec: TransformersTarget, parts: int) -> Qwen3:
        model = Qwen3(spec.config)
        model.load_state_dict(load_file(Path(spec.path, "model.safetensors")))
        return model.to(spec.dtype)


def open_target(path: str, **options: Any) -> TransformersTarget:
    """Open a folder: a Qwen3 as it is here, others as transformers has them."""
    own = AutoConfig.from_pretrained(path).model_type == "qwen3"
    return (PlainTarget if own else TransformersTarget)(path, **options)


def write(folder: Path, growth: float, unheard: int, **shape: Any) -> Path:
    """Write a target of random weights. Each layer writes `growth` times what the one before it does.

    So no layer's output stands for another's. The head does not read the first `unheard` numbers.
    """
    config = Qwen3Config(**{**SHAPE, **shape}, architectures=["Qwen3ForCausalLM"])
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        model = Qwen3(config)
        for weight in (w for w in model.parameters() if w.ndim > 1):
            weight.normal_(0, STD)
    config.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return save(model.state_dict(), folder, growth, unheard)


def write_other(folder: Path, growth: float, unheard: int, **shape: Any) -> Path:
    """Write one of another family, by `family` and what else `tiny_target` takes."""
    weights = tiny_target(folder, std=STD, **shape) / "model.safetensors"
    return save(load_file(weights), folder, growth, unheard)


def save(tensors: dict[str, Tensor], folder: Path, growth: float, unheard: int) -> Path:
    tensors["lm_head.weight"][:, :unheard] = 0
    for name in tensors:
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensors[name] *= growth ** int(name.partition(".layers.")[2].partition(".")[0])
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


class Qwen3(nn.Module):
    """The whole model; its tensors bear the names that they have in files."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.model = Decoder(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.generation_config = SimpleNamespace(eos_token_id=config.eos_token_id)

    def forward(self, input_ids: Tensor) -> Any:
        return SimpleNamespace(logits=self.lm_head(self.model(input_ids).last_hidden_state))

    def get_decoder(self) -> nn.Module:
        return self.model

    def get_input_embeddings(self) -> nn.Module:
        return self.model.embed_tokens

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head

    def set_experts_implementation(self, name: str) -> None:
        """It has no experts."""

    def generate(
        self, input_ids: Tensor, attention_mask: Tensor, max_new_tokens: int, **_: Any
    ) -> Tensor:
        """Continue left-padded prompts greedily, row by row, by forwards of the whole."""
        new_BT = input_ids.new_empty(len(input_ids), max_new_tokens)
        for prompt_T, mask_T, new_T in zip(input_ids, attention_mask, new_BT, strict=True):
            tokens_T = prompt_T[mask_T.bool()]
            for at in range(max_new_tokens):
                new_T[at] = self(tokens_T[None]).logits[0, -1].argmax()
                tokens_T = torch.cat([tokens_T, new_T[at : at + 1]])
        return torch.cat([input_ids, new_BT], 1)


class Decoder(nn.Module):
    """The embedding, the layers, the final norm."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config, at) for at in range(config.num_hidden_layers))
        self.norm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(
        self, input_ids: Tensor, position_ids: Tensor | None = None,
        attention_mask: Tensor | None = None, past_key_values: Any = None, use_cache: bool = False,
    ) -> Any:  # fmt: skip
        x_BTH, places_T = self.embed_tokens(input_ids), torch.arange(input_ids.shape[1])
        positions_BT = places_T[None] if position_ids is None else position_ids
        if past_key_values is None and use_cache:
            past_key_values = cache_utils.DynamicCache()
        for layer in self.layers:
            x_BTH = layer(x_BTH, positions_BT, attention_mask, past_key_values)
        last = self.norm(x_BTH)
        return SimpleNamespace(last_hidden_state=last, past_key_values=past_key_values)


class Layer(nn.Module):
    """Attention and the feed-forward part."""

    def __init__(self, config: Any, at: int) -> None:
        super().__init__()
        width, inner = config.hidden_size, config.intermediate_size
        self.self_attn = Attention(config, at)
        sizes = {"gate": (width, inner), "up": (width, inner), "down": (inner, width)}
        self.mlp = nn.ModuleDict(
            {f"{name}_proj": nn.Linear(*size, bias=False) for name, size in sizes.items()}
        )
        self.input_layernorm = nn.RMSNorm(width, config.rms_norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(width, config.rms_norm_eps)

    def forward(self, x_BTH: Tensor, *given: Any) -> Tensor:
        x_BTH = x_BTH + self.self_attn(self.input_layernorm(x_BTH), *given)
        gate, up, down = self.mlp.values()
        normed_BTH = self.post_attention_layernorm(x_BTH)
        added: Tensor = down(functional.silu(gate(normed_BTH)) * up(normed_BTH))
        return x_BTH + added


class Attention(nn.Module):
    """Of queries and keys that are normed, then turned by their positions."""

    def __init__(self, config: Any, at: int) -> None:
        super().__init__()
        self.at, self.head_dim = at, config.head_dim
        self.theta = config.rope_parameters["rope_theta"]
        queries, keys = config.num_attention_heads, config.num_key_value_heads
        for name, heads in (("q", queries), ("k", keys), ("v", keys)):
            projection = nn.Linear(config.hidden_size, heads * config.head_dim, bias=False)
            setattr(self, f"{name}_proj", projection)
        self.o_proj = nn.Linear(queries * config.head_dim, config.hidden_size, bias=False)
        self.q_norm = nn.RMSNorm(config.head_dim, config.rms_norm_eps)
        self.k_norm = nn.RMSNorm(config.head_dim, config.rms_norm_eps)

    def forward(self, x_BTH: Tensor, positions_BT: Tensor, mask: Any, cache: Any) -> Tensor:
        projections: Any = (self.q_proj, self.k_proj, self.v_proj)
        q, k, v = (p(x_BTH).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for p in projections)
        q, k = (self.turned(x, positions_BT) for x in (self.q_norm(q), self.k_norm(k)))
        if cache is not None:
            k, v = cache.update(k, v, self.at)
        attend, causal = functional.scaled_dot_product_attention, mask is None
        attended = attend(q, k, v, mask, is_causal=causal, enable_gqa=True)
        output: Tensor = self.o_proj(attended.transpose(1, 2).flatten(2))
        return output

    def turned(self, x: Tensor, positions_BT: Tensor) -> Tensor:
        """Turn the two halves of each head against each other, in fp32 or wider."""
        powers = torch.arange(0, self.head_dim, 2) / self.head_dim
        angles = positions_BT[:, None, :, None] * self.theta**-powers
        one, two = x.to(torch.promote_types(x.dtype, torch.float32)).chunk(2, -1)
        sin, cos = angles.sin(), angles.cos()
        return torch.cat([one * cos - two * sin, two * cos + one * sin], -1).to(x.dtype)
