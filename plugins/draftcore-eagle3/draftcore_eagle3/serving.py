"""The serving layout `serving`: one folder that sglang and vLLM both read.

It is the research layout (`LlamaForCausalLMEagle3`, tensors under `midlayer.`). The two servers
read captured layers from different fields in different conventions: sglang 0-based outputs from
`eagle_config`, vLLM input-of-layer ids (one more) from the top level. This module is the only place
that converts. Weights are the fp32 masters, so an export reloads exactly; servers cast to `dtype`.

Importing refuses whatever this draft does not compute, rather than loading it approximately.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LlamaConfig

from draftcore.contracts.algorithm import Draft
from draftcore.errors import DraftcoreError, UsageError, nearest
from draftcore_eagle3.config import DraftConfig, captured_layers, rope_of
from draftcore_eagle3.model import Eagle3Draft, build
from draftcore_eagle3.vocabulary import check_offsets, to_ids

if TYPE_CHECKING:
    from draftcore.contracts.target import TargetSpec
    from draftcore_eagle3.options import Eagle3Options

LAYOUTS = ("serving",)
ARCHITECTURE = "LlamaForCausalLMEagle3"
# Config fields whose other values change the computation, with the one value that we compute.
FIXED = {
    "num_hidden_layers": 1,
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "bias": False,
    "norm_before_residual": False,
    "norm_before_fc": False,
    "parallel_drafting": False,
    "num_aux_hidden_states": 3,
    "use_aux_hidden_state": True,
}


# ---------------------------------------------------------------- export


def export(draft: Draft, folder: Path, layout: str) -> None:
    """Write config.json and model.safetensors.

    Raises UsageError for an unknown layout, DraftcoreError for weights that are not finite.
    """
    if layout not in LAYOUTS:
        raise UsageError(
            f"EAGLE-3 has no export layout {layout!r}{nearest(layout, LAYOUTS)}\n"
            f"  layouts: {', '.join(LAYOUTS)} (read by sglang and vLLM)\n"
            f"  ask for layout {LAYOUTS[0]}"
        )
    assert isinstance(draft.module, Eagle3Draft)
    tensors = {name: t.detach().cpu().contiguous() for name, t in _tensors(draft.module)}
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and not tensor.isfinite().all():
            raise DraftcoreError(
                f"tensor {name} is not finite: the training run diverged\n"
                "  export an earlier checkpoint, or train with a lower learning rate"
            )
    folder.mkdir(parents=True, exist_ok=True)
    config = serving_config(draft.module.config, draft.module.embed_tokens.dtype)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def _tensors(module: Eagle3Draft) -> Iterator[tuple[str, Tensor]]:
    """Yield tensors under the names servers know: bare, without a `model.` prefix."""
    yield from module.named_parameters()
    yield "embed_tokens.weight", module.embed_tokens
    if module.d2t is not None:
        known_V = torch.zeros(module.config.vocab_size, dtype=torch.bool)
        known_V[to_ids(module.d2t).cpu()] = True
        yield "d2t", module.d2t
        yield "t2d", known_V


def serving_config(config: DraftConfig, dtype: torch.dtype) -> dict[str, Any]:
    """Return config.json's content; `dtype` is what the server is to compute in."""
    rope, name = dict(config.rope), str(dtype).removeprefix("torch.")
    return {
        "architectures": [ARCHITECTURE],
        "model_type": "llama",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "vocab_size": config.vocab_size,
        "draft_vocab_size": config.draft_vocab_size,
        "rms_norm_eps": config.rms_norm_eps,
        "max_position_embeddings": config.max_position_embeddings,
        "hidden_act": "silu",
        "num_hidden_layers": 1,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        # Both spellings: transformers 5 reads the first, servers on transformers 4 the others.
        "rope_parameters": rope,
        "rope_theta": rope["rope_theta"],
        "rope_scaling": None if rope["rope_type"] == "default" else rope,
        "partial_rotary_factor": rope.get("partial_rotary_factor", 1.0),
        "target_hidden_size": config.hidden_size,
        "num_aux_hidden_states": len(config.layers),
        "fc_norm": config.fc_norm,
        "norm_output": config.norm_output,
        "norm_before_residual": False,
        "eagle_config": {
            "eagle_aux_hidden_state_layer_ids": list(config.layers),
            "use_aux_hidden_state": True,
        },
        "eagle_aux_hidden_state_layer_ids": [layer + 1 for layer in config.layers],
        "dtype": name,
        "torch_dtype": name,
    }


# ---------------------------------------------------------------- import


def load(folder: Path, target: TargetSpec, options: Eagle3Options) -> Draft:
    """Read a draft from this layout, exported here or published elsewhere.

    Accepts `midlayer.` and `layers.0.`, a `model.` prefix, a missing embedding (the target's is
    used), and a missing d2t where the vocabulary is full. Raises UsageError naming what is not as
    this draft computes it.
    """
    config = read_config(folder, target, options)
    tensors = _read_tensors(folder)
    d2t, t2d = tensors.pop("d2t", None), tensors.pop("t2d", None)
    ids_U = None if config.full_vocabulary and d2t is None else _read_ids(d2t, t2d, config, folder)
    embedding_VH = tensors.pop("embed_tokens.weight", None)
    draft = build(target, config, options, ids_U)
    assert isinstance(draft.module, Eagle3Draft)
    if embedding_VH is not None:
        _check_embedding(embedding_VH, draft.module.embed_tokens, folder)
    parameters = dict(draft.module.named_parameters())
    _check_shapes(tensors, {name: tuple(p.shape) for name, p in parameters.items()}, folder)
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(tensors[name])
    return draft


def read_config(folder: Path, target: TargetSpec, options: Eagle3Options) -> DraftConfig:
    """Read the shape of a draft from its config.json, and check it against target and options."""
    file = folder / "config.json"
    if not file.is_file():
        raise UsageError(
            f"no draft at {folder}: it has no config.json\n"
            "  give the folder of an exported or published EAGLE-3 draft"
        )
    data = json.loads(file.read_text(encoding="utf-8"))
    text = target.config.get_text_config()
    config = parse_config(data, folder, int(text.num_hidden_layers))
    for name in ("hidden_size", "vocab_size"):
        ours, theirs = getattr(config, name), int(getattr(text, name))
        if ours != theirs:
            raise UsageError(
                f"the draft in {folder} has {name} {ours}, the target {theirs}\n"
                "  use the draft with the target it was trained for"
            )
    _check_options(config, options, folder)
    return config


def parse_config(data: Mapping[str, Any], folder: Path, num_target_layers: int) -> DraftConfig:
    """Turn a config.json's content into a DraftConfig; raises UsageError for what differs."""
    _refuse(data, folder)
    try:
        hidden, heads = int(data["hidden_size"]), int(data["num_attention_heads"])
        vocab, inner, eps = data["vocab_size"], data["intermediate_size"], data["rms_norm_eps"]
    except KeyError as error:
        raise UsageError(
            f"config.json in {folder} lacks {error}\n  add the field, or export the draft again"
        ) from None
    head_dim = int(data.get("head_dim") or hidden // heads)
    return DraftConfig(
        hidden_size=hidden,
        intermediate_size=int(inner),
        num_attention_heads=heads,
        num_key_value_heads=int(data.get("num_key_value_heads") or heads),
        head_dim=head_dim,
        vocab_size=int(vocab),
        draft_vocab_size=int(data.get("draft_vocab_size") or vocab),
        rms_norm_eps=float(eps),
        max_position_embeddings=int(data.get("max_position_embeddings") or 2048),
        rope=rope_of(LlamaConfig.from_dict({**data, "head_dim": head_dim})),
        layers=_read_layers(data, folder, num_target_layers),
        fc_norm=bool(data.get("fc_norm") or data.get("use_aux_norm")),
        norm_output=bool(data.get("norm_output")),
    )


def _refuse(data: Mapping[str, Any], folder: Path) -> None:
    architectures = data.get("architectures") or []
    if ARCHITECTURE not in architectures:
        nested = "transformer_layer_config" in data
        remedy = (
            "this is the speculators layout; convert it to the research layout first"
            if nested
            else f"an EAGLE-3 draft says architectures: [{ARCHITECTURE!r}]"
        )
        raise UsageError(f"config.json in {folder} has architectures {architectures}\n  {remedy}")
    given = {**(data.get("eagle_config") or {}), **data}
    for name, value in FIXED.items():
        if (given.get(name) if given.get(name) is not None else value) != value:
            raise UsageError(
                f"config.json in {folder} says {name}: {given[name]!r}\n"
                f"  this plugin computes {name}: {value!r} only; the draft cannot be read"
            )
    width = data.get("target_hidden_size") or data.get("hidden_size")
    if width != data.get("hidden_size"):
        raise UsageError(
            f"config.json in {folder} has hidden_size {data.get('hidden_size')} for a target of "
            f"{width}\n  the embedding is the target's, so the two must be equal"
        )


def _read_layers(data: Mapping[str, Any], folder: Path, num_layers: int) -> tuple[int, int, int]:
    """Return 0-based outputs from either convention; both, if given, must agree."""
    name = "eagle_aux_hidden_state_layer_ids"
    nested, top = (data.get("eagle_config") or {}).get(name), data.get(name)
    from_top = None if top is None else [layer - 1 for layer in top]
    if nested is not None and from_top is not None and nested != from_top:
        raise UsageError(
            f"config.json in {folder} names two sets of captured layers: outputs {nested} in "
            f"eagle_config,\n  and {top} at the top level, which are the outputs {from_top}\n"
            f"  make the top-level ids one more than those in eagle_config"
        )
    asked = nested if nested is not None else from_top
    return captured_layers(None if asked is None else tuple(asked), num_layers)


def _check_options(config: DraftConfig, options: Eagle3Options, folder: Path) -> None:
    """Refuse an option that was set to something other than what the folder holds."""
    for name in sorted(options.model_fields_set & {field.name for field in fields(DraftConfig)}):
        asked, found = getattr(options, name), getattr(config, name)
        if asked is not None and (sorted(asked) if name == "layers" else asked) != (
            list(found) if name == "layers" else found
        ):
            raise UsageError(
                f"option {name} is {asked}, but the draft in {folder} has {found}\n"
                f"  leave {name} out: a draft that is read keeps its shape"
            )


def _read_tensors(folder: Path) -> dict[str, Tensor]:
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        remedy = "give the folder of an exported draft"
        if pickled := sorted(p.name for p in folder.glob("*.bin")):
            remedy = f"{pickled[0]} is a pickle, which could run code; convert it to safetensors"
        raise UsageError(f"the draft in {folder} has no model.safetensors\n  {remedy}")
    tensors = {name: tensor for file in files for name, tensor in load_file(file).items()}
    bare = {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
    return {
        f"midlayer.{name[9:]}" if name.startswith("layers.0.") else name: tensor
        for name, tensor in bare.items()
        if not name.endswith("rotary_emb.inv_freq")
    }


def _read_ids(d2t: Tensor | None, t2d: Tensor | None, config: DraftConfig, folder: Path) -> Tensor:
    if d2t is None or tuple(d2t.shape) != (config.draft_vocab_size,):
        found = "no d2t" if d2t is None else f"d2t of shape {list(d2t.shape)}"
        raise UsageError(
            f"the draft in {folder} has {found}, its config a draft vocabulary of "
            f"{config.draft_vocab_size}\n"
            "  without the mapping its tokens mean nothing: use the complete published draft"
        )
    ids_U = to_ids(check_offsets(d2t.long(), config.vocab_size, str(folder)))
    if t2d is not None and not torch.equal(t2d.nonzero()[:, 0], ids_U):
        raise UsageError(
            f"t2d and d2t in {folder} name different tokens\n"
            "  the mapping is damaged: use the complete published draft"
        )
    return ids_U


def _check_embedding(found_VH: Tensor, target_VH: Tensor, folder: Path) -> None:
    same = found_VH.shape == target_VH.shape and torch.allclose(
        found_VH.float(), target_VH.float(), rtol=0.01, atol=1e-4
    )
    if not same:
        raise UsageError(
            f"embed_tokens in {folder} is not the target's embedding\n"
            "  the draft was trained for another target, or trained its own embedding, which is "
            "not supported\n  use the draft with the target it was trained for"
        )


def _check_shapes(
    tensors: Mapping[str, Tensor], shapes: Mapping[str, tuple[int, ...]], folder: Path
) -> None:
    found = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    problems = [f"missing {name} {list(shapes[name])}" for name in shapes if name not in found]
    problems += [f"unknown {name} {list(found[name])}" for name in found if name not in shapes]
    problems += [
        f"{name} is {list(found[name])}, not {list(shapes[name])}"
        for name in shapes
        if name in found and found[name] != shapes[name]
    ]
    if problems:
        raise UsageError(
            f"the tensors in {folder} are not those its config.json describes:\n  "
            + "\n  ".join(problems)
            + "\n  use the complete draft; tensors of other draft types are not supported"
        )
