"""The model: an embedding, layers of a gated recurrence, a final norm and a head, in plain torch.

What a layer knows of the tokens before is one state per row: its recurrence's last output.

Shape letters: B rows, T tokens, H width, V vocabulary.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn


@dataclass(frozen=True)
class TinyConfig:
    """The content of config.json, by the names that draft models know sizes by.

    A recurrence has no bound; `max_position_embeddings` is the length up to which the model was trained.
    """

    vocab_size: int = 40
    hidden_size: int = 48
    num_hidden_layers: int = 4
    max_position_embeddings: int = 128
    rms_norm_eps: float = 1e-6
    end_tokens: tuple[int, ...] = (0,)
    model_type: str = "tinylm"

    @classmethod
    def read(cls, folder: Path) -> TinyConfig:
        data = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        return cls(**{**data, "end_tokens": tuple(data["end_tokens"])})


class Layer(nn.Module):
    """A GRU over the normed input, added to it. Its outputs are its states."""

    def __init__(self, config: TinyConfig) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.gru = nn.GRU(config.hidden_size, config.hidden_size, batch_first=True)

    def forward(self, hidden_BTH: Tensor, state_BH: Tensor) -> tuple[Tensor, Tensor]:
        """Return the layer's output and the state after each token, [B, T, H] both."""
        states_BTH, _ = self.gru(self.norm(hidden_BTH), state_BH[None].contiguous())
        return hidden_BTH + states_BTH, states_BTH


class TinyLM(nn.Module):
    """The language model. `forward` gives all that anybody asks of it, and `head` the logits."""

    def __init__(self, config: TinyConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_hidden_layers))
        self.norm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def forward(
        self, tokens_BT: Tensor, states: Sequence[Tensor] | None = None
    ) -> tuple[dict[str, Tensor], list[Tensor]]:
        """Read tokens on from a state per layer, [B, H], or from none.

        Returns the embeddings, the output of each layer and the last state, by the names of features, and
        per layer the state after each token, [B, T, H].
        """
        hidden_BTH = self.embedding(tokens_BT)
        states = states or [hidden_BTH.new_zeros(hidden_BTH[:, 0].shape)] * len(self.layers)
        taken, after = {"embeddings": hidden_BTH}, list[Tensor]()
        for number, (layer, state_BH) in enumerate(zip(self.layers, states, strict=True)):
            hidden_BTH, states_BTH = layer(hidden_BTH, state_BH)
            taken[f"hidden.{number}"] = hidden_BTH
            after.append(states_BTH)
        return {**taken, "last_hidden": self.norm(hidden_BTH)}, after


def save(model: TinyLM, folder: Path) -> None:
    """Write config.json and model.safetensors."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file(model.state_dict(), folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(asdict(model.config), indent=1), "utf-8")


def load(folder: Path) -> TinyLM:
    """Read what `save` wrote."""
    weights = load_file(folder / "model.safetensors")
    with torch.random.fork_rng(devices=[]):  # a run's random numbers do not depend on its target
        model = TinyLM(TinyConfig.read(folder))
    model.load_state_dict(weights)
    return model
