"""What the section `data` of a run takes where conversations are its rows."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from draftcore.uris import require_no_secret

Named = Annotated[str, Field(min_length=1)]
Share = Annotated[float, Field(ge=0, le=1)]


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class SourceOptions(Section):
    source: Named = Field(description="a file, or another URI of a source")
    weight: float = Field(1.0, gt=0, le=1000, description="how often each row, or which share")


Sources = Named | tuple[Named | SourceOptions, ...]


class DataOptions(Section):
    train: Sources | None = Field(
        None, description="JSONL of conversations, hf:NAME?split=train, or a list of sources"
    )
    eval: Sources | None = Field(None, description="held-out conversations, in the same forms")
    eval_on_train: bool = Field(
        False, description="let data.eval be data.train: nothing is held out"
    )
    chat_template: Named | None = Field(None, description="file in place of the target's template")
    template_options: dict[str, Any] = Field(
        {}, description="what the template is told, e.g. {enable_thinking: false}"
    )
    max_length: int = Field(2048, ge=2, le=10**7, description="longest sample, in tokens")
    last_turn_only: bool = Field(False, description="learn the last assistant turn only")
    bad_rows: Literal["skip", "refuse"] | Share = Field(
        0.1,
        description="rows that cannot be used: left out, an error, or up to a share of all, or one",
    )
    overlong: Literal["skip", "truncate", "refuse"] = Field("skip", description="rows too long")
    limit: int | None = Field(
        None, ge=1, le=10**9, description="read this many training rows at most"
    )

    @model_validator(mode="after")
    def _fits(self) -> Self:
        for key, sources in (("data.train", self.train), ("data.eval", self.eval)):
            if sources == ():
                raise ValueError(f"{key} is a list of no source: name one, or leave it out")
            for source in (sources,) if isinstance(sources, str) else sources or ():
                require_no_secret(key, source if isinstance(source, str) else source.source)
        if self.eval == self.train is not None and not self.eval_on_train:
            raise ValueError(
                "data.eval is data.train: a draft would be measured on what it learned\n"
                "  name other conversations, or set data.eval_on_train=true"
            )
        return self
