"""From YAML and KEY=VALUE to validated options, with refusals that say what there is and what to do."""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import yaml

from draftcore.errors import UsageError, nearest

if TYPE_CHECKING:
    from pydantic import BaseModel, ValidationError


def read_yaml(path: Path) -> dict[str, Any]:
    """Read a mapping. Raises UsageError for a file that is missing, unreadable or anything else."""
    try:
        with path.open(encoding="utf-8") as stream:
            data = yaml.safe_load(stream)
    except (OSError, UnicodeDecodeError) as error:
        there = ", ".join(sorted(p.name for p in path.parent.glob("*.y*ml"))) or "none"
        text = f"cannot read {path}: {error}\n"
        raise UsageError(f"{text}  YAML files, to be in UTF-8, in {path.parent}: {there}") from None
    except yaml.YAMLError as error:
        raise UsageError(f"{path} is not YAML: {error}\n  correct it there") from None
    if not isinstance(data, dict):
        kind = "is empty" if data is None else f"holds a {type(data).__name__}, not a mapping"
        raise UsageError(f"{path} {kind}\n  it needs at least run, target and algorithm")
    return data


def apply_overrides(data: dict[str, Any], overrides: Iterable[str]) -> None:
    """Set each KEY=VALUE in `data`, in order: a dotted key, a value read as YAML."""
    for override in overrides:
        key, equals, text = override.partition("=")
        if not (equals and key):
            raise UsageError(f"override {override!r} is not KEY=VALUE\n  for example train.lr=1e-4")
        *parents, last = key.split(".")
        section = data
        for parent in parents:
            child = section[parent] = {} if section.get(parent) is None else section[parent]
            if not isinstance(child, dict):
                raise UsageError(f"override {override!r}: {parent!r} is a value, not a section")
            section = child
        try:
            section[last] = yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise UsageError(f"cannot read the value {text!r}: {error}") from None


def validate(path: str, data: Mapping[str, Any], where: str) -> Any:
    """Validate options by the model at `module:Class`; None for data of '', which must be empty.

    Raises UsageError for unknown keys, which the model may have meant to ignore, for bad values
    and for a model that cannot be imported.
    """
    from pydantic import ValidationError  # 70 ms: listing plugins needs none of it

    if not path:
        if data:
            raise UsageError(f"{where}: it has none\n  leave out {', '.join(data)}")
        return None
    model = imported(path, where)
    try:
        return model.model_validate(data, extra="forbid")
    except ValidationError as error:
        raise UsageError(explain(error, model, where, {})) from None


def imported(path: str, where: str) -> Any:
    """Return what a dotted path `module:name` leads to. Raises UsageError where that is nothing."""
    module, _, name = path.partition(":")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise UsageError(f"{where}: {error}\n  python -c 'import {module}' tells more") from error


def explain(
    error: ValidationError, model: type[BaseModel], where: str, gone: Mapping[str, str]
) -> str:
    """Say what is wrong with each key of `model`'s data, and which keys there are, or replace it."""
    lines = [f"{where}: {error.error_count()} wrong"]
    for problem in error.errors(include_url=False):
        path = ".".join(map(str, problem["loc"]))
        if not path:  # a rule about the whole
            lines.append(f"  {problem['msg'].removeprefix('Value error, ')}")
        elif path in gone:
            lines.append(f"  {path}: is gone; {gone[path]}")
        elif problem["type"] == "extra_forbidden":
            *parents, key = problem["loc"]
            known = _keys(model, parents)
            hint = nearest(str(key), known)
            lines.append(f"  {path}: unknown key{hint}; there are {', '.join(known)}")
        elif problem["type"] == "missing":
            lines.append(f"  {path}: is missing")
        else:
            lines.append(f"  {path}: {problem['msg']}, not {problem['input']!r}")
    return "\n".join([*lines, "  correct or leave out these keys"])


def _keys(model: Any, parents: Sequence[int | str]) -> Sequence[str]:
    """Return the keys of the section that `parents` lead to, through lists and optional ones."""
    for parent in parents:
        if parent in model.model_fields:
            annotation = model.model_fields[parent].annotation
            inside = [annotation, *get_args(annotation)]
            model = next((a for a in inside if hasattr(a, "model_fields")), model)
    return list(model.model_fields)
