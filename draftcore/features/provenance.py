"""How features were made: what must be equal for one to stand for another.

It is stored beside each sample and in a durable store's manifest, as JSON of the settings that change
a bit of a feature. Of a capture's options all do, unless their field says otherwise:

    patience: float = Field(default=300, json_schema_extra=SAME_FEATURES)

Where the target runs is left out: features captured on a GPU may be trained on elsewhere.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from draftcore.contracts.offers import SAME_FEATURES

if TYPE_CHECKING:
    from pydantic import BaseModel


def changed_options(options: BaseModel | None) -> dict[str, Any]:
    """The options that change features, where they are not at their defaults."""
    if options is None:
        return {}
    extras = {name: info.json_schema_extra for name, info in type(options).model_fields.items()}
    neutral = {
        name
        for name, extra in extras.items()
        if isinstance(extra, dict) and SAME_FEATURES.items() <= extra.items()
    }
    return options.model_dump(mode="json", exclude_defaults=True, exclude=neutral)


def differences(ours: str, theirs: str, whose: str) -> str:
    """Name the settings in which two provenances differ, one a line, indented."""
    here, there = json.loads(ours), json.loads(theirs)
    names = sorted({*here, *there})
    return "\n".join(
        f"  {name}: {as_text(here.get(name))} here, {as_text(there.get(name))} {whose}"
        for name in names
        if here.get(name) != there.get(name)
    )


def as_text(value: Any) -> str:
    """A setting for reading; one that is not set is at its default."""
    return "as by default" if value is None else json.dumps(value)
