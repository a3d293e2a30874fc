"""The backend `piecewise`: torch.compile of each shape, which splits the work where it has to.

What its compiler cannot take into a graph runs between the pieces. With inductor's reduce-overhead,
the default, each piece is a CUDA graph in memory of torch's own; with `compiler=eager` or
`aot_eager` nothing is recorded, and it works on any device: to see what tracing alone changes.

Two things are odd. torch's own graphs belong to a thread (`own_trees`). And Dynamo keeps what it
compiled with the code of a function, and stops compiling, silently, at eight versions of one. So
every key has code of its own, which goes when the key does, and the limit is raised during capture,
for what the model's layers share.
"""

from __future__ import annotations

import gc
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from draftcore.contracts.runner import GraphBackend, Outputs, ShapeKey
from draftcore.errors import UsageError
from draftcore_graphs.backend import recorded, without_collection
from draftcore_graphs.cuda import require_cuda
from draftcore_graphs.options import PiecewiseOptions

VERSIONS = 4096  # more than any run has buckets and layers


class PiecewiseBackend(GraphBackend):
    """Calls a compiled function per key."""

    def __init__(self, compiler: str, mode: str | None) -> None:
        self.compiler, self.mode = compiler, mode
        self._compiled: dict[ShapeKey, Callable[[], Outputs]] = {}

    @classmethod
    def open(cls, options: PiecewiseOptions) -> PiecewiseBackend:
        """Raises UsageError for a compiler that is unknown, or wants a CUDA device without one."""
        if options.compiler not in torch.compiler.list_backends(exclude_tags=None):
            known = torch.compiler.list_backends()
            raise UsageError(
                f"torch.compile has no backend {options.compiler!r}\n"
                f"  there are {', '.join(known)}\n"
                "  leave compiler out for inductor, or set it to aot_eager or eager"
            )
        if options.records_graphs:
            require_cuda("piecewise")
        mode = options.mode
        if options.compiler == "inductor" and mode is None:
            mode = "reduce-overhead"
        return cls(options.compiler, mode)

    @contextmanager
    def capture_session(self) -> Iterator[None]:
        limits: Any = torch._dynamo.config.patch(
            recompile_limit=VERSIONS, accumulated_recompile_limit=VERSIONS
        )
        with without_collection(), limits:
            yield

    def capture_one(self, key: ShapeKey, fn: Callable[[], Outputs]) -> None:
        """Compile `fn`. The first warm-up compiles, the second and the third call may record."""
        self._compiled.pop(key, None)
        compiled = torch.compile(alone(fn), backend=self.compiler, mode=self.mode, dynamic=False)
        for _ in range(3):
            stepped(compiled)
        self._compiled[key] = compiled

    def can_run(self, batch: Mapping[str, Tensor], key: ShapeKey) -> bool:
        return key in self._compiled

    def replay_session(self) -> AbstractContextManager[None]:
        return nullcontext()

    def replay(self, key: ShapeKey) -> Outputs:
        return stepped(recorded(self._compiled, key))

    def cleanup(self) -> None:
        self._compiled.clear()
        gc.collect()  # what was compiled lies in cycles, and graphs and their memory with it
        torch.cuda.empty_cache()


def alone(fn: Callable[[], Outputs]) -> Callable[[], Outputs]:
    """Return `fn` behind a function whose code is no other function's."""

    def call() -> Outputs:
        return fn()

    return FunctionType(call.__code__.replace(), globals(), "call", None, call.__closure__)


def stepped(compiled: Callable[[], Outputs]) -> Outputs:
    """Call a compiled function, giving up the outputs of the call before."""
    own_trees()
    torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]
    with torch.no_grad():
        return compiled()


def own_trees() -> None:
    """Let this thread have graphs of torch's.

    torch keeps them by thread and, before 2.13, knows the one that imported it and no other: a run
    whose captures have a thread of their own would end in an AssertionError without words.
    """
    from torch._inductor import cudagraph_trees  # as marking a step does

    local: Any = cudagraph_trees.local
    if not hasattr(local, "tree_manager_containers"):
        local.tree_manager_containers, local.tree_manager_locks = {}, defaultdict(threading.Lock)
        for name in ("tree_manager_containers", "tree_manager_locks"):
            torch._C._stash_obj_in_tls(name, getattr(local, name))
