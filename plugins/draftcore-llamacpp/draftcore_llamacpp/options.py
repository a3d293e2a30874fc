"""What the engine `llamacpp` takes."""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field


class LlamaCppOptions(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    target: Path | None = Field(
        None, description="the target as GGUF, of llama.cpp's own converter; else it is converted"
    )
    threads: int = Field(
        1, ge=1, le=1024, description="of one process; two on busy cores wait for each other"
    )
