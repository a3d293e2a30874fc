"""What a run may set under `capture.options`; unknown keys are refused."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from draftcore.contracts.offers import SAME_FEATURES as SAME


class SglangOptions(BaseModel):
    """Options of the capture `sglang`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    tp: int = Field(
        1, ge=1,
        description="devices that share the target, each with a process of its own; 1: this process",
    )  # fmt: skip
    max_tokens: int = Field(
        16384, ge=1, json_schema_extra=SAME,
        description="tokens that sglang's KV pool holds: those of the largest batch, and no more",
    )  # fmt: skip
    self_test: bool = Field(
        True, json_schema_extra=SAME,
        description="compare layers and the last hidden state with transformers when the capture "
        "is opened, where the target fits on the device beside nothing else",
    )  # fmt: skip
    args: dict[str, Any] = Field(
        {}, description="further arguments of sglang's own, by the names of its ServerArgs"
    )


class ServerOptions(BaseModel):
    """Options of the capture `sglang-server`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    servers: tuple[Annotated[str, Field(pattern=r"^https?://[^/@\s]+$")], ...] = Field(
        ("http://127.0.0.1:30000",), min_length=1, json_schema_extra=SAME,
        description="where they listen; an API key comes from the environment, as DRAFTCORE_SGLANG_KEY",
    )  # fmt: skip
    in_flight: int = Field(
        32, ge=1, json_schema_extra=SAME, description="requests under way at one server"
    )
    timeout: float = Field(
        120, gt=0, json_schema_extra=SAME, description="seconds that one request may take"
    )
    patience: float = Field(
        300, gt=0, json_schema_extra=SAME,
        description="seconds that a sample may take, with servers that are away",
    )  # fmt: skip
    self_test: bool = Field(
        True, json_schema_extra=SAME,
        description="compare what each server captures with transformers, where the target fits here",
    )  # fmt: skip
    max_json: int = Field(
        64 << 20, ge=1, json_schema_extra=SAME,
        description="bytes of an answer by a server without this dist, which sends states as text",
    )  # fmt: skip


class EngineOptions(BaseModel):
    """Options of the engine `sglang`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    python: str | None = Field(
        None, description="the Python of the environment that has sglang; this one if left out"
    )
    algorithm: str | None = Field(
        None,
        description="the name by which sglang knows the draft; as its algorithm says if left out",
    )
    timeout: float = Field(300, gt=0, description="seconds that one request may take")
    patience: float = Field(600, gt=0, description="seconds that sglang may take to start")
    args: dict[str, Any] = Field(
        {}, description="further arguments of sglang's own, by the names of its ServerArgs"
    )
