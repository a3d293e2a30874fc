"""The candidate selector: it scores the best tokens of a row by the token in the row before.

score(c | prev) = u[c] + <P[prev] * (Ph h), S[c]>, with u = W h the row's own logits, P and S tables of
[V, E], and Ph: H to E. S starts at zero, so the scores start at u.

Shape letters: R rows, K candidates, H hidden, E rank, V vocabulary.
"""

from __future__ import annotations

import torch
from draftcore_nn.layers import full_precision
from torch import Tensor, nn
from torch.nn import functional


class CandidateSelector(nn.Module):
    """The selector's tensors."""

    def __init__(self, vocab_size: int, width: int, rank: int) -> None:
        super().__init__()
        self.predecessor_codebook = nn.Parameter(torch.empty(vocab_size, rank).normal_(std=0.02))
        self.successor_codebook = nn.Parameter(torch.zeros(vocab_size, rank))
        self.hidden_projection = nn.Linear(width, rank, bias=False)

    def query(self, hidden_RH: Tensor, previous_R: Tensor) -> Tensor:
        """Return what candidates are compared with, [R, E], in fp32 at least."""
        gate_RE: Tensor = self.hidden_projection(hidden_RH)
        return functional.embedding(previous_R, self.predecessor_codebook) * gate_RE


def score(unary_RK: Tensor, query_RE: Tensor, next_RKE: Tensor) -> Tensor:
    """Score candidates with these logits of their own and these rows of S, in the dtype of the query."""
    with full_precision(unary_RK.device):
        pairs_RK = (next_RKE @ query_RE[..., None])[..., 0]
        return unary_RK.to(pairs_RK.dtype) + pairs_RK
