"""Turn pydantic's account of a bad configuration into ours: what was asked, what is there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, get_args

from draftcore.errors import nearest

if TYPE_CHECKING:
    from pydantic import BaseModel, ValidationError


def explain(error: ValidationError, model: type[BaseModel], where: str) -> str:
    """Say what is wrong with each key of `model`'s data, and which keys there are."""
    lines = [f"{where}: {error.error_count()} wrong"]
    for problem in error.errors(include_url=False):
        *parents, key = problem["loc"] or ("",)
        path = ".".join(map(str, problem["loc"]))
        if problem["type"] == "extra_forbidden":
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
