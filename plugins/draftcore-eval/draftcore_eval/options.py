"""What the section `eval` of a run takes where drafts are measured by decoding."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

Gpu = Literal["a100", "h100", "h200", "b200", "l40s", "rtx4090", "mi300x"]


class EvalOptions(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    prompts: int | None = Field(
        None, ge=1, le=10**9, description="decode this many eval prompts at most"
    )
    batch: int = Field(32, ge=1, le=10**9, description="prompts decoded together")
    max_new_tokens: int = Field(128, ge=2, le=10**7, description="longest answer, in tokens")
    temperature: float = Field(
        0.0, ge=0, le=100, description="0 is greedy, and then checked; else 0.001 or more"
    )
    seed: int = Field(0, ge=0, lt=2**32, description="of what is drawn above 0")
    tie_bound: float | None = Field(None, gt=0, le=1e9, description="top-2 logit gap that is a tie")
    gpu: Gpu = Field("h100", description="the server's, for what the draft would gain there")
    requests: int = Field(
        8, ge=1, le=1024, description="that the server runs at once; drafts are advised for them"
    )

    @field_validator("temperature")
    @classmethod
    def _can_be_drawn_at(cls, value: float) -> float:
        if 0 < value < 0.001:
            raise ValueError(
                "logits divided by so little overflow: 0 is greedy, else 0.001 or more"
            )
        return value
