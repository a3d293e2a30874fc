"""A YAML file and KEY=VALUE overrides, as plain data; what they mean is for others to judge."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml

from draftcore.errors import UsageError


def read_yaml(path: Path) -> dict[str, Any]:
    """Read a mapping. Raises UsageError for a file that is missing, unreadable or anything else."""
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        near = ", ".join(sorted(p.name for p in path.parent.glob("*.y*ml"))) or "none"
        raise UsageError(
            f"no configuration file {path}\n  YAML files in {path.parent}: {near}"
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(
            f"cannot read {path}: {error}\n  name a YAML file, in UTF-8, that you may read"
        ) from None
    except yaml.YAMLError as error:
        problem = str(error).replace("<unicode string>", str(path))
        raise UsageError(f"{path} is not YAML: {problem}\n  correct it there") from None
    if not isinstance(data, dict):
        kind = "is empty" if data is None else f"holds a {type(data).__name__}, not a mapping"
        raise UsageError(f"{path} {kind}\n  it needs at least run, target and algorithm")
    return data


def apply_overrides(data: dict[str, Any], overrides: Iterable[str]) -> None:
    """Set each KEY=VALUE in `data`, in order: a dotted key, a value read as YAML."""
    for override in overrides:
        _apply(data, override)


def _apply(data: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    if not (equals and key):
        raise UsageError(f"override {override!r} is not KEY=VALUE\n  for example train.lr=1e-4")
    *parents, last = key.split(".")
    for parent in parents:
        child = data[parent] = {} if data.get(parent) is None else data[parent]
        if not isinstance(child, dict):
            raise UsageError(f"override {override!r}: {parent!r} is a value, not a section")
        data = child
    data[last] = _scalar(text)


def _scalar(text: str) -> Any:
    """Read a value as YAML 1.1 does, and also 1e-4, which YAML 1.1 takes for a string."""
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise UsageError(f"cannot read the value {text!r}: {error}") from None
    if isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            return value
    return value
