"""What Triton's kernels make of logits on CUDA is what torch's own operations make of them."""

from __future__ import annotations

import pytest
import torch
from draftcore_domino.head import corrected_cross_entropy
from draftcore_eagle3.loss import distill
from draftcore_eagle3.options import Eagle3Options
from draftcore_nn import heads, losses
from torch import Tensor

R, H, V, U, E = 300, 64, 3001, 1000, 16


def losses_of(
    name: str, h: Tensor, low: Tensor, up: Tensor, own: Tensor, W: Tensor
) -> list[Tensor]:
    weight_R, label_R = (torch.arange(R, device=h.device) * k for k in (1 / R, 7))
    if name == "cross entropy":
        by_row = losses.cross_entropy(h, W, label_R)
        return [(by_row[0] * weight_R).sum(), *by_row]
    if name == "corrected":
        return list(corrected_cross_entropy(h, low, W, up, label_R, weight_R, weight_R[90]))
    teacher = losses.teach(W[:R], W, 1.0, None, ids_U=torch.arange(0, 3 * U, 3, device=h.device))
    given = (torch.stack([h, 2 * h, 3 * h]), own, teacher, weight_R.expand(3, -1), weight_R.sum())
    return [*distill(Eagle3Options(), *given), teacher.own_R, teacher.all_R, teacher.label_R]


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["cross entropy", "corrected", "distilled"])
def test_kernels_have_the_losses_and_gradients_of_torch(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    kinds, half = {(R, H): 0, (R, E): 0, (V, E): 1, (U, H): 1, (V, H): 0}, torch.bfloat16
    given = [torch.randn(*shape, device="cuda", dtype=half) for shape in kinds]
    leaves = [x.float() if master else x for x, master in zip(given, kinds.values(), strict=True)]
    learned = [x.requires_grad_() for x in leaves[:4]]
    monkeypatch.setattr(heads, "SLICE_ELEMENTS", 100 * V)
    found = []
    for suits in (heads.suits, lambda _: False):
        monkeypatch.setattr(heads, "suits", suits)
        values = losses_of(name, *leaves)
        slopes = torch.autograd.grad(values[0], learned, allow_unused=True)
        found.append(([v.detach() for v in values], [s.float() for s in slopes if s is not None]))
    for value, right in zip(found[0][0], found[1][0], strict=True):
        if value.dtype == torch.long:
            assert (value == right).float().mean() > 0.9  # of equal logits any is the best
        else:
            torch.testing.assert_close(value, right, rtol=1e-4, atol=1e-4)
    errors = [(x - y).norm() / y.norm() for x, y in zip(found[0][1], found[1][1], strict=True)]
    assert max(errors) < 0.01  # bf16 rounds to 0.4 %
