"""The shape of an MTP layer, and how kinds of targets compute and name theirs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from draftcore_nn.options import DecoderOptions
from draftcore_nn.target import DecoderShape, shape_of_target

from draftcore.errors import UsageError

if TYPE_CHECKING:
    from draftcore.contracts.target import TargetSpec

BLOCKS = "transformers.models.{0}.modeling_{0}:"


@dataclass(frozen=True)
class Family:
    """How a kind of target computes its MTP layer, and what its files call the tensors.

    A name is `prefix`, where {layers} is the number of the target's layers, and ours with the beginning
    that `names` replaces. `count` is the config's field for the number of MTP layers. `bias` and
    `head_norms` (of queries and keys) hold where the config does not say. `hidden_first`: fc reads the
    state before the embedding. `blank_first`: the embedding at position 0 is zero. `experts` is the class
    of transformers' that computes the MLP, if that is a mixture of experts.
    """

    prefix: str = "mtp."
    count: str = "mtp_num_hidden_layers"
    names: Mapping[str, str] = field(default_factory=dict)
    gated: bool = False  # attention's output is gated
    offset_norms: bool = False  # norms multiply by 1 + weight
    bias: bool = False
    head_norms: bool = True
    hidden_first: bool = False
    blank_first: bool = False
    experts: str = ""

    def prefix_of(self, layers: int) -> str:
        return self.prefix.format(layers=layers)


def _named(fc: str, embedding: str, hidden: str, norm: str) -> dict[str, str]:
    ours = ("fc.", "pre_fc_norm_embedding.", "pre_fc_norm_hidden.", "norm.")
    theirs = (f"{name}." for name in (fc, embedding, hidden, norm))
    return {**dict(zip(ours, theirs, strict=True)), "layers.0.": ""}


PLAIN = Family()  # a layer of Qwen3, for targets whose kind has none
QWEN = Family(gated=True, offset_norms=True)
MIMO = ("input_proj", "token_layernorm", "hidden_layernorm", "final_layernorm")
NEXT = "num_nextn_predict_layers"
FAMILIES = {
    "plain": PLAIN,
    "qwen3_5_text": QWEN,
    "qwen3_5_moe_text": replace(
        QWEN, experts=BLOCKS.format("qwen3_5_moe") + "Qwen3_5MoeSparseMoeBlock"
    ),
    "qwen3_next": replace(QWEN, experts=BLOCKS.format("qwen3_next") + "Qwen3NextSparseMoeBlock"),
    "glm4_moe": Family(
        "model.layers.{layers}.", NEXT, _named("eh_proj", "enorm", "hnorm", "shared_head.norm"),
        experts=BLOCKS.format("glm4_moe") + "Glm4MoeMoE",
    ),
    "mimo": Family(
        "model.mtp_layers.0.", NEXT, _named(*MIMO), bias=True, head_norms=False, hidden_first=True,
        blank_first=True,
    ),
}  # fmt: skip


@dataclass(frozen=True)
class MtpConfig(DecoderShape):
    """Everything that fixes a layer's tensors and its forward, beside the sizes of experts."""

    family: str
    num_target_layers: int
    bias: bool
    head_norms: bool

    @property
    def kind(self) -> Family:
        return FAMILIES[self.family]


def from_target(target: TargetSpec, new: bool) -> MtpConfig:
    """Return the shape of a target's MTP layer, which is that of its own layers.

    Raises UsageError for a target whose kind has none that is known here, unless it is `new`, or one that
    has several.
    """
    text: Any = target.text_config
    family = text.model_type if text.model_type in FAMILIES else "plain"
    if family == "plain" and not new:
        known = ", ".join(name for name in FAMILIES if name != "plain")
        raise UsageError(
            f"target {target.path!r} is of the type {text.model_type}, whose MTP layer, if it has one, "
            f"this plugin cannot compute\n  known are those of {known}: others read keys from a latent "
            "state, as DeepSeek's, or have several layers\n"
            "  set algorithm.options.init=fresh to train a new layer, or choose another algorithm"
        )
    kind = FAMILIES[family]
    if int(getattr(text, kind.count, None) or 1) > 1:
        raise UsageError(
            f"the config of {target.path!r} says {kind.count}: {getattr(text, kind.count)}\n"
            "  this plugin trains one MTP layer, which is applied again for each further token"
        )
    return MtpConfig(
        **shape_of_target(target, DecoderOptions()),
        family=family,
        num_target_layers=target.num_layers,
        bias=bool(getattr(text, "attention_bias", kind.bias)) and family != "plain",
        head_norms=bool(getattr(text, "use_qk_norm", kind.head_norms)) or family == "plain",
    )
