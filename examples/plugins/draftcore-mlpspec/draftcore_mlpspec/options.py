"""What a run may set under `algorithm.options`."""

from __future__ import annotations

from typing import Self

from pydantic import BaseModel, ConfigDict, Field, PositiveInt, model_validator


class MlpSpecOptions(BaseModel):
    """Options of `mlpspec`; the shape of the draft."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    num_heads: int = Field(default=3, ge=2, description="heads, each of which drafts one token")
    inner_size: int | None = Field(
        default=None, ge=1, description="width of the state; by default the target's"
    )
    tied: bool = Field(default=True, description="one set of weights for all heads")
    scale_input: bool = Field(default=True, description="normalise the target's state first")


class MlpSpecTreeOptions(MlpSpecOptions):
    """Options of `mlpspec-tree`: how the tree branches, too."""

    branches: tuple[PositiveInt, ...] = Field(
        default=(3, 2), description="children of a node, head by head; 1 where the list ends"
    )

    @model_validator(mode="after")
    def _heads_branch(self) -> Self:
        if len(self.branches) > self.num_heads:
            raise ValueError(f"{len(self.branches)} branches, but num_heads is {self.num_heads}")
        return self
