"""A draft's forward through torch.compile, for as long as that works."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import nn

WORTH = 1000  # steps: compiling takes a minute or two, and saves a quarter of a step at 8B shapes
VERSIONS = 64  # of one forward, before torch would run it uncompiled: several drafts share its code


class Compiled:
    """Compiles a module's forward once for all sizes; `compilations` counts the graphs made so far."""

    def __init__(self, module: nn.Module) -> None:
        self.module, self.compilations = module, 0
        torch._dynamo.config.recompile_limit = VERSIONS
        # Else it compiles twice, to find out that eps is no input.
        torch._dynamo.config.specialize_float = True
        module.forward = torch.compile(module.forward, dynamic=True, backend=self._compile)

    def _compile(self, graph: Any, inputs: Any) -> Any:
        self.compilations += 1
        return torch._dynamo.lookup_backend("inductor")(graph, inputs)

    def give_up(self, error: BaseException) -> bool:
        """Go on without a compiler where an error is the compiler's; says whether it was."""
        from torch._dynamo.exc import TorchDynamoException  # 1.5 s, where nothing is compiled

        found: BaseException | None = error
        while found is not None and not isinstance(found, TorchDynamoException):
            found = found.__cause__
        if found is None or "forward" not in vars(self.module):
            return False
        del self.module.forward
        said = str(found).strip().splitlines()
        print(
            f"warning: torch.compile failed: {said[0] if said else type(found).__name__}\n"
            "  the draft trains without it; train.compile=off says nothing",
            file=sys.stderr,
        )
        return True
