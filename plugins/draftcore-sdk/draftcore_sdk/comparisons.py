"""Compare drafts with training's own forward, and updates with one another, in fp64."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from draftcore.contracts.algorithm import Drafter, Sample, SampleId, StepOutput
from draftcore_sdk.algorithm_checks import Drafted, ragged_rounds
from draftcore_sdk.algorithm_reference import require_recordable

Update = tuple[StepOutput, list[Tensor]]  # what `accumulate` returns
# fp64 sums of some hundred terms in another order.
check_close = functools.partial(torch.testing.assert_close, rtol=1e-9, atol=1e-12)


@torch.no_grad()
def require_trained_drafts(
    drafter: Drafter, tokens: int, temperature: float, logits_of: Callable[[Sample, int], Tensor]
) -> None:
    """Require of greedy and drawn drafts, over ragged rounds, what training computes of them.

    `logits_of` gets a sample and how many of its tokens were known; it returns the logits [K, V] of the
    drafts that follow.
    """
    for drafted in ragged_rounds(drafter, tokens, temperature):
        known = len(drafted.tokens_T)
        greedy_KV = logits_of(continued(drafted, drafted.greedy_K), known)
        assert drafted.greedy_K.tolist() == greedy_KV.argmax(-1).tolist()
        drawn_KV = logits_of(continued(drafted, drafted.drawn_K), known)
        expected_KV = (drawn_KV / temperature).softmax(-1)
        check_close(drafted.probs_KV, expected_KV)
    require_recordable(drafter)


def continued(drafted: Drafted, drafts_K: Tensor) -> Sample:
    """Return the known tokens and drafts as one sample; features that a draft may not read are large."""
    tokens_T = torch.cat([drafted.tokens_T, drafts_K])
    unread = len(drafts_K) + 1, -1
    features = {
        name: torch.cat([x, torch.full_like(x[:1], 1e3).expand(unread)])
        for name, x in drafted.features.items()
    }
    return Sample(SampleId("", 1), tokens_T, torch.ones(len(tokens_T)).bool(), features)


def require_same_update(found: Update, expected: Update) -> None:
    """Compare losses, metrics and gradients."""
    (ours, gradients), (theirs, right) = found, expected
    check_close((ours.numerator, ours.denominator), (theirs.numerator, theirs.denominator))
    check_close(dict(ours.counts), dict(theirs.counts))
    check_close(gradients, right)
