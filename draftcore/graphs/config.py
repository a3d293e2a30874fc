"""The keys of `graphs` in a run's YAML, one section per phase; what they come to is in `resolve`.

It imports neither torch nor the runners: every verb that reads a configuration imports it.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

Size = Annotated[int, Field(ge=1)]


class PhaseConfig(BaseModel):
    """How one phase runs the target or the draft. Keys that are set are locked."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    backend: str = Field(
        "eager",
        description="a graph backend of `draftcore list-plugins`; eager is none, auto the one that "
        "fits the device, where no rule speaks against it",
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


class GraphsConfig(BaseModel):
    """Prefill is the target's forward in capture, decode the draft and verify rounds."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    prefill: PhaseConfig = PhaseConfig()
    decode: PhaseConfig = PhaseConfig()
