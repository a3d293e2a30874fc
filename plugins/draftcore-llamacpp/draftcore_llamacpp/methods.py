"""What llama.cpp serves of our drafts: for each method a table of names, its keys, what it refuses.

What is refused here llama.cpp would serve: its outputs would be right, as the target checks every draft,
and fewer drafts would be accepted than the same draft has elsewhere. So nothing shows it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from draftcore_nn import serving
from draftcore_nn.target import shape_of_config
from importlib_metadata import entry_points
from torch import Tensor

from draftcore.errors import UsageError, raised

GROUP = "draftcore.gguf"  # entry points of other dists: an architecture in config.json, its Method
Config = Mapping[str, Any]
LAYER = {
    "input_layernorm.weight": "attn_norm.weight",
    "self_attn.q_proj.weight": "attn_q.weight",
    "self_attn.k_proj.weight": "attn_k.weight",
    "self_attn.v_proj.weight": "attn_v.weight",
    "self_attn.o_proj.weight": "attn_output.weight",
    "post_attention_layernorm.weight": "ffn_norm.weight",
    "mlp.gate_proj.weight": "ffn_gate.weight",
    "mlp.up_proj.weight": "ffn_up.weight",
    "mlp.down_proj.weight": "ffn_down.weight",
}
NORMED_LAYER = {  # of Qwen3, and of drafts made like it
    **LAYER,
    "self_attn.q_norm.weight": "attn_q_norm.weight",
    "self_attn.k_norm.weight": "attn_k_norm.weight",
}
ELSEWHERE = "serve it with a server whose command is in the export's README.md"


class Method(ABC):
    """A kind of draft, as llama.cpp has it.

    `name` is that of llama.cpp's architecture; the server knows the method as `draft-NAME`, or by
    `served_as` in its place. `outer` and `layer` name the tensors outside and inside of layers; those of
    `optional` may be missing, those of `unread` are left out. `renamed` are prefixes that other writers
    use. `fixed` has fields of config.json, whichever part they are in, with the one value that llama.cpp
    computes; `inner` is that part.
    """

    name: ClassVar[str]
    served_as: ClassVar[str] = ""
    outer: ClassVar[Mapping[str, str]]
    layer: ClassVar[Mapping[str, str]]
    optional: ClassVar[frozenset[str]] = frozenset()
    unread: ClassVar[frozenset[str]] = frozenset()
    renamed: ClassVar[Mapping[str, str]] = {"model.": ""}
    fixed: ClassVar[Mapping[str, Any]] = {}
    inner: ClassVar[str] = ""

    def field(self, config: Config, name: str) -> Any:
        """Return a field of the inner part, or of the top level where that lacks it."""
        found = (config.get(self.inner) or {}).get(name)
        return config.get(name) if found is None else found

    @abstractmethod
    def target_layers(self, config: Config) -> Sequence[int]:
        """Return the layers whose inputs the draft reads."""

    @abstractmethod
    def keys(self, config: Config) -> Mapping[str, Any]:
        """Return the keys beside those that all have; one that begins with a dot belongs to the name."""

    def refusals(self, config: Config) -> Iterator[str]:
        """Yield what else llama.cpp would serve wrongly, each with what to do."""
        return iter(())

    def tensor(self, name: str, tensor: Tensor, config: Config) -> Tensor:
        """Return a tensor of an export as llama.cpp has it."""
        return tensor

    def num_drafts(self, config: Config) -> int | None:
        """Return how many drafts a round must have to be those that were trained; None for any."""
        return None

    def names(self, layers: int) -> dict[str, str]:
        """Return what each tensor of an export is called."""
        inside = {
            f"layers.{i}.{ours}": f"blk.{i}.{theirs}"
            for i in range(layers)
            for ours, theirs in self.layer.items()
        }
        return {**self.outer, **inside}


class Eagle3(Method):
    name = "eagle3"
    inner = "eagle_config"
    outer: ClassVar = {
        "fc.weight": "fc.weight",
        "norm.weight": "output_norm.weight",
        "lm_head.weight": "output.weight",
        "embed_tokens.weight": "token_embd.weight",
        "d2t": "d2t",
    }
    layer: ClassVar = {**LAYER, "hidden_norm.weight": "attn_norm_2.weight"}
    optional = frozenset({"embed_tokens.weight", "d2t"})
    unread = frozenset({"t2d"})
    renamed: ClassVar = {"model.": "", "midlayer.": "layers.0."}
    fixed: ClassVar = {
        "num_hidden_layers": 1, "hidden_act": "silu", "attention_bias": False, "mlp_bias": False,
        "bias": False, "norm_before_residual": False, "norm_before_fc": False,
        "parallel_drafting": False, "logit_scale": 1, "final_logit_softcapping": None,
        "fc_norm": False, "use_aux_norm": False, "norm_output": False,
    }  # fmt: skip

    def target_layers(self, config: Config) -> Sequence[int]:
        name = "eagle_aux_hidden_state_layer_ids"
        outputs = (config.get(self.inner) or {}).get(name) or ()
        return list(config.get(name) or [layer + 1 for layer in outputs])

    def keys(self, config: Config) -> Mapping[str, Any]:
        wide = config.get("target_hidden_size") or config["hidden_size"]
        return {".target_hidden_size": int(wide), ".norm_before_residual": False}

    def refusals(self, config: Config) -> Iterator[str]:
        if (count := len(self.target_layers(config))) != 3:
            yield f"the draft reads {count} layers of the target, and llama.cpp three\n  {ELSEWHERE}"

    def tensor(self, name: str, tensor: Tensor, config: Config) -> Tensor:
        """Give ids for distances, and pairs of rows that turn together for halves."""
        if name == "d2t":
            return tensor.long() + torch.arange(len(tensor))
        heads = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}
        count = next((int(config[field]) for part, field in heads.items() if part in name), 0)
        if not count:
            return tensor
        halves = tensor.reshape(count, 2, len(tensor) // count // 2, tensor.shape[1])
        return halves.transpose(1, 2).reshape(tensor.shape)


class DFlash(Method):
    name = "dflash"
    inner = "dflash_config"
    outer: ClassVar = {
        "fc.weight": "fc.weight",
        "hidden_norm.weight": "enc.output_norm.weight",
        "norm.weight": "output_norm.weight",
    }
    layer: ClassVar = NORMED_LAYER
    renamed: ClassVar = {
        "model.": "",
        "encoder.fc.": "fc.",
        "encoder.output_norm_enc.": "hidden_norm.",
    }
    fixed: ClassVar = {
        "hidden_act": "silu", "attention_bias": False, "logit_scale": 1,
        "final_logit_softcapping": None,
    }  # fmt: skip

    def target_layers(self, config: Config) -> Sequence[int]:
        return [layer + 1 for layer in self.field(config, "target_layer_ids") or ()]

    def keys(self, config: Config) -> Mapping[str, Any]:
        kinds, causal = config.get("layer_types") or [], config.get("is_causal")
        found = {
            "tokenizer.ggml.mask_token_id": int(self.field(config, "mask_token_id")),
            ".block_size": int(self.field(config, "block_size")),
            ".attention.causal": "sliding_attention" in kinds if causal is None else causal,
        }
        if "sliding_attention" not in kinds:
            return found
        sliding = [kind == "sliding_attention" for kind in kinds]
        window = {".attention.sliding_window": int(config["sliding_window"])}
        return {**found, **window, ".attention.sliding_window_pattern": sliding}

    def refusals(self, config: Config) -> Iterator[str]:
        if head := self.field(config, "projector_type"):
            yield f"llama.cpp would leave out the draft's head, {head!r}, in silence\n  {ELSEWHERE}"
        for name in ("mask_token_id", "target_layer_ids", "block_size"):
            if self.field(config, name) is None:
                yield f"the draft's config.json lacks {name}\n  export the draft again"
        if config.get("is_causal") is None and len({*(config.get("layer_types") or [])}) > 1:
            yield (
                "the draft's sliding layers are causal inside a block and the others are not, and "
                "llama.cpp knows one value for all\n"
                f"  train with algorithm.options.is_causal set, or {ELSEWHERE}"
            )

    def num_drafts(self, config: Config) -> int | None:
        """Return those of a whole block: llama.cpp would send a shorter one, which drafts otherwise."""
        return int(self.field(config, "block_size")) - 1


METHODS: Mapping[str, Method] = {
    "LlamaForCausalLMEagle3": Eagle3(),
    "DFlashDraftModel": DFlash(),
}


def method_of(config: Config, folder: Path) -> Method:
    """Return how llama.cpp serves an export; raises UsageError where it is not known to."""
    architecture = (config.get("architectures") or [""])[0]
    if architecture in METHODS:
        return METHODS[architecture]
    offered = entry_points(group=GROUP)
    for entry in offered.select(name=architecture):
        try:
            return entry.load()  # type: ignore[no-any-return]
        except Exception as error:
            raise UsageError(
                f"the entry point {architecture} of {GROUP} cannot be loaded: {raised(error)}\n"
                f"  repair or uninstall {entry.dist.name if entry.dist else 'its dist'}"
            ) from error
    raise UsageError(
        f"llama.cpp is not known to serve the draft in {folder}, a {architecture}\n"
        f"  it serves {', '.join(sorted({*METHODS, *offered.names}))}\n"
        f"  for another, a dist names its table in the entry-point group {GROUP}; or {ELSEWHERE}"
    )


def draft_keys(method: Method, config: Config, folder: Path, target_layers: int) -> dict[str, Any]:
    """Return an export's keys; raises UsageError for what llama.cpp would serve wrongly.

    `target_layers` is how many layers the target has.
    """
    if "transformer_layer_config" in config:
        raise UsageError(
            f"the draft in {folder} is in the layout of speculators\n  export it with draftcore"
        )
    for name, value in method.fixed.items():
        for part in (config, config.get(method.inner) or {}):
            if part.get(name) not in (value, None):
                raise UsageError(
                    f"the draft in {folder} has {name}: {part[name]!r}, and llama.cpp would serve it "
                    f"with {name}: {value!r}, which accepts less\n"
                    f"  train one whose config.json says {name}: {value!r}, or {ELSEWHERE}"
                )
    for refusal in method.refusals(config):
        raise UsageError(f"{folder}: {refusal}")
    layers = [int(layer) for layer in method.target_layers(config)]
    if not all(0 < layer < target_layers for layer in layers):
        raise UsageError(
            f"the draft in {folder} reads the inputs of the target's layers {layers}, and of "
            f"{target_layers} layers llama.cpp gives those of 1 to {target_layers - 1}\n"
            "  use the draft with the target it was trained for"
        )
    found = {**shape_keys(config, folder), ".target_layers": layers, **method.keys(config)}
    return {f"{method.name * key.startswith('.')}{key}": value for key, value in found.items()}


def shape_keys(config: Config, folder: Path) -> dict[str, Any]:
    """Return the keys of sizes, which all decoders have; raises UsageError for a RoPE that is scaled."""
    shape = shape_of_config(config, folder)
    rope = shape["rope"]
    if rope["rope_type"] != "default" or rope.get("partial_rotary_factor", 1) != 1:
        raise UsageError(
            f"{folder} has a RoPE of type {rope['rope_type']}, of "
            f"{rope.get('partial_rotary_factor', 1):g} of a head: that was not tried with llama.cpp\n"
            f"  {ELSEWHERE}"
        )
    return {
        ".context_length": shape["max_position_embeddings"],
        ".embedding_length": shape["hidden_size"],
        ".block_count": int(serving.required(config, "num_hidden_layers", folder)),
        ".feed_forward_length": shape["intermediate_size"],
        ".attention.head_count": shape["num_attention_heads"],
        ".attention.head_count_kv": shape["num_key_value_heads"],
        ".attention.key_length": shape["head_dim"],
        ".attention.value_length": shape["head_dim"],
        ".attention.layer_norm_rms_epsilon": shape["rms_norm_eps"],
        ".rope.dimension_count": shape["head_dim"],
        ".rope.freq_base": float(rope["rope_theta"]),
        ".vocab_size": shape["vocab_size"],
    }


def draft_tensors(method: Method, config: Config, folder: Path) -> dict[str, Tensor]:
    """Return an export's tensors as llama.cpp calls them; raises UsageError for others, and for none."""
    stored = serving.read_tensors(folder, method.renamed)
    names = method.names(int(config["num_hidden_layers"]))
    optional = method.optional
    if config.get("draft_vocab_size", config["vocab_size"]) != config["vocab_size"]:
        optional = optional - {"d2t"}
    problems = [f"missing {name}" for name in names if name not in {*stored, *optional}]
    problems += [f"unknown {name}" for name in stored if name not in {*names, *method.unread}]
    if problems:
        raise UsageError(
            f"the tensors in {folder} are not those that llama.cpp reads of {method.name}:\n  "
            + "\n  ".join(sorted(problems)[:8])
            + "\n  export the draft again; llama.cpp would leave out what it does not know"
        )
    read = [name for name in names if name in stored]
    return {names[name]: method.tensor(name, stored[name], config) for name in read}
