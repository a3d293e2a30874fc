"""What a loss and a drafter are compared with beside recorded numbers: plain computations in fp64.

`Naive` has the parts of a decoder straight from their description; a subclass puts its algorithm together
of them, and `require_naive` compares loss and gradients. `require_attention` does so for a fused
attention, `require_recordable` asks whether a drafter's rounds can be recorded.

Shape letters: B batch, T tokens, K drafts.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from draftcore_graphs.recording import RecordingBackend
from torch import Tensor, nn
from torch.nn.functional import silu

from draftcore.contracts.algorithm import Draft, Drafter, StepOutput
from draftcore.contracts.runner import ShapeKey
from draftcore_sdk.algorithm_fixtures import WIDTH

Heads = Sequence[Tensor]  # each a vector


class Naive:
    """Norms, positions, attention and MLP of a decoder: one row and one head at a time."""

    def __init__(self, module: nn.Module, theta: float = 10000.0) -> None:
        self.config: Any = module.config
        self.theta, self.w = theta, dict(module.named_parameters())

    def linear(self, name: str, x: Tensor) -> Tensor:
        return self.w[f"{name}.weight"] @ x

    def rms(self, x: Tensor, name: str) -> Tensor:
        scale: Tensor = (x.pow(2).mean() + self.config.rms_norm_eps).rsqrt()
        return x * scale * self.w[f"{name}.weight"]

    def rope(self, head: Tensor, position: int) -> Tensor:
        turned = int(len(head) * self.config.rope.get("partial_rotary_factor", 1.0))
        half, out = turned // 2, list(head)
        for i in range(half):
            angle = position * self.theta ** (-2 * i / turned)
            cos, sin = math.cos(angle), math.sin(angle)
            out[i] = head[i] * cos - head[i + half] * sin
            out[i + half] = head[i + half] * cos + head[i] * sin
        return torch.stack(out)

    def attention(self, queries: Heads, keys: Sequence[Heads], values: Sequence[Heads]) -> Tensor:
        """Attend to these places; groups of query heads share a head of keys and values."""
        group, heads = len(queries) // len(keys[0]), []
        for head, query in enumerate(queries):
            scores = torch.stack([query @ key[head // group] for key in keys])
            shares = (scores / math.sqrt(len(query))).softmax(0)
            heads.append(shares @ torch.stack([value[head // group] for value in values]))
        return torch.cat(heads)

    def mlp(self, name: str, x: Tensor) -> Tensor:
        gate, up = (self.linear(f"{name}.{part}_proj", x) for part in ("gate", "up"))
        return self.linear(f"{name}.down_proj", silu(gate) * up)


def require_naive(draft: Draft, output: StepOutput, expected: Tensor, rtol: float) -> None:
    """Require of a loss, and of the gradient of every parameter, the naive ones."""
    close = functools.partial(torch.testing.assert_close, rtol=rtol, atol=1e-12)
    ours = output.numerator / output.denominator
    close(ours, expected)
    names, parameters = zip(*draft.module.named_parameters(), strict=True)
    gradients = [torch.autograd.grad(loss, parameters) for loss in (ours, expected)]
    for name, found, right in zip(names, *gradients, strict=True):
        assert right.abs().max() > 0, name
        close(found, right)


def require_attention(
    tensors: Sequence[Tensor],
    attend: Callable[[Sequence[Tensor]], Tensor],
    plain: Callable[[Sequence[Tensor]], Tensor],
    tolerance: float,
) -> None:
    """Require of a fused attention and its gradients those of one softmax in fp64."""
    found, exact = attend(tensors), [t.detach().double().requires_grad_() for t in tensors]
    generator = torch.Generator().manual_seed(1)
    grad = torch.randn(found.shape, generator=generator, dtype=torch.float64).to(found)
    expected = plain(exact)
    ours = found, *torch.autograd.grad(found, tensors, grad)
    theirs = expected, *torch.autograd.grad(expected, exact, grad.double())
    for one, right in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, right.to(one), rtol=tolerance, atol=tolerance)


@torch.inference_mode()
def require_recordable(drafter: Drafter) -> None:
    """Require that a round waits for nothing, and that a recorded one drafts what others do.

    Of a drafter that changes its state in place.
    """
    state, generator = drafter.allocate(3, 50), torch.Generator().manual_seed(5)
    tokens_BT, lengths_B = torch.randint(40, (3, 9), generator=generator), torch.tensor([9, 1, 4])
    features = {
        name: torch.randn(3, 9, WIDTH, generator=generator, dtype=torch.float64)
        for name in drafter.request.names
    }
    drafter.prefill(state, tokens_BT, lengths_B, features, lengths_B)
    backend, key = RecordingBackend(), ShapeKey(3)
    backend.capture_one(key, lambda: drafter.propose(state).tokens_BK)
    counts_B = torch.tensor([1, 2, drafter.num_drafts + 1])
    read = {name: x[:, : drafter.num_drafts + 1] for name, x in features.items()}
    drafter.accept(state, tokens_BT[:, : drafter.num_drafts + 1], read, counts_B)
    assert torch.equal(backend.replay(key), drafter.propose(state).tokens_BK)
