"""Channels: the control plane between producers and the trainer. It carries metadata only."""

import dataclasses
from collections.abc import Mapping
from typing import Any

PLAIN = (str, int, float, bool, type(None))


def require_metadata(record: Any) -> None:
    """Raise TypeError, naming the field, where a record holds more than plain data.

    Features travel through a store: a tensor in here would be copied to every process that looks.
    """
    _walk(record, type(record).__name__)


def _walk(value: Any, place: str) -> None:
    if isinstance(value, PLAIN):
        return
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            _walk(getattr(value, field.name), f"{place}.{field.name}")
    elif isinstance(value, Mapping):
        for key, item in value.items():
            _walk(item, f"{place}[{key!r}]")
    elif isinstance(value, (tuple, list, set, frozenset)):
        for at, item in enumerate(value):
            _walk(item, f"{place}[{at}]")
    else:
        raise TypeError(
            f"{place} is a {type(value).__name__}; the control plane carries plain data"
        )
