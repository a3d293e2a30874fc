"""What a run may set under `topology.options` for the launcher `ray`; unknown keys are refused."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field


class Request(BaseModel):
    """What one process asks of the machine that it runs on, in Ray's units."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    cpus: float = Field(1, ge=0, le=4096, description="CPUs")
    gpus: float = Field(0, ge=0, le=64, description="GPUs, which no other process is given")
    resources: dict[str, float] = Field(
        {}, description="the cluster's own, e.g. {h100: 1}, to choose a kind of machine"
    )

    def amounts(self) -> dict[str, float]:
        """Return what is asked for, by Ray's names."""
        asked = {"CPU": self.cpus, "GPU": self.gpus, **self.resources}
        return {name: amount for name, amount in asked.items() if amount}


class RayOptions(BaseModel):
    """Options of the launcher `ray`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    address: str = Field(
        "",
        description="of a running cluster; where neither this nor RAY_ADDRESS is set, one is started "
        "on this machine for the run",
    )
    rank: Request = Field(Request(), description="what each rank asks for")
    producer: Request = Field(Request(), description="what each producer asks for")
    patience: float = Field(
        60, gt=0, le=1e6,
        description="seconds that a process may be silent, and that is waited for machines with room; "
        "then a silent process counts as lost, and the run goes on with fewer ranks",
    )  # fmt: skip
