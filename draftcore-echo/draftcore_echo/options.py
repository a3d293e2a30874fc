"""What a run may set under `algorithm.options`; an unknown key is answered with the near one."""

from pydantic import BaseModel, ConfigDict, Field


class ChainOptions(BaseModel):
    """Options of the algorithm echo."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    steps: int = Field(default=5, ge=1, description="tokens ahead that training unrolls the draft")
    decay: float = Field(
        default=0.8, gt=0, le=1, description="step k of the unrolled draft weighs decay^(k-1)"
    )
    inner_size: int | None = Field(
        default=None, ge=1, description="inner width of the cell; by default twice the target's"
    )
    num_drafts: int | None = Field(
        default=None, ge=1, description="tokens proposed per round; by default as many as steps"
    )
