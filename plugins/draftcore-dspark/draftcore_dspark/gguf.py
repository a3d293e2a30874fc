"""What llama.cpp calls the parts of a DSpark draft: a DFlash draft with more tensors.

draftcore-llamacpp imports it, by an entry point of its group, and nothing else does. llama.cpp cuts a
round by the confidence head where its server is told to, by --spec-draft-p-min.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from draftcore_llamacpp.methods import Config, DFlash

CONFIDENCE = {
    "confidence_head.proj.weight": "conf_proj.weight",
    "confidence_head.proj.bias": "conf_proj.bias",
}


class DSpark(DFlash):
    """DFlash with a plain Markov head, whose rows all draft."""

    served_as = "dspark"
    outer: ClassVar = {
        **DFlash.outer,
        "markov_head.markov_w1.weight": "markov_w1.weight",
        "markov_head.markov_w2.weight": "markov_w2.weight",
        **CONFIDENCE,
    }
    optional = frozenset(CONFIDENCE)
    fixed: ClassVar = {
        **DFlash.fixed, "markov_head_type": "vanilla", "confidence_head_with_markov": True,
        "sample_from_anchor": True,
    }  # fmt: skip

    def keys(self, config: Config) -> Mapping[str, Any]:
        judged = bool(self.field(config, "enable_confidence_head"))
        more = {".sample_from_anchor": True, ".has_confidence_head": judged}
        return {**super().keys(config), **more}

    def num_drafts(self, config: Config) -> int | None:
        return int(self.field(config, "block_size"))


method = DSpark()
