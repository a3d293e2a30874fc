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


@dataclass(frozen=True)
class Family:
    """How a kind of target computes its MTP layer, and what its files call the tensors.

    A name is `prefix`, where {layers} is the number of the target's layers, and ours with the beginning
    that `names` replaces. `count` is the config's field for the number of MTP layers. `bias` and
    `head_norms` (of queries and keys) hold where the config does not say. `hidden_first`: fc reads the
    state before the embedding, which is zero at position 0. `experts` is the class of transformers' that
    computes the MLP, if that is a mixture of experts.
    """

    prefix: str = "mtp."
    count: str = "mtp_num_hidden_layers"
    names: Mapping[str, str] = field(default_factory=dict)
    gated: bool = False  # attention's output is gated
    offset_norms: bool = False  # norms multiply by 1 + weight
    bias: bool = False
    head_norms: bool = True
    hidden_first: bool = False
    experts: str = ""


OURS = ("fc.", "pre_fc_norm_embedding.", "pre_fc_norm_hidden.", "norm.", "layers.0.")
GLM = ("eh_proj.", "enorm.", "hnorm.", "shared_head.norm.", "")
MIMO = ("input_proj.", "token_layernorm.", "hidden_layernorm.", "final_layernorm.", "")
COUNT = "num_nextn_predict_layers"
QWEN = Family(gated=True, offset_norms=True)
FAMILIES = {
    "plain": Family(),  # a layer of Qwen3, for targets whose kind has none
    "qwen3_5_text": QWEN,
    "qwen3_5_moe_text": replace(QWEN, experts="Qwen3_5MoeSparseMoeBlock"),
    "qwen3_next": replace(QWEN, experts="Qwen3NextSparseMoeBlock"),
    "glm4_moe": Family(
        "model.layers.{layers}.", COUNT, dict(zip(OURS, GLM, strict=True)),
        experts="Glm4MoeMoE",
    ),
    "mimo": Family(
        "model.mtp_layers.0.", COUNT, dict(zip(OURS, MIMO, strict=True)),
        bias=True, head_norms=False, hidden_first=True,
    ),
}  # fmt: skip


@dataclass(frozen=True)
class MtpConfig(DecoderShape):
    """Everything that fixes a layer's tensors and its forward, beside the sizes of experts."""

    family: str
    num_target_layers: int
    attention_bias: bool
    head_norms: bool

    @property
    def kind(self) -> Family:
        return FAMILIES[self.family]

    @property
    def prefix(self) -> str:
        """What the layer's names in files begin with."""
        return self.kind.prefix.format(layers=self.num_target_layers)

    def ours(self, name: str) -> str:
        """Return what we call a tensor of the layer, of its name without the prefix."""
        return _renamed(name, {theirs: ours for ours, theirs in self.kind.names.items()})

    def theirs(self, name: str) -> str:
        """Return its name in files, of ours."""
        return self.prefix + _renamed(name, self.kind.names)


def _renamed(name: str, beginnings: Mapping[str, str]) -> str:
    found = (
        new + name.removeprefix(old) for old, new in beginnings.items() if name.startswith(old)
    )
    return next(found, name)


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
            f"target {target.path!r} is of the type {text.model_type}; the MTP layer of that, if it has "
            f"one, is not known here\n  known are those of {known}; not those that read keys from a "
            "latent state, as DeepSeek's\n"
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
        attention_bias=family != "plain" and bool(getattr(text, "attention_bias", kind.bias)),
        head_norms=family == "plain" or bool(getattr(text, "use_qk_norm", kind.head_norms)),
    )
