"""What a run may set under `capture.options`, and what an engine takes; unknown keys are refused."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from draftcore.contracts.offers import SAME_FEATURES as SAME


class Asked(BaseModel):
    """How a server is asked."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    timeout: float = Field(
        300, gt=0, json_schema_extra=SAME, description="seconds that one request may take"
    )


class Started(Asked):
    """How a server is started."""

    python: str | None = Field(
        None, json_schema_extra=SAME,
        description="the Python of the environment that has vLLM, which wants other versions of what "
        "draftcore needs; this one if left out",
    )  # fmt: skip
    kv_cache: str = Field("1GiB", json_schema_extra=SAME, description="memory for vLLM's KV cache")
    patience: float = Field(
        600, gt=0, json_schema_extra=SAME, description="seconds that vLLM may take to start"
    )
    args: dict[str, Any] = Field(
        {}, description="further arguments of vLLM's launcher, by name: `{tensor_parallel_size: 2}`"
    )


class EngineOptions(Started):
    """Options of the engine `vllm`."""

    method: str | None = Field(
        None,
        description="the method by which vLLM knows the draft; as its algorithm says if left out",
    )


class VllmOptions(Started):
    """Options of the capture `vllm`."""

    max_tokens: int = Field(
        4096, ge=1, json_schema_extra=SAME, description="tokens of the longest row"
    )
    in_flight: int = Field(
        1, ge=1,
        description="rows that share a forward; 1: each has its own, and the same bits each time",
    )  # fmt: skip
    self_test: bool = Field(
        True, json_schema_extra=SAME,
        description="compare with transformers when the capture is opened, where the target fits "
        "into memory beside nothing else",
    )  # fmt: skip


class ServerOptions(Asked):
    """Options of the capture `vllm-server`."""

    server: str = Field(
        "http://127.0.0.1:8000", pattern=r"^https?://[^/@\s]+$", json_schema_extra=SAME,
        description="where it listens; an API key comes from the environment, as DRAFTCORE_VLLM_KEY",
    )  # fmt: skip
    folder: str = Field(
        json_schema_extra=SAME,
        description="the folder that it writes states into, as this machine reaches it",
    )  # fmt: skip
    in_flight: int = Field(
        32, ge=1, json_schema_extra=SAME, description="requests under way at the server"
    )
    self_test: bool = Field(
        True, json_schema_extra=SAME,
        description="compare what the server captures with transformers, where the target fits here",
    )  # fmt: skip
