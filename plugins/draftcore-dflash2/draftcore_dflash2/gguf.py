"""What llama.cpp calls the parts of a DFlash2 draft, which it runs by its architecture of DFlash.

draftcore-llamacpp imports it, by an entry point of its group, and nothing else does.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from draftcore_llamacpp.methods import Config, DFlash

from draftcore_dflash2.serving import SIZES


class DFlash2(DFlash):
    """DFlash with the tensors and sizes of convolutions and selector."""

    outer: ClassVar = {
        **DFlash.outer,
        "candidate_selector.predecessor_codebook": "selector_predecessor.weight",
        "candidate_selector.successor_codebook": "selector_successor.weight",
        "candidate_selector.hidden_projection.weight": "selector_hidden.weight",
    }
    layer: ClassVar = {
        **DFlash.layer,
        "attention_conv.base_kernel": "attn_conv_base",
        "attention_conv.kernel_projection.weight": "attn_conv_proj.weight",
        "mlp_conv.base_kernel": "ffn_conv_base",
        "mlp_conv.kernel_projection.weight": "ffn_conv_proj.weight",
    }
    fixed: ClassVar = {**DFlash.fixed, "output_multiplier": 1, "input_embedding_scale": 1}

    def keys(self, config: Config) -> Mapping[str, Any]:
        sizes = {f".{name}": int(self.field(config, name)) for name in SIZES}
        return {**super().keys(config), **sizes}

    def refusals(self, config: Config) -> Iterator[str]:
        yield from super().refusals(config)
        for name in SIZES:
            if self.field(config, name) is None:
                yield f"the draft's config.json lacks {name}\n  export the draft again"
        best, width = int(self.field(config, "selector_top_k")), int(config["hidden_size"])
        if best * (best + 1) > width:
            most = max(k for k in range(best) if k * (k + 1) <= width)
            yield (
                f"llama.cpp keeps the scores of {best} candidates by {best} in a row as wide as the "
                f"draft, {width}\n  train with algorithm.options.selector_top_k at most {most}"
            )


method = DFlash2()
