"""What a user may set: the options of the runner, of its backends, and of `tbo`."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

LEAST_SHARE = 0.48  # of the tokens, for the smaller half of a batch
Size = Annotated[int, Field(ge=1)]


class GraphsOptions(BaseModel):
    """The options of the runner `graphs` in one phase. `resolve` fills in what is not set."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    backend: str = Field(
        "auto",
        description="a graph backend of `draftcore list-plugins`; auto is the one that fits the "
        "device, or eager where a rule refuses it; eager is none",
    )
    options: dict[str, Any] = Field({}, description="of the backend, validated by its plugin")
    rows: tuple[Size, ...] | None = Field(None, description="rows that graphs are captured for")
    lengths: tuple[Size, ...] | None = Field(
        None, description="prefill: padded tokens of a row; decode: cache slots that are attended"
    )
    max_bs: Size | None = Field(
        None, description="rows of the largest bucket; left out, what memory holds is captured"
    )
    padding: bool = Field(True, description="pad to the next bucket; else only exact sizes replay")
    plugins: dict[str, dict[str, Any]] = Field(
        {}, description="graph plugins that see captures and replays, each with its options"
    )


class BreakableOptions(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    debug: bool = Field(
        False, description="record nothing: the whole work is one eager break, at eager's speed"
    )


class PiecewiseOptions(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    compiler: str = Field(
        "inductor", description="a torch.compile backend: inductor, cudagraphs, aot_eager, eager"
    )


class OverlapOptions(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    least_share: float = Field(
        LEAST_SHARE,
        ge=0,
        le=0.5,
        description="of the tokens, for the smaller half; below it one row is cut in two",
    )
