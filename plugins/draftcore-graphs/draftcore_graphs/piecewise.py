"""The backend `piecewise`: torch.compile of each shape, in pieces where one graph cannot hold it all.

What the compiler cannot take into a graph runs between the pieces. With inductor's reduce-overhead, the
default, each piece is a CUDA graph in memory of torch's own. `compiler=eager` and `aot_eager` record
nothing and work on any device; they show what tracing alone changes.

- torch's graphs belong to a thread; see `own_trees`.
- Dynamo keeps compiled code with the code object of a function, and silently stops compiling at eight
  versions of one. So every key has a code object of its own, which goes with the key, and the limit is
  raised during capture for functions that the model's layers share.
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

VERSIONS = 4096  # of one function; no run has so many buckets and layers
MODES = {"inductor": "reduce-overhead", "cudagraphs": None}  # of compilers that record CUDA graphs


class PiecewiseBackend(GraphBackend):
    """Compiles one function per key, and replays by calling it."""

    def __init__(self, compiler: str, mode: str | None) -> None:
        self.compiler, self.mode = compiler, mode
        self._compiled: dict[ShapeKey, Callable[[], Outputs]] = {}

    @classmethod
    def open(cls, compiler: str) -> PiecewiseBackend:
        """Raises UsageError for an unknown compiler, and where one needs a CUDA device and has none."""
        if compiler not in torch.compiler.list_backends(exclude_tags=None):
            raise UsageError(
                f"torch.compile has no backend {compiler!r}\n"
                f"  there are {', '.join(torch.compiler.list_backends())}\n"
                "  leave compiler out for inductor, or set it to aot_eager or eager"
            )
        if compiler in MODES:
            require_cuda("piecewise")
        return cls(compiler, MODES.get(compiler))

    @contextmanager
    def capture_session(self) -> Iterator[None]:
        limits: Any = torch._dynamo.config.patch(
            recompile_limit=VERSIONS, accumulated_recompile_limit=VERSIONS
        )
        with without_collection(), limits:
            yield

    def capture_one(self, key: ShapeKey, fn: Callable[[], Outputs]) -> None:
        """Compile `fn`: the first call compiles, the second and the third may record graphs."""
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
        gc.collect()  # compiled functions are in reference cycles, with graphs and their memory
        torch.cuda.empty_cache()


def alone(fn: Callable[[], Outputs]) -> Callable[[], Outputs]:
    """Return a function that calls `fn` and shares its code object with no other function."""

    def call() -> Outputs:
        return fn()

    return FunctionType(call.__code__.replace(), globals(), "call", None, call.__closure__)


def stepped(compiled: Callable[[], Outputs]) -> Outputs:
    """Call a compiled function; the outputs of the call before may be overwritten."""
    own_trees()
    torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]
    with torch.no_grad():
        return compiled()


def own_trees() -> None:
    """Let this thread have torch's graphs.

    torch keeps them by thread. Before 2.13 it sets up only the thread that imported it, and capture in
    another thread would end in an AssertionError without a message.
    """
    from torch._inductor import cudagraph_trees  # slow to import, and marking a step imports it

    local: Any = cudagraph_trees.local
    if not hasattr(local, "tree_manager_containers"):
        local.tree_manager_containers, local.tree_manager_locks = {}, defaultdict(threading.Lock)
        for name in ("tree_manager_containers", "tree_manager_locks"):
            torch._C._stash_obj_in_tls(name, getattr(local, name))
