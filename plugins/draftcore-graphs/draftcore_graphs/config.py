"""The options of the runner `graphs`, the same for both phases; what they come to is in `resolve`."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

Size = Annotated[int, Field(ge=1)]


class PhaseConfig(BaseModel):
    """How one phase runs the target or the draft. Keys that are set are locked."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    backend: str = Field(
        "auto",
        description="a graph backend of `draftcore list-plugins`; auto is the one that fits the "
        "device where no rule refuses it, eager is none",
    )
    options: dict[str, Any] = Field({}, description="validated by the backend's plugin")
    rows: tuple[Size, ...] | None = Field(None, description="rows that graphs are captured for")
    lengths: tuple[Size, ...] | None = Field(
        None, description="prefill: padded tokens of a row; decode: cache slots that are attended"
    )
    padding: bool = Field(True, description="pad to the next bucket; else only exact sizes replay")
    plugins: dict[str, dict[str, Any]] = Field(
        {}, description="graph plugins that see captures and replays, each with its options"
    )
