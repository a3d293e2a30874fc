"""Read an export as vLLM does and compute its drafts, written from its conventions alone.

It shares no code with `model` and `drafter`, so that no mistake of theirs hides from `verify`.

Shape letters: K drafted tokens, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from draftcore_nn import served as shared
from draftcore_nn.served import Host, Round, Suspect
from torch import Tensor


@dataclass(frozen=True)
class ServedMlpSpec:
    """An export in vLLM; `suspects` changes config or tensors to try a mistake."""

    config: Mapping[str, Any]
    tensors: Mapping[str, Tensor]
    ignored: tuple[str, ...]
    server: str = "vllm"

    @property
    def facts(self) -> Mapping[str, Any]:
        return {"vocab_size": self.config["vocab_size"], "hidden_size": self.config["emb_dim"]}

    @property
    def most(self) -> int | None:
        return int(self.config["n_predict"])

    def captured(self, host: Host) -> tuple[int, ...]:
        return ()

    def logits(self, at: Round, drafts_K: Tensor) -> Tensor:
        state, logits = at.last_hidden_TH[-1], list[Tensor]()
        if self.config["scale_input"]:
            state = _normed(state) / math.sqrt(2)
        state_weight = 0.5 ** (0.5 / self.config["n_predict"])
        for k, token in enumerate([at.last, *drafts_K.tolist()]):
            read = {name: self.tensors[path] for name, path in _of_head(self.config, k).items()}
            emb_weight = math.sqrt((1 - state_weight**2) * (len(read["bias"]) / 2))
            state = read["proj"] @ state + emb_weight / state_weight * read["emb"][token]
            state = torch.nn.functional.gelu(read["weight"] * _normed(state) + read["bias"])
            logits.append(read["head"] @ state)
        return torch.stack(logits)

    def suspects(self, host: Host, trained: Mapping[str, Any]) -> Iterator[Suspect]:
        scaled = self.config["scale_input"]
        yield Suspect(
            f"scale_input is {scaled}, and the draft was trained with {not scaled}",
            replace(self, config={**self.config, "scale_input": not scaled}),
        )
        for name, tensors in shared.transposed(self.tensors):
            yield Suspect(f"the tensor {name} is transposed", replace(self, tensors=tensors))


def read(folder: Path, server: str) -> ServedMlpSpec:
    """Read an export; raises UsageError for another server, UnservableError for what vLLM refuses."""
    shared.require_server(server, ["vllm"])
    config, stored = shared.read_folder(folder, "MLPSpeculatorPreTrainedModel")
    needed = "emb_dim", "vocab_size", "n_predict"
    width, vocab, heads = (int(shared.require_field(config, name)) for name in needed)
    # What config.json leaves out has vLLM's defaults.
    config = {"inner_dim": 0, "tie_weights": False, "scale_input": False, **config}
    inner = config["inner_dim"] or width
    shapes: dict[str, tuple[int, ...]] = {}
    for k in range(heads):
        of = _of_head(config, k)
        shapes |= {of["emb"]: (vocab, inner), of["head"]: (vocab, inner)}
        shapes |= {of["weight"]: (inner,), of["bias"]: (inner,)}
        shapes[of["proj"]] = (inner, inner if k else width)
    tensors = {name.replace("speculator.", ""): tensor for name, tensor in stored.items()}
    shared.require_tensors(tensors, shapes, "vLLM computes with whatever is in memory there")
    ignored = tuple(sorted(tensors.keys() - shapes.keys()))
    return ServedMlpSpec(config, {name: tensors[name] for name in shapes}, ignored)


def _of_head(config: Mapping[str, Any], k: int) -> dict[str, str]:
    """Return the names of a head's tensors; tied heads share all but the first projection."""
    head, proj = (0, min(k, 1)) if config["tie_weights"] else (k, k)
    names = {part: f"{part}.{head}.weight" for part in ("emb", "head")}
    norm = {part: f"ln.{head}.{part}" for part in ("weight", "bias")}
    return {**names, **norm, "proj": f"proj.{proj}.weight"}


def _normed(x: Tensor) -> Tensor:
    return x * (x.square().mean() + 1e-6).rsqrt()
