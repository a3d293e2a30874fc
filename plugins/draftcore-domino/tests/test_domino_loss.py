"""The blended loss against a naive head in fp64, the schedule, slices and bf16; the decoder against it.

The backbone's own naive reference is in draftcore-dflash's tests; here its states are given.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from draftcore_dflash.blocks import Blocks, draw_blocks
from draftcore_domino.algorithm import Domino
from draftcore_domino.loss import base_share
from draftcore_domino.model import DominoDraft
from draftcore_domino.options import DominoOptions
from draftcore_nn import losses
from draftcore_sdk.algorithm_checks import check_bf16, ragged_rounds
from draftcore_sdk.algorithm_fixtures import WIDTH, MakeDraft, MakeSamples, accumulate
from draftcore_sdk.algorithm_reference import require_naive, require_recordable
from torch import Tensor
from torch.nn import functional

from draftcore.contracts.algorithm import Draft, DraftBatch, Sample, SampleId, StepContext
from draftcore.contracts.target import TargetSpec
from draftcore.errors import UsageError

SEED = 11
CONTEXT = StepContext(step=4, total_steps=20, seed=SEED)  # lambda 0.7
OPTIONS = DominoOptions()
# fp64 sums of some hundred terms in another order.
check_close = functools.partial(torch.testing.assert_close, rtol=1e-9, atol=1e-12)


class Naive:
    """The head straight from its description: one block, one row, one gate at a time."""

    def __init__(self, module: DominoDraft) -> None:
        self.module, self.config = module, module.config
        self.w: dict[str, Tensor] = dict(module.named_parameters())

    def gru(self, tokens: Sequence[int]) -> list[Tensor]:
        """The state after each token; gates in the order r, z, n, without biases."""
        state = torch.zeros(self.config.gru_hidden_dim, dtype=torch.float64)
        states = []
        for token in tokens:
            x = self.module.embed_tokens[token].double()
            from_x = (self.w["prefix_gru.weight_ih_l0"] @ x).chunk(3)
            from_h = (self.w["prefix_gru.weight_hh_l0"] @ state).chunk(3)
            r, z = (torch.sigmoid(a + b) for a, b in zip(from_x[:2], from_h[:2], strict=True))
            n = torch.tanh(from_x[2] + r * from_h[2])
            state = (1 - z) * n + z * state
            states.append(state)
        return states

    def logits(self, hidden: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor]:
        """Base and final logits of a row; without a state they are the same."""
        base = self.module.head @ hidden
        if state is None:
            return base, base
        low = functional.silu(self.w["embed_proj.0.weight"] @ torch.cat([hidden, state]))
        return base, base + self.w["embed_proj.2.weight"] @ low

    def loss(self, batch: DraftBatch, blocks: Blocks, share: float, gamma: float | None) -> Tensor:
        above, below = torch.zeros((), dtype=torch.float64), 0.0
        hidden_MSH, shift = self.module.block_hidden(batch, blocks), self.config.shift_label
        for block in range(len(blocks.anchor_M)):
            row, a = int(blocks.sample_M[block]), int(blocks.anchor_M[block])
            tokens, mask = batch.token_ids_BT[row].tolist(), batch.loss_mask_BT[row].tolist()
            states = self.gru(tokens[a : a + self.config.block_size])
            for k in range(0 if shift else 1, self.config.block_size):
                at = a + k + int(shift)
                if at >= len(tokens) or not mask[at]:
                    continue
                corrected = k >= (1 if shift else 2)
                state = states[k if shift else k - 1] if corrected else None
                base, final = self.logits(hidden_MSH[block, k], state)
                crosses = [-x.log_softmax(0)[tokens[at]] for x in (base, final)]
                weight = math.exp(-(k if shift else k - 1) / (gamma or math.inf))
                above = above + weight * ((1 - share) * crosses[1] + share * crosses[0])
                below += weight
        return above / below


VARIANTS: dict[str, dict[str, Any]] = {
    "shifted": {},
    "not shifted": {"shift_label": False},
    "no decay": {"loss_decay_gamma": None, "block_size": 6},
    "sliding": {"sliding_window": 3, "shift_label": False, "num_layers": 1, "layers": (4,)},
}


@pytest.mark.parametrize("options", VARIANTS.values(), ids=VARIANTS.keys())
def test_loss_and_gradients_equal_a_naive_head(
    options: dict[str, Any], make_draft: MakeDraft, make_samples: MakeSamples
) -> None:
    draft, samples = make_draft(**options), make_samples(11, 6, 9)
    module = draft.module
    assert isinstance(module, DominoDraft)
    batch = Domino(OPTIONS).collate(samples)
    output = Domino(OPTIONS).forward_loss(draft, batch, CONTEXT)
    blocks, gamma = draw_blocks(batch, 5, SEED), options.get("loss_decay_gamma", 7.0)
    theirs = Naive(module).loss(batch, blocks, share=0.7, gamma=gamma)
    require_naive(draft, output, theirs, rtol=1e-9)


# ------------------------------------------------------------ the schedule


def test_a_schedule_lasts_whole_steps_and_at_least_one() -> None:
    long, none = (
        DominoOptions(lambda_start=s, lambda_ratio=r) for s, r in ((0.8, 0.5), (1.0, 0.0))
    )
    shares = [base_share(long, StepContext(step, 9, 0)) for step in range(1, 10)]
    assert shares == pytest.approx([0.8, 0.6, 0.4, 0.2, 0, 0, 0, 0, 0])  # int(4.5) = 4 steps
    assert [base_share(none, StepContext(step, 9, 0)) for step in (1, 2)] == [1.0, 0.0]


def test_a_run_of_unknown_length_is_refused(
    make_draft: MakeDraft, make_samples: MakeSamples
) -> None:
    batch = Domino(OPTIONS).collate(make_samples(9))
    with pytest.raises(UsageError, match=r"number of steps is unknown(.|\n)*train.max_steps"):
        Domino(OPTIONS).forward_loss(
            make_draft(), batch, StepContext(step=1, total_steps=0, seed=0)
        )


def test_the_context_decides_what_is_trained(
    make_draft: MakeDraft, make_samples: MakeSamples
) -> None:
    """At the start the head gets no gradient; the loss is the base loss, and later the final."""
    batch = Domino(OPTIONS).collate(make_samples(11, 9))
    for step, share, name in ((1, 1.0, "base_loss"), (16, 0.0, "final_loss")):
        draft = make_draft()
        output = Domino(OPTIONS).forward_loss(draft, batch, StepContext(step, 20, SEED))
        assert output.counts["lambda"][0] == share
        check_close(output.numerator, output.counts[name][0])
        output.numerator.backward()  # type: ignore[no-untyped-call]
        for parameter in ("embed_proj.0", "embed_proj.2"):
            gradient = draft.module.get_parameter(f"{parameter}.weight").grad
            assert gradient is not None
            assert bool(gradient.any()) is (share < 1)


# ------------------------------------------------------------ slices and bf16


def test_slices_of_the_head_change_nothing(
    make_draft: MakeDraft, make_samples: MakeSamples, monkeypatch: pytest.MonkeyPatch
) -> None:
    draft, batch = make_draft(), Domino(OPTIONS).collate(make_samples(12, 9))
    whole = accumulate(Domino(OPTIONS), draft, [batch], CONTEXT)
    monkeypatch.setattr(losses, "LOGIT_ELEMENTS", 3 * 270)
    sliced = accumulate(Domino(OPTIONS), draft, [batch], CONTEXT)
    check_close(sliced[0].numerator, whole[0].numerator)
    check_close(dict(sliced[0].counts), dict(whole[0].counts))
    check_close(sliced[1], whole[1])


def test_bf16_compute_keeps_the_loss_and_the_gru_in_fp32(
    make_draft: MakeDraft, make_samples: MakeSamples
) -> None:
    draft = make_draft(dtype=torch.float32)
    batch, module = Domino(OPTIONS).collate(make_samples(30, 20)), draft.module
    check_bf16(Domino(OPTIONS), draft, batch, CONTEXT)
    assert isinstance(module, DominoDraft)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        states, _ = module.read(batch.token_ids_BT)
    assert states.dtype == torch.float32


# ------------------------------------------------------------ decoding


def teacher_forced(
    draft: Draft, tokens_T: Tensor, features: dict[str, Tensor], drafts_K: Tensor
) -> Tensor:
    """Logits of all proposals [K, V] by training's forward, with the drafts as true tokens."""
    module, anchor = draft.module, len(tokens_T) - 1
    assert isinstance(module, DominoDraft)
    known = torch.cat([tokens_T, drafts_K])
    unseen = torch.zeros(len(known) - anchor, WIDTH)
    named = {name: torch.cat([x, unseen]) for name, x in features.items()}
    sample = Sample(SampleId("", 1), known, torch.ones(len(known), dtype=torch.bool), named)
    batch = Domino(DominoOptions()).collate([sample])
    blocks = Blocks.of(torch.tensor([[anchor]]), torch.tensor([[True]]))
    with torch.no_grad():
        hidden = module.block_hidden(batch, blocks)
        correction = module.up(module.low_rank(hidden, module.prefix_states(batch, blocks)))
        correction[:, : module.config.first_corrected_row] = 0.0
        first = module.config.first_row
        return (hidden @ module.head.T + correction)[0, first : first + len(drafts_K)]


@pytest.mark.parametrize("shift", [True, False])
def test_proposals_equal_one_teacher_forced_pass_over_ragged_rounds(
    shift: bool, make_draft: MakeDraft, target: TargetSpec
) -> None:
    draft = make_draft(shift_label=shift)
    drafter = Domino(DominoOptions(block_size=4)).drafter(draft, target.load_model())
    assert drafter.num_drafts == 3
    for tokens_T, features, greedy_K, drawn_K, probs_KV in ragged_rounds(drafter, 250, 0.5):
        logits_KV = teacher_forced(draft, tokens_T, features, greedy_K)
        assert greedy_K.tolist() == logits_KV.argmax(-1).tolist()
        expected_KV = (teacher_forced(draft, tokens_T, features, drawn_K) / 0.5).softmax(-1)
        torch.testing.assert_close(probs_KV, expected_KV, rtol=1e-9, atol=1e-12)
    require_recordable(drafter)
