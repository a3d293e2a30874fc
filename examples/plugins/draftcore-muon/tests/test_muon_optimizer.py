"""Which weights Muon moves, and that both parts move them as torch's own optimizers do."""

import pytest
import torch
from draftcore_muon.optimizer import MuonAndAdamW, hidden_matrices
from torch import Tensor, nn

from draftcore.contracts.algorithm import Draft, TrainingDefaults
from draftcore.errors import UsageError

TUNING = {"lr": 0.1, "weight_decay": 0.01}


def make_draft() -> Draft:
    """Two layers between an embedding and a head, with a norm; weight decay for the first only."""
    torch.manual_seed(0)
    module = nn.ModuleDict(
        {
            "embed": nn.Embedding(9, 4),
            "up": nn.Linear(4, 6),
            "norm": nn.LayerNorm(6),
            "down": nn.Linear(6, 4, bias=False),
            "lm_head": nn.Linear(4, 9, bias=False),
        }
    )
    down = module["down"].weight
    others = [weight for weight in module.parameters() if weight is not down]
    groups = [{"params": others}, {"params": [down], "weight_decay": 0.5}]
    return Draft(module, {}, TrainingDefaults(1e-3, 0.0, 1.0), groups)


def gradients(draft: Draft, step: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(step)
    return [torch.randn(p.shape, generator=generator) for p in draft.module.parameters()]


def test_matrices_are_muons_but_for_embeddings_and_heads() -> None:
    module = make_draft().module
    hidden = hidden_matrices(module)
    names = {name for name, weight in module.named_parameters() if weight in hidden}
    assert names == {"up.weight", "down.weight"}


def test_both_parts_move_their_weights_as_torchs_optimizers_do() -> None:
    """To the bit, over steps whose rate is set from outside; groups keep their own settings."""
    ours, theirs = make_draft(), make_draft()
    optimizer = MuonAndAdamW(ours, **TUNING, betas=(0.9, 0.99))
    named = dict(theirs.module.named_parameters())
    up, down = named.pop("up.weight"), named.pop("down.weight")
    muon = torch.optim.Muon(
        [{"params": [up]}, {"params": [down], "weight_decay": 0.5}],
        **TUNING,
        adjust_lr_fn="match_rms_adamw",
    )
    adam = torch.optim.AdamW(named.values(), **TUNING, betas=(0.9, 0.99))
    for step, rate in enumerate((0.1, 0.05, 0.02)):
        for draft in (ours, theirs):
            pairs = zip(draft.module.parameters(), gradients(draft, step), strict=True)
            for weight, gradient in pairs:
                weight.grad = gradient
        for group in (*optimizer.param_groups, *muon.param_groups, *adam.param_groups):
            group["lr"] = rate
        for one in (optimizer, muon, adam):
            one.step()
    for name, weight in theirs.module.named_parameters():
        assert torch.equal(ours.module.get_parameter(name), weight), name


def test_its_state_is_all_that_both_parts_keep() -> None:
    draft = make_draft()
    optimizer = MuonAndAdamW(draft, **TUNING, betas=(0.9, 0.99))
    for weight, gradient in zip(draft.module.parameters(), gradients(draft, 0), strict=True):
        weight.grad = gradient
    optimizer.step()
    kept = {name: set(optimizer.state[p]) for name, p in draft.module.named_parameters()}
    adam = {"step", "exp_avg", "exp_avg_sq"}
    assert kept.pop("up.weight") == kept.pop("down.weight") == {"momentum_buffer"}
    assert all(keys == adam for keys in kept.values())


def test_sharded_weights_are_refused() -> None:
    draft = make_draft()
    draft.module.get_parameter("up.weight").placements = ()  # type: ignore[attr-defined]
    with pytest.raises(UsageError, match="leave out train"):
        MuonAndAdamW(draft, **TUNING, betas=(0.9, 0.99))
