"""The options of the backends that have any."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator


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
