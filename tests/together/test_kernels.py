"""What Triton's kernels make of logits on CUDA is what torch's own operations make of them."""

from __future__ import annotations

import pytest
import torch
from draftcore_dflash2.loss import selected_cross_entropy
from draftcore_dflash2.options import DFlash2Options
from draftcore_domino.head import corrected_cross_entropy
from draftcore_eagle3.loss import distill
from draftcore_eagle3.options import Eagle3Options
from draftcore_nn import heads, losses
from torch import Tensor

R, H, V, U, E = 300, 64, 3001, 1000, 16
MIXTURES = {"dspark": {"ce": 0.1, "tv": 1.8}, "lk": {"lk_lambda": 1.0, "lk_alpha": 0.5, "kl": 0.1}}
SELECTED = {
    "replaced": DFlash2Options(missing="replace"),
    "taught": DFlash2Options(labels="teacher"),
    "detached": DFlash2Options(stop_gradient=True),
}


def losses_of(
    name: str, h: Tensor, low: Tensor, up: Tensor, own: Tensor, W: Tensor
) -> list[Tensor]:
    weight_R, label_R = (torch.arange(R, device=h.device) * k for k in (1 / R, 7))
    if name == "cross entropy":
        by_row = losses.cross_entropy(h, W, label_R)
        return [(by_row[0] * weight_R).sum(), *by_row]
    if name == "corrected":
        return list(corrected_cross_entropy(h, low, W, up, label_R, weight_R, weight_R[90]))
    if name in MIXTURES:
        rank = (low, up) if name == "dspark" else None
        compared = losses.distribution_losses(
            h, W, W[:R] / 9, label_R, weight_R, MIXTURES[name], low_rank=rank
        )
        return [compared[0], *compared.losses.values(), *compared[2:]]
    if name in SELECTED:  # each row's best tokens have logits of their own
        i, own_H = torch.arange(32, device=h.device), torch.arange(H, device=h.device)
        best = (97 * i[:, None] + 31 * own_H) % V, own_H.expand(32, H)
        W = (W / 10).index_put(best, (3 + i[:, None] / 8).expand(32, H).to(W.dtype))
        row_R = torch.arange(R, device=h.device)
        h = (1 + h.abs()) * (row_R[:, None] % H == own_H)
        label_R = (97 * (row_R % 40) + 31 * (row_R % H)) % V
        options, alpha = SELECTED[name], torch.ones((), device=h.device)
        labels = h.detach() / 2 if options.distils else label_R
        return list(
            selected_cross_entropy(h, low, up, W, labels, weight_R, alpha, (1.0, None), options, 16)
        )
    teacher = losses.teach(W[:R], W, 1.0, None, ids_U=torch.arange(0, 3 * U, 3, device=h.device))
    given = (torch.stack([h, 2 * h, 3 * h]), own, teacher, weight_R.expand(3, -1), weight_R.sum())
    return [*distill(Eagle3Options(), *given), teacher.own_R, teacher.all_R, teacher.label_R]


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["cross entropy", "corrected", "distilled", *MIXTURES, *SELECTED])
def test_kernels_have_the_losses_and_gradients_of_torch(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    kinds, half = {(R, H): 0, (R, E): 0, (V, E): 1, (U, H): 1, (V, H): 0}, torch.bfloat16
    given = [torch.randn(*shape, device="cuda", dtype=half) for shape in kinds]
    leaves = [x.float() if master else x for x, master in zip(given, kinds.values(), strict=True)]
    learned = [x.requires_grad_() for x in leaves[:4]]
    monkeypatch.setattr(heads, "SLICE_ELEMENTS", 100 * V)
    monkeypatch.setattr(heads, "TILE", 128)
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
