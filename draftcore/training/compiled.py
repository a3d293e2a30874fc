"""A draft's forward through torch.compile, for as long as that works."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import nn

# Compiling takes a minute or two, and saves a quarter of a step at 8B shapes.
MIN_STEPS_TO_COMPILE = 1000
# Else Inductor compiles anew where a batch's rows times its width cross a number, to fuse reductions
# above it alone; and torch 2.11 ends in an assertion at P-EAGLE's small sizes.
TRITON = {"mix_order_reduction_non_strict_mode": True, "coalesce_tiling_analysis": False}
AUTOCAST = [f"torch.amp.autocast_mode._{verb}_autocast" for verb in ("enter", "exit")]


class Compiled:
    """Compiles a module's forward once for all sizes; `compilations` counts the graphs made so far."""

    def __init__(self, module: nn.Module) -> None:
        self.module, self.compilations = module, 0
        # Of one forward, before torch would run it uncompiled: several drafts share its code.
        torch._dynamo.config.recompile_limit = 64
        # Else it compiles twice, to find out that eps is no input.
        torch._dynamo.config.specialize_float = True
        # Else each start compiles anew what has autograd functions or autocast in it, which the key of
        # torch's cache holds whole: their graphs and their settings (pytorch 149751 and 191363).
        torch._functorch.config.autograd_cache_allow_custom_autograd_functions = True
        torch._inductor.config.unsafe_marked_cacheable_functions = dict.fromkeys(AUTOCAST, "")
        # It warns of names that it does not know.
        torch._inductor.config.load_config({f"triton.{name}": on for name, on in TRITON.items()})
        module.forward = torch.compile(module.forward, dynamic=True, backend=self._compile)

    def _compile(self, graph: Any, inputs: Any) -> Any:
        self.compilations += 1
        return torch._dynamo.lookup_backend("inductor")(graph, inputs)

    def give_up(self, cause: BaseException | None) -> bool:
        """Go on without a compiler where an error has the compiler's as a cause; says whether it was."""
        from torch._dynamo.exc import TorchDynamoException  # 1.5 s, where nothing is compiled

        while cause is not None and not isinstance(cause, TorchDynamoException):
            cause = cause.__cause__
        if cause is None or "forward" not in vars(self.module):
            return False
        del self.module.forward
        problem = (str(cause).strip() or type(cause).__name__).splitlines()[0]
        remedy = "the draft trains without it; train.compile=off says nothing"
        print(f"warning: torch.compile failed: {problem}\n  {remedy}", file=sys.stderr)
        return True
