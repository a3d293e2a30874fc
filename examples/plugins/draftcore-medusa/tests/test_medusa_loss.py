"""The loss against a naive one in fp64, and the promises about batches and memory."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from draftcore_medusa import loss, plugin
from draftcore_medusa.model import MedusaDraft
from draftcore_medusa.options import MedusaOptions
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode

from draftcore.contracts.algorithm import Draft, DraftBatch, Sample, StepContext, StepOutput

CONTEXT = StepContext(step=1, total_steps=1, seed=0)
LENGTHS = (9, 1, 2, 14, 3)
MakeDraft = Callable[..., Draft]
MakeSamples = Callable[..., list[Sample]]
# fp64 sums of some hundred terms in another order.
check_close = functools.partial(torch.testing.assert_close, rtol=1e-10, atol=1e-13)


def run(draft: Draft, samples: Sequence[Sample]) -> StepOutput:
    return plugin.forward_loss(draft, plugin.collate(samples, MedusaOptions()), CONTEXT)


def gradients(draft: Draft, output: StepOutput) -> dict[str, Tensor]:
    names, parameters = zip(*draft.module.named_parameters(), strict=True)
    return dict(zip(names, torch.autograd.grad(output.numerator, parameters), strict=True))


def naive(draft: Draft, samples: Sequence[Sample]) -> tuple[Tensor, float]:
    """One sample, one position, one head at a time, straight from the description."""
    module = draft.module
    assert isinstance(module, MedusaDraft)
    weights = dict(module.named_parameters())
    above, below = torch.zeros((), dtype=torch.float64), 0.0
    for sample in samples:
        tokens, mask = sample.token_ids_T.tolist(), sample.loss_mask_T.tolist()
        for t in range(len(tokens)):
            for i in range(module.config.num_heads):
                if t + 2 + i >= len(tokens) or not mask[t + 2 + i]:
                    continue
                h = sample.features["last_hidden"][t]
                for j in range(module.config.num_layers):
                    name = f"blocks.{i}.layers.{j}"
                    x = weights[f"{name}.weight"] @ h + weights[f"{name}.bias"]
                    h = h + x / (1 + torch.exp(-x))
                z = module.target_head @ h
                weight = module.decay**i
                above = above + weight * (torch.exp(z).sum().log() - z[tokens[t + 2 + i]])
                below += weight
    return above, below


@pytest.mark.parametrize(
    "options", [{}, {"num_heads": 1, "num_layers": 3}, {"num_heads": 6, "decay": 0.5}], ids=str
)
def test_loss_and_gradients_equal_a_naive_computation(
    options: dict[str, Any], make_draft: MakeDraft, make_samples: MakeSamples
) -> None:
    draft, samples = make_draft(**options), make_samples(*LENGTHS)
    output, (above, below) = run(draft, samples), naive(draft, samples)
    check_close(output.numerator, above)
    assert float(output.denominator) == pytest.approx(below, rel=1e-12)
    assert not output.denominator.requires_grad
    wanted = torch.autograd.grad(above, list(draft.module.parameters()))
    for (name, grad), reference in zip(gradients(draft, output).items(), wanted, strict=True):
        check_close(grad, reference, msg=lambda text, name=name: f"{name}: {text}")


def test_padding_order_and_micro_batches_do_not_change_the_loss(
    make_draft: MakeDraft, make_samples: MakeSamples
) -> None:
    draft, samples = make_draft(), make_samples(*LENGTHS)
    whole = run(draft, samples)
    parts = [run(draft, samples[3:]), run(draft, samples[1::-1]), run(draft, samples[2:3])]
    check_close(sum(part.numerator for part in parts), whole.numerator)
    check_close(sum(part.denominator for part in parts), whole.denominator)
    for name, (above, below) in whole.counts.items():
        assert float(above) == pytest.approx(sum(float(p.counts[name][0]) for p in parts)), name
        assert float(below) == pytest.approx(sum(float(p.counts[name][1]) for p in parts)), name
    split = [gradients(draft, part) for part in parts]
    for name, grad in gradients(draft, whole).items():
        check_close(sum(part[name] for part in split), grad)


def test_what_padding_holds_counts_nowhere(
    make_draft: MakeDraft, make_samples: MakeSamples
) -> None:
    draft, samples = make_draft(), make_samples(*LENGTHS)
    batch = plugin.collate(samples, MedusaOptions())
    hidden = batch.features["last_hidden"].clone()
    hidden[~batch.attention_mask_BT] = 1e6
    filled = DraftBatch(
        batch.ids,
        batch.token_ids_BT.masked_fill(~batch.attention_mask_BT, 7),
        batch.loss_mask_BT,
        batch.attention_mask_BT,
        {"last_hidden": hidden},
    )
    one, other = (plugin.forward_loss(draft, b, CONTEXT) for b in (batch, filled))
    assert torch.equal(one.numerator, other.numerator)
    assert torch.equal(one.denominator, other.denominator)


def test_a_batch_without_anything_to_learn_has_loss_zero_and_gradient_zero(
    make_draft: MakeDraft, make_samples: MakeSamples
) -> None:
    draft = make_draft()
    for samples in (make_samples(1, 2), make_samples(12)):
        for sample in samples:
            sample.loss_mask_T.fill_(False)
        output = run(draft, samples)
        assert (output.numerator.item(), output.denominator.item()) == (0.0, 0.0)
        assert all(not grad.any() for grad in gradients(draft, output).values())


class Logits(TorchDispatchMode):
    """Collects how many rows each tensor of logits has that any operation makes."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__()
        self.vocab_size, self.rows = vocab_size, set[int]()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:  # fmt: skip
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple) else (out,):
            if isinstance(tensor, Tensor) and tensor.shape[1:] == (self.vocab_size,):
                self.rows.add(len(tensor))
        return out


def test_logits_exist_for_a_slice_of_rows_at_a_time_and_are_not_kept(
    make_draft: MakeDraft, make_samples: MakeSamples, monkeypatch: pytest.MonkeyPatch
) -> None:
    draft, samples = make_draft(), make_samples(30, 40)
    whole = run(draft, samples)
    expected = gradients(draft, whole)
    config = draft.module.config
    monkeypatch.setattr(loss, "LOGIT_ELEMENTS", 5 * config.vocab_size)
    kept = []
    with Logits(config.vocab_size) as logits:
        with saved_tensors_hooks(lambda x: kept.append(x.shape[1:]) or x, lambda x: x):
            sliced = run(draft, samples)
        found = gradients(draft, sliced)
    assert max(logits.rows - {config.hidden_size}) == 5  # but for the head itself, transposed
    assert kept
    assert (config.vocab_size,) not in kept
    check_close(sliced.numerator, whole.numerator)
    assert sliced.counts.keys() == whole.counts.keys()
    for name, grad in found.items():
        check_close(grad, expected[name])


def test_metrics_count_hits_and_leading_hits(
    make_draft: MakeDraft, make_samples: MakeSamples
) -> None:
    """Tokens are set to what the heads say at two positions: three hits, and hit, miss, hit."""
    draft, (sample,) = make_draft(num_heads=3), make_samples(12)
    with torch.no_grad():
        best = draft.module.logits(sample.features["last_hidden"]).argmax(-1)
    sample.loss_mask_T.fill_(False)
    sample.loss_mask_T[[2, 3, 4, 8, 9, 10]] = True
    sample.token_ids_T[2:5], sample.token_ids_T[8:11] = best[0], best[6]
    sample.token_ids_T[9] += 1
    rows = [
        [t for t in range(10 - i) if sample.loss_mask_T[t + 2 + i]] for i in range(3)
    ]  # what head i learns from, and where it is right
    hits = [[t for t in rows[i] if best[t, i] == sample.token_ids_T[t + 2 + i]] for i in range(3)]
    assert ({0, 6} <= set(hits[0]), 0 in hits[1], 6 in hits[1]) == (True, True, False)
    assert {0, 6} <= set(hits[2])
    lengths = [1 + (t in hits[0]) * (1 + (t in hits[1]) * (1 + (t in hits[2]))) for t in rows[0]]
    table = {n: (float(a), float(b)) for n, (a, b) in run(draft, [sample]).counts.items()}
    assert table == {
        **{f"accuracy_{i}": (len(hits[i]), len(rows[i])) for i in range(3)},
        "acceptance_length": (sum(lengths), 6),
    }
    assert [len(row) for row in rows] == [6, 5, 4]


def test_bf16_compute_keeps_loss_and_gradients_in_fp32(
    make_draft: MakeDraft, make_samples: MakeSamples
) -> None:
    draft, samples = make_draft(dtype=torch.float32), make_samples(*LENGTHS)
    for sample in samples:
        sample.features["last_hidden"] = sample.features["last_hidden"].float()
    exact = run(draft, samples)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = run(draft, samples)
    assert output.numerator.dtype == output.denominator.dtype == torch.float32
    assert all(grad.dtype == torch.float32 for grad in gradients(draft, output).values())
    # bf16 has 8 bits: each of some hundred terms is off by about 2^-8 of its logits.
    torch.testing.assert_close(output.numerator, exact.numerator, rtol=2e-2, atol=0)
    assert torch.equal(output.denominator, exact.denominator)
