"""What a run may set under `capture.options`; unknown keys are refused."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from draftcore.contracts.offers import SAME_FEATURES


class SglangOptions(BaseModel):
    """Options of the capture `sglang`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    tp: int = Field(
        default=1,
        ge=1,
        description="devices that share the target, each with a process of its own; 1: this process",
    )
    max_tokens: int = Field(
        default=16384,
        ge=1,
        json_schema_extra=SAME_FEATURES,
        description="tokens that sglang's KV pool holds: those of the largest batch, and no more",
    )
    self_test: bool = Field(
        default=True,
        json_schema_extra=SAME_FEATURES,
        description="compare layers and the last hidden state with transformers when the capture "
        "is opened, where the target fits on the device beside nothing else",
    )
    args: dict[str, Any] = Field(
        default_factory=dict,
        description="further arguments of sglang's own, by the names of its ServerArgs",
    )


class ServerOptions(BaseModel):
    """Options of the capture `sglang-server`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    servers: tuple[Annotated[str, Field(pattern=r"^https?://[^/@\s]+$")], ...] = Field(
        default=("http://127.0.0.1:30000",),
        min_length=1,
        json_schema_extra=SAME_FEATURES,
        description="where they listen; an API key comes from the environment, as DRAFTCORE_SGLANG_KEY",
    )
    in_flight: int = Field(
        default=32,
        ge=1,
        json_schema_extra=SAME_FEATURES,
        description="requests under way at one server",
    )
    timeout: float = Field(
        default=120,
        gt=0,
        json_schema_extra=SAME_FEATURES,
        description="seconds that one request may take",
    )
    patience: float = Field(
        default=300,
        gt=0,
        json_schema_extra=SAME_FEATURES,
        description="seconds that a sample may take, with servers that are away",
    )
    self_test: bool = Field(
        default=True,
        json_schema_extra=SAME_FEATURES,
        description="compare what each server captures with transformers, where the target fits here",
    )
    max_json: int = Field(
        default=64 << 20,
        ge=1,
        json_schema_extra=SAME_FEATURES,
        description="bytes of an answer by a server without this dist, which sends states as text",
    )
