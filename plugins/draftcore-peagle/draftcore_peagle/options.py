"""What a run may set under `algorithm.options` for P-EAGLE; unknown keys are refused."""

from __future__ import annotations

from draftcore_eagle3.options import BackboneOptions
from draftcore_nn.options import Size
from pydantic import Field

from draftcore.contracts.offers import Free


class PEagleOptions(BackboneOptions):
    """Options of the algorithm `peagle`: the network's, what is drawn of a sample, and the loss."""

    num_layers: Size = Field(4, description="decoder layers of the draft")
    num_depths: int = Field(8, ge=1, le=99, description="tokens K that a row learns to draft")
    down_sample_ratio: float = Field(
        0.7, gt=0, le=1, description="depth d trains on this share^d of the rows to be learned"
    )
    down_sample_ratio_min: float = Field(
        0.2, ge=0, le=1, description="and on no smaller share of them"
    )
    max_anchors: Size | None = Field(
        None, description="of a sample, rows that depths are drawn from; all if unset"
    )
    train_head: bool = Field(
        True, description="train the LM head; else it stays the target's, for less memory and time"
    )
    skip_unknown: bool = Field(
        True, description="leave out rows whose most probable token is no draft token"
    )
    mask_token_id: int | None = Field(
        None, ge=0, description="the token that stands for one to be drafted"
    )
    num_drafts: Free[Size | None] = Field(
        None, description="tokens proposed per round when decoding; as many as depths if unset"
    )
