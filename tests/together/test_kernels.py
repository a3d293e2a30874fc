"""What Triton's kernels make of logits on CUDA is what torch's own operations make of them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from draftcore_domino.head import corrected_cross_entropy
from draftcore_eagle3.loss import distill
from draftcore_eagle3.options import Eagle3Options
from draftcore_nn import heads, losses
from torch import Tensor

pytestmark = pytest.mark.gpu
R, H, V, U, E, K = 300, 64, 3001, 1000, 16, 3
Inputs = dict[str, Tensor]


def token_loss(x: Inputs) -> tuple[Tensor, list[Tensor]]:
    loss_R, best_R = losses.cross_entropy(x["h"], x["W"], x["label"])
    return (loss_R * x["weight"]).sum(), [loss_R, best_R]


def two_losses(x: Inputs) -> tuple[Tensor, list[Tensor]]:
    share = torch.tensor(0.3, device="cuda")
    given = (x["h"], x["z"], x["W"], x["U"], x["label"], x["weight"], share)
    objective, *by_row = corrected_cross_entropy(*given)
    return objective, by_row


def teachers_loss(x: Inputs) -> tuple[Tensor, list[Tensor]]:
    ids_U = torch.arange(0, 3 * U, 3, device="cuda")
    teacher = losses.teach(x["W"][:R], x["W"], 1.0, None, ids_U=ids_U)
    given = (x["head"], teacher, x["weight"].expand(K, -1), x["weight"].sum())
    total, *by_row = distill(Eagle3Options(), torch.stack([x["h"] * k for k in (1, 2, 3)]), *given)
    return total, [*by_row, teacher.own_R, teacher.all_R, teacher.label_R]


@pytest.mark.parametrize("loss", [token_loss, two_losses, teachers_loss])
def test_kernels_have_the_losses_and_gradients_of_torch(
    loss: Callable[[Inputs], tuple[Tensor, list[Tensor]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    shapes = {"h": (R, H), "z": (R, E), "W": (V, H), "U": (V, E), "head": (U, H), "weight": (R,)}
    half = {n: torch.randn(*s, device="cuda", dtype=torch.bfloat16) for n, s in shapes.items()}
    given = {**half, "weight": half["weight"].float().abs(), "U": half["U"].float()}
    given |= {"head": half["head"].float(), "label": torch.randint(V, (R,), device="cuda")}
    monkeypatch.setattr(heads, "SLICE_ELEMENTS", 100 * V)
    found = []
    for suits in (heads.suits, lambda _: False):
        monkeypatch.setattr(heads, "suits", suits)
        leaves = [given[name].detach().requires_grad_() for name in ("h", "z", "U", "head")]
        names = dict(zip(("h", "z", "U", "head"), leaves, strict=True))
        objective, by_row = loss(given | names)
        slopes = torch.autograd.grad(objective, leaves, allow_unused=True)
        found.append(([objective, *by_row], [s.float() for s in slopes if s is not None]))
    for value, right in zip(found[0][0], found[1][0], strict=True):
        if value.dtype == torch.long:
            assert (value == right).float().mean() > 0.9  # of equal logits any is the best
        else:
            torch.testing.assert_close(value, right, rtol=1e-4, atol=1e-4)
    for slope, right in zip(found[0][1], found[1][1], strict=True):
        assert (slope - right).norm() < 0.01 * right.norm()  # bf16 rounds to 0.4 %
