"""The Markov head, which corrects logits by the token before, and the confidence head.

With e the embedding of the token before a row and h the row's state, the correction is `markov_w2` f:

- `vanilla`: f = e
- `gated`: f = sigmoid(gate_proj [h, e]) * e
- `rnn`: [g, c, o] = joint_proj [s, e, h]; s = sigmoid(g) s + (1 - sigmoid(g)) tanh(c), f = tanh(o),
  and s is 0 before a block (arXiv 2607.05147, section 3).

Shape letters: M blocks, S rows of a block, H hidden, E rank of the correction, V vocabulary.
"""

from __future__ import annotations

import torch
from draftcore_nn.layers import full_precision
from torch import Tensor, nn

from draftcore_dspark.config import DSparkConfig


class MarkovHead(nn.Module):
    """A correction of low rank; parts have the names that servers know."""

    def __init__(self, config: DSparkConfig) -> None:
        super().__init__()
        rank, width, self.kind = config.markov_rank, config.hidden_size, config.markov_head_type
        self.markov_w1 = nn.Embedding(config.vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, config.vocab_size, bias=False)
        nn.init.normal_(self.markov_w1.weight, std=0.01)
        if self.kind == "gated":
            self.gate_proj = nn.Linear(width + rank, rank)
            nn.init.zeros_(self.gate_proj.bias)
        if self.kind == "rnn":
            self.joint_proj = nn.Linear(2 * rank + width, 3 * rank)
            nn.init.zeros_(self.joint_proj.bias)

    def forward(self, embedded_MSE: Tensor, hidden_MSH: Tensor) -> Tensor:
        """Return f of every row, [M, S, E], where the tokens before all rows are known."""
        if self.kind != "rnn":
            return self.step(embedded_MSE, hidden_MSH, embedded_MSE)[0]
        state_ME, factors = torch.zeros_like(embedded_MSE[:, 0]), []
        for row in zip(embedded_MSE.unbind(1), hidden_MSH.unbind(1), strict=True):
            factor_ME, state_ME = self.step(*row, state_ME)
            factors.append(factor_ME)
        return torch.stack(factors, 1)

    def step(self, embedded_E: Tensor, hidden_H: Tensor, state_E: Tensor) -> tuple[Tensor, Tensor]:
        """Return f of one row of each block, and the state that the next row goes on from."""
        if self.kind == "gated":
            gate_E = torch.sigmoid(self.gate_proj(torch.cat([hidden_H, embedded_E], -1)))
            return gate_E * embedded_E, state_E
        if self.kind == "rnn":
            joined = torch.cat([state_E, embedded_E, hidden_H], -1)
            gate_E, candidate_E, output_E = self.joint_proj(joined).chunk(3, -1)
            kept_E = torch.sigmoid(gate_E)
            return torch.tanh(output_E), kept_E * state_E + (1 - kept_E) * torch.tanh(candidate_E)
        return embedded_E, state_E

    def embed(self, tokens: Tensor, dtype: torch.dtype) -> Tensor:
        """Embed the tokens before rows, [...], as [..., E] in the dtype of the rows' states."""
        return self.markov_w1(tokens).to(dtype)  # type: ignore[no-any-return]


class ConfidenceHead(nn.Module):
    """The chance that a row's draft is accepted if those before it are, as a logit.

    It computes in its weights' own precision, also under autocast, as servers do.
    """

    def __init__(self, config: DSparkConfig) -> None:
        super().__init__()
        self.with_markov = config.confidence_head_with_markov
        more = config.markov_rank if self.with_markov else 0
        self.proj = nn.Linear(config.hidden_size + more, 1)
        nn.init.zeros_(self.proj.bias)

    def forward(self, hidden_H: Tensor, embedded_E: Tensor) -> Tensor:
        """Return logits [...] of states [..., H] and embeddings [..., E] of the tokens before."""
        read = torch.cat([hidden_H, embedded_E], -1) if self.with_markov else hidden_H
        with full_precision(read.device):
            return self.proj(read.to(self.proj.weight.dtype))[..., 0]  # type: ignore[no-any-return]
