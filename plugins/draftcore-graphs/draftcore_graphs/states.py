"""The tensors in a drafter's decoding state, whatever its type.

Each drafter has a state of its own: a dataclass, a dict, a list or tuple, or these nested. Graphs need
its tensors, each with the batch as its first dimension, and allow nothing else in it, as a graph would
freeze what a state keeps on the host. `None` is allowed, as it cannot change.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor


def rebuild(state: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Return a state of the same types with `change` of every tensor. Raises TypeError for others."""
    if isinstance(state, Tensor):
        return change(state)
    if state is None:
        return None
    if dataclasses.is_dataclass(state) and not isinstance(state, type):
        made = copy.copy(state)
        for field in dataclasses.fields(state):
            value = rebuild(getattr(state, field.name), change)
            object.__setattr__(made, field.name, value)
        return made
    if isinstance(state, dict):
        return {name: rebuild(value, change) for name, value in state.items()}
    if isinstance(state, list | tuple):
        values = [rebuild(value, change) for value in state]
        return type(state)(*values) if hasattr(state, "_fields") else type(state)(values)
    raise TypeError(type(state).__name__)


def tensors(state: Any) -> list[Tensor]:
    """Return the tensors of a state, in the order of its fields, keys or items."""
    return [leaf for _, leaf in _leaves(state)]


def narrow(state: Any, rows: int) -> Any:
    """Return the state of the first rows only, in the same storage."""
    return rebuild(state, lambda tensor: tensor[:rows])


def settle(static: Any, state: Any) -> None:
    """Copy the tensors of `state` into the first rows of those of `static`, unless they lie there."""
    for place, tensor in zip(tensors(static), tensors(state), strict=True):
        if tensor.data_ptr() != place.data_ptr():
            place[: len(tensor)].copy_(tensor)


def fault(state: Any, rows: int) -> str | None:
    """Return why a state that was allocated for `rows` cannot lie in static buffers, None if it can."""
    for path, leaf in _leaves(state):
        if not isinstance(leaf, Tensor):
            return f"{path} is a {type(leaf).__name__}, which a graph would freeze"
        if leaf.ndim == 0 or len(leaf) != rows:
            return f"{path} is of shape {tuple(leaf.shape)}, without the batch of {rows} first"
    return None


def _leaves(state: Any, path: str = "state") -> Iterator[tuple[str, Any]]:
    if dataclasses.is_dataclass(state) and not isinstance(state, type):
        for field in dataclasses.fields(state):
            yield from _leaves(getattr(state, field.name), f"{path}.{field.name}")
    elif isinstance(state, dict):
        for name, value in state.items():
            yield from _leaves(value, f"{path}[{name!r}]")
    elif isinstance(state, list | tuple):
        for at, value in enumerate(state):
            yield from _leaves(value, f"{path}[{at}]")
    elif state is not None:
        yield path, state
