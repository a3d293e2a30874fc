"""The outputs of graphs and breaks: tensors, also in dicts, tuples and lists, or None."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor

from draftcore.contracts.runner import Outputs
from draftcore.errors import DraftcoreError


def mapped(value: Any, fn: Callable[[Tensor], Any]) -> Any:
    """Return `value` with `fn` of each tensor in it; other objects stay as they are."""
    if isinstance(value, Tensor):
        return fn(value)
    if isinstance(value, dict):
        return {name: mapped(inner, fn) for name, inner in value.items()}
    if type(value) in (tuple, list):
        return type(value)(mapped(inner, fn) for inner in value)
    return value


def leaves(outputs: Outputs) -> Iterator[Tensor]:
    """Yield the tensors of outputs, in order."""
    if isinstance(outputs, Tensor):
        yield outputs
    elif isinstance(outputs, dict):
        for inner in outputs.values():
            yield from leaves(inner)
    elif isinstance(outputs, tuple | list):
        for inner in outputs:
            yield from leaves(inner)


def form(outputs: Outputs) -> Any:
    """Return the containers, shapes and dtypes of outputs, to be compared with `==`.

    Raises DraftcoreError for an object that cannot be an output.
    """
    if outputs is None:
        return None
    if isinstance(outputs, Tensor):
        return tuple(outputs.shape), outputs.dtype
    if isinstance(outputs, dict):
        return {name: form(inner) for name, inner in outputs.items()}
    if type(outputs) in (tuple, list):
        return type(outputs)(form(inner) for inner in outputs)
    raise DraftcoreError(
        f"a function that is recorded, or a break in it, returned a {type(outputs).__name__}\n"
        "  let it return a tensor, None, or a dict, tuple or list of these"
    )
