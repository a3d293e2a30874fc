"""The backend `recording`, for any device: it records a list of operations and replays that list.

It behaves as a CUDA graph does, so that runners, drafters and models can be tested without a GPU. A
replay calls no line of the recorded function, so what was computed on the host does not change. Tensors
from outside are read at the addresses that they had: updates in place are seen, moved storage is not.
Outputs lie in the same memory every time. An operation that waits for the device is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

from draftcore.contracts.runner import GraphBackend, Outputs, ShapeKey
from draftcore.errors import DraftcoreError

# Operations that hand a value of the device to the host, or whose output's size depends on one.
WAITS = frozenset({
    "_local_scalar_dense", "equal", "is_nonzero", "item", "masked_select", "nonzero",
    "nonzero_numpy", "unique_dim", "unique_consecutive", "_unique", "_unique2",
})  # fmt: skip


class RecordingBackend(GraphBackend):
    """Records on any device; slower than eager, as it is made for tests."""

    def __init__(self) -> None:
        self.tapes: dict[ShapeKey, Tape] = {}

    @contextmanager
    def capture_session(self) -> Iterator[None]:
        yield

    @torch.inference_mode()
    def capture_one(self, key: ShapeKey, fn: Callable[[], Outputs]) -> None:
        self.tapes.pop(key, None)
        for _ in range(2):
            fn()
        tape = Tape()
        with tape:
            tape.outputs = fn()
        self.tapes[key] = tape

    def can_run(self, batch: Mapping[str, Tensor], key: ShapeKey) -> bool:
        return key in self.tapes

    @contextmanager
    def replay_session(self) -> Iterator[None]:
        yield

    @torch.inference_mode()
    def replay(self, key: ShapeKey) -> Outputs:
        return self.tapes[key].replay()

    def cleanup(self) -> None:
        self.tapes.clear()


class Tape(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The operations of one call, each with its arguments and the tensors that it returned."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.steps: list[tuple[Any, Any, Any, list[Tensor]]] = []
        self.made: dict[int, Tensor] = {}  # kept, so that no id is used twice
        self.read: dict[int, tuple[Tensor, Tensor]] = {}
        self.outputs: Outputs = None

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        require_no_wait(func, args)
        given = tree_map(self._place, (args, kwargs))
        result = func(*args, **kwargs)
        made = [leaf for leaf in tree_flatten(result)[0] if isinstance(leaf, Tensor)]
        for tensor in made:
            if id(tensor) not in self.read:  # an operation in place returns its argument
                self.made[id(tensor)] = tensor
        self.steps.append((func, *given, made))
        return result

    def _place(self, value: Any) -> Any:
        """Return what a replay is to read: the tensor of an earlier step, or one at this address."""
        if not isinstance(value, Tensor) or id(value) in self.made:
            return value
        if id(value) not in self.read:
            self.read[id(value)] = (value, value.detach())
        return self.read[id(value)][1]

    def replay(self) -> Outputs:
        now: dict[int, Tensor] = {}

        def current(value: Any) -> Any:
            return now.get(id(value), value) if isinstance(value, Tensor) else value

        for func, args, kwargs, made in self.steps:
            given = tree_map(current, (args, kwargs))
            result = func(*given[0], **given[1])
            fresh = [leaf for leaf in tree_flatten(result)[0] if isinstance(leaf, Tensor)]
            now.update({id(old): new for old, new in zip(made, fresh, strict=True)})

        def settled(static: Any) -> Any:
            """Put an output where it lay when it was recorded."""
            if isinstance(static, Tensor) and (value := current(static)) is not static:
                static.copy_(value)
            return static

        return tree_map(settled, self.outputs)


def require_no_wait(func: Any, args: tuple[Any, ...]) -> None:
    """Raise DraftcoreError for an operation that no graph can hold."""
    name = func.overloadpacket.__name__
    masks = name in ("index", "index_put", "index_put_", "_index_put_impl_") and any(
        isinstance(index, Tensor) and index.dtype == torch.bool for index in args[1]
    )
    if name in WAITS or masks:
        what = "indexes by a mask" if masks else f"calls {name}"
        raise DraftcoreError(
            f"a function that is being recorded as a graph {what}, which waits for the device\n"
            "  its result would be frozen: compute with tensors of fixed shapes only"
        )
