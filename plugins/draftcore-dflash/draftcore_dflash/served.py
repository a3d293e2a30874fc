"""Read an export as sglang and vLLM do and compute its drafts, written from their conventions alone.

It shares no code with `serving`, `model` or `drafter` (a test checks that), so a mistake of theirs
cannot hide from `draftcore verify`. It is kept plain: no cache, context and block computed anew for
every question. A plugin whose draft has this backbone derives its reader from this one.

Embedding and head are the target's. Inside a block servers take full layers for bidirectional and
sliding ones for causal, unless `is_causal` says otherwise for all. The two differ where a field is
missing: sglang spreads the captured layers evenly and looks for a mask token by name; vLLM captures
three fixed layers and refuses a draft without a mask token. sglang ignores a tensor that nothing
reads; vLLM refuses it. Neither scales or caps logits as the target does; vLLM multiplies them by the
draft's own `logit_scale`.

Shape letters: T tokens of context, S rows of a block, Z = T + S, H hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import draftcore_nn.served as shared
import torch
from draftcore_nn.served import Host, Round, ServedDraft, Suspect, UnservableError
from torch import Tensor

SERVERS = ("sglang", "vllm")
ARCHITECTURE = "DFlashDraftModel"
MASK_TOKEN = "<|MASK|>"  # what sglang looks for where a config names no mask token
ALIASES = {"encoder.fc.": "fc.", "encoder.output_norm_enc.": "hidden_norm."}


@dataclass(frozen=True)
class ServedBackbone:
    """An export as `server` reads it. `suspects` sets `shift` (other layer ids) to try a mistake."""

    server: str
    config: Mapping[str, Any]
    tensors: Mapping[str, Tensor]
    ignored: tuple[str, ...] = ()
    shift: int = 0

    @classmethod
    def of(
        cls, server: str, config: Mapping[str, Any], tensors: Mapping[str, Tensor],
        shapes: Mapping[str, tuple[int, ...]],
    ) -> Self:  # fmt: skip
        """Check the tensors and take those that the server fills."""
        ignored = tuple(sorted(tensors.keys() - shapes.keys()))
        if server == "vllm":  # which would take an embedding or a head of the draft's own, too
            shared.require_no_others(name for name in ignored if name != "t2d")
        unread = f"{server} computes with whatever is in memory there"
        shared.require_tensors(tensors, shapes, unread)
        return cls(server, config, {name: tensors[name] for name in shapes}, ignored)

    @property
    def nested(self) -> Mapping[str, Any]:
        return self.config.get("dflash_config") or {}

    def field(self, name: str) -> Any:
        """Return a field of `dflash_config`, or of the top level where that lacks it."""
        found = self.nested.get(name)
        return self.config.get(name) if found is None else found

    @property
    def facts(self) -> Mapping[str, Any]:
        return {
            "vocab_size": self.config.get("vocab_size"),
            "hidden_size": self.config["hidden_size"],
            "num_target_layers": self.field("num_target_layers"),
            "mask_token_id": self.field("mask_token_id"),
            "rope_theta": shared.read_rope(self.config).get("rope_theta"),
            "dtype": self.config.get("dtype") or self.config.get("torch_dtype"),
        }

    @property
    def block_size(self) -> int:
        return int(self.field("block_size"))

    @property
    def most(self) -> int | None:
        return self.block_size - 1

    def captured(self, host: Host) -> tuple[int, ...]:
        ids, depth = self.field("target_layer_ids"), int(self.config["num_hidden_layers"])
        if ids is None and self.server == "vllm":
            if depth != 3:
                raise UnservableError(
                    "config.json has no dflash_config.target_layer_ids: vLLM captures three layers "
                    f"then, and makes fc for {depth}\n  add the field, or export the draft again"
                )
            ids = [1, host.num_layers // 2 - 1, host.num_layers - 4]
        elif ids is None and depth == 1:
            ids = [host.num_layers // 2]
        elif ids is None:
            span = host.num_layers - 4
            ids = [round(1 + i * span / (depth - 1)) for i in range(depth)]
        return shared.require_layers(tuple(int(layer) + self.shift for layer in ids), host)

    def logits(self, at: Round, drafts_K: Tensor) -> Tensor:
        """Run the block [last, mask, mask, ...]; row k predicts the token at its own position."""
        logits_KV = self.block_hidden(at)[1 : len(drafts_K) + 2] @ at.host.head_VH.T
        return logits_KV * float(self.config.get("logit_scale", 1) if self.server == "vllm" else 1)

    def suspects(self, host: Host, trained: Mapping[str, Any]) -> Iterator[Suspect]:
        yield from shared.shifted_layers(self, "dflash_config.target_layer_ids", "outputs")
        for name, words in (("mask_token_id", "mask token"), ("block_size", "block size")):
            if (value := trained.get(name)) is not None:
                yield Suspect(
                    f"the {words} is {self.field(name)}, and the draft was trained with {value}",
                    self.nesting(**{name: value}),
                )
        for causal in (False, True):
            yield Suspect(
                f"rows of a block were trained with is_causal: {str(causal).lower()}, and "
                f"{self.server} takes its default for the layer types, or what the config says",
                replace(self, config={**self.config, "is_causal": causal}),
            )
        yield from shared.common_suspects(self, host, trained)

    def nesting(self, **change: Any) -> Self:
        """Return the draft with other fields of `dflash_config`."""
        config = {**self.config, "dflash_config": {**self.nested, **change}}
        return replace(self, config=config)

    def block_hidden(self, at: Round) -> Tensor:
        """Run the block over its context; returns normed states, [S, H].

        Queries are the block's, keys and values those of the bare context and the block.
        """
        config, eps, device = self.config, shared.eps_of(self.config), at.tokens_T.device
        read = {name: tensor.to(device) for name, tensor in self.tensors.items()}
        tokens_S = at.tokens_T.new_full((self.block_size,), self._mask_token(at.host))
        tokens_S[0] = at.last
        joined_TH = torch.cat([part.float() for part in at.hidden], -1) @ read["fc.weight"].T
        context_TH = shared.rms_norm(joined_TH, read["hidden_norm.weight"], eps)
        hidden_SH = at.host.embedding_VH[tokens_S]
        for index in range(int(config["num_hidden_layers"])):
            sees_SZ = self._sees(index, len(context_TH), device)
            hidden_SH = self.run_layer(read, f"layers.{index}", hidden_SH, context_TH, sees_SZ)
        return shared.rms_norm(hidden_SH, read["norm.weight"], eps)

    def run_layer(
        self, read: Mapping[str, Tensor], layer: str, hidden_SH: Tensor, context_TH: Tensor,
        sees_SZ: Tensor,
    ) -> Tensor:  # fmt: skip
        """Run the layer of this name; a reader whose layers compute otherwise replaces it."""
        eps = shared.eps_of(self.config)
        x_SH = shared.rms_norm(hidden_SH, read[f"{layer}.input_layernorm.weight"], eps)
        x_ZH = torch.cat([context_TH, x_SH])
        return shared.run_layer(
            self.server, self.config, read, layer, hidden_SH, x_SH, x_ZH, sees_SZ
        )

    def _sees(self, layer: int, length: int, device: torch.device) -> Tensor:
        """Return which positions a row of the block attends to, [S, Z]."""
        kinds = self.config.get("layer_types") or {}
        sliding = bool(kinds) and kinds[layer] == "sliding_attention"
        causal = self.config.get("is_causal")
        if causal is None and self.server == "vllm":
            causal = self.nested.get("causal")
        causal = sliding if causal is None else bool(causal)
        key_Z = torch.arange(length + self.block_size, device=device)
        query_S1 = key_Z[length:, None]
        sees_SZ = (key_Z <= query_S1) if causal else (key_Z >= 0).expand(self.block_size, -1)
        if sliding:
            window = int(shared.require_field(self.config, "sliding_window"))
            sees_SZ = sees_SZ & ((key_Z > query_S1 - window) | (key_Z >= length))
        return sees_SZ

    def _mask_token(self, host: Host) -> int:
        token = self.field("mask_token_id")
        if self.server == "vllm" and self.nested.get("mask_token_id") is None:
            raise UnservableError(
                "config.json has no dflash_config.mask_token_id, and vLLM looks for it nowhere else\n"
                "  add the field, or export the draft again"
            )
        if token is None:
            name = self.field("mask_token") or MASK_TOKEN
            token = host.tokenizer.get_vocab().get(name)
            if token is None:
                raise UnservableError(
                    f"config.json names no mask_token_id, and the target has no token {name!r}\n"
                    "  add dflash_config.mask_token_id"
                )
        if not 0 <= int(token) < host.vocab_size:
            raise UnservableError(
                f"mask_token_id is {token}, and the target's embedding has {host.vocab_size} rows"
            )
        return int(token)


def read(folder: Path, server: str) -> ServedDraft:
    """Read an export; raises UsageError for an unknown server, UnservableError for what it would refuse."""
    shared.require_server(server, SERVERS)
    config, tensors = read_backbone(folder, server)
    for name in tensors:
        if name.startswith(("prefix_gru.", "embed_proj.")):
            raise UnservableError(
                f"there is a tensor {name}, and dflash_config.projector_type is "
                f"{(config.get('dflash_config') or {}).get('projector_type')!r}\n"
                "  servers refuse a head that the config does not name"
            )
    return ServedBackbone.of(server, config, tensors, backbone_shapes(config))


def read_backbone(
    folder: Path, server: str, architecture: str = ARCHITECTURE
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return config.json's content, and the tensors under the names that servers give them."""
    config, stored = shared.read_folder(folder, architecture)
    if "transformer_layer_config" in config:
        raise UnservableError(
            "config.json is of the speculators layout, which has the same architecture name and "
            "which no server reads here\n  export the draft with draftcore"
        )
    shared.require_field({**config, **(config.get("dflash_config") or {})}, "block_size")
    tensors = {}
    for name, tensor in stored.items():
        name = name.removeprefix("model.") if server == "sglang" else name
        for theirs, ours in ALIASES.items():
            name = ours + name.removeprefix(theirs) if name.startswith(theirs) else name
        tensors[name] = tensor
    return config, tensors


def backbone_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return the tensors that a server fills, with the shapes that config.json gives them."""
    hidden = int(shared.require_field(config, "hidden_size"))
    depth = int(shared.require_field(config, "num_hidden_layers"))
    _, _, width = shared.head_shape(config)
    nested = config.get("dflash_config") or {}
    layers = nested.get("target_layer_ids") or config.get("target_layer_ids") or range(depth)
    layer = {
        **shared.layer_shapes(config, hidden),
        **{f"self_attn.{name}.weight": (width,) for name in ("q_norm", "k_norm")},
        **{f"{name}.weight": (hidden,) for name in ("input_layernorm", "post_attention_layernorm")},
    }
    return {
        "fc.weight": (hidden, len(layers) * int(config.get("target_hidden_size") or hidden)),
        "hidden_norm.weight": (hidden,),
        "norm.weight": (hidden,),
        **{f"layers.{i}.{name}": shape for i in range(depth) for name, shape in layer.items()},
    }
