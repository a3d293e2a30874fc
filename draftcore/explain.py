"""Validate data by a pydantic model, and explain a refusal: what was asked, what is there."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, get_args

from draftcore.errors import UsageError, nearest

if TYPE_CHECKING:
    from pydantic import BaseModel, ValidationError


def validate(path: str, data: Mapping[str, Any], where: str) -> Any:
    """Validate options by the model at `module:Class`; None for data of '', which must be empty.

    Raises UsageError for unknown keys, which the model may have meant to ignore, for bad values
    and for a model that cannot be imported.
    """
    from pydantic import ValidationError  # 70 ms: listing plugins needs none of it

    module, _, name = path.partition(":")
    if not module:
        if data:
            raise UsageError(f"{where}: it has none\n  leave out {', '.join(data)}")
        return None
    try:
        model = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise UsageError(f"{where}: {error}\n  python -c 'import {module}' tells more") from error
    try:
        return model.model_validate(data, extra="forbid")
    except ValidationError as error:
        raise UsageError(explain(error, model, where)) from None


def explain(error: ValidationError, model: type[BaseModel], where: str) -> str:
    """Say what is wrong with each key of `model`'s data, and which keys there are."""
    lines = [f"{where}: {error.error_count()} wrong"]
    for problem in error.errors(include_url=False):
        *parents, key = problem["loc"] or ("",)
        path = ".".join(map(str, problem["loc"]))
        if not problem["loc"]:  # a rule about the whole
            lines.append(f"  {problem['msg'].removeprefix('Value error, ')}")
        elif problem["type"] == "extra_forbidden":
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
