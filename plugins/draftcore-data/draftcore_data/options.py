"""What the section `data` of a run takes where conversations are its rows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationInfo,
    field_validator,
    model_validator,
)

from draftcore.errors import nearest
from draftcore.options import validate_as
from draftcore.uris import require_no_secret
from draftcore_data.source import ROW_KEYS

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
    columns: dict[str, Named] = Field(
        {}, description="names that keys of rows have there, e.g. {prompt: question}"
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

    @field_validator("train", "eval", mode="before")
    @classmethod
    def _sources(cls, sources: Any, info: ValidationInfo) -> Any:
        """Refuse a source by its place, where pydantic would tell of each type that it might have been."""
        if sources is None or (isinstance(sources, str) and sources):
            return sources
        read = list[Any]()
        for source in sources if isinstance(sources, list | tuple) else [sources]:
            if not (isinstance(source, SourceOptions) or (source and isinstance(source, str))):
                entry = source if isinstance(source, Mapping) else {"source": source}
                place = f"data.{info.field_name}, source {len(read) + 1}"
                source = validate_as(SourceOptions, entry, place)
            read.append(source)
        return tuple(read)

    @model_validator(mode="after")
    def _fits(self) -> Self:
        for key in self.columns.keys() - ROW_KEYS:
            hint, known = nearest(key, ROW_KEYS), ", ".join(ROW_KEYS)
            raise ValueError(f"data.columns: no key {key!r} is read{hint}; there are {known}")
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
