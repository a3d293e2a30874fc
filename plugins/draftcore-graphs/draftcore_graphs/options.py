"""The options of the backends that have any."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

LEAST_SHARE = 0.48  # of the tokens, for the smaller half of a batch


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
    mode: (
        Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"] | None
    ) = Field(None, description="inductor's mode; unset is reduce-overhead, which records graphs")

    @model_validator(mode="after")
    def _only_inductor_has_modes(self) -> Self:
        if self.mode is not None and self.compiler != "inductor":
            raise ValueError(f"mode={self.mode} is inductor's; compiler={self.compiler} has none")
        return self

    @property
    def records_graphs(self) -> bool:
        """Whether this compiler records CUDA graphs, and so needs a CUDA device."""
        if self.compiler == "inductor":
            return self.mode in (None, "reduce-overhead", "max-autotune")
        return self.compiler == "cudagraphs"


class OverlapOptions(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    least_share: float = Field(
        LEAST_SHARE,
        ge=0,
        le=0.5,
        description="of the tokens, for the smaller half; below it one row is cut in two",
    )
