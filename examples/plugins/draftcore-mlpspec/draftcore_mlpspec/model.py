"""The draft: a state that every head carries one token on.

From the target's last hidden state h_t and the tokens that follow it, head i = 0 ... K-1 computes

    s_(-1) = norm(h_t) / sqrt(2)          or h_t itself, without `scale_input`
    s_i = GELU(LN_i(P_i s_(i-1) + r E_i[token t+1+i]))
    token t+2+i ~ softmax(W_i s_i)

The paper adds `state_weight` P s and `emb_weight` E, of which LN leaves the ratio r: they are such that
h_t makes half of the last head's state. LN is a norm by the root mean square with a bias. Tied heads
share E, W and LN, and P from the second on. All weights are trained, the vocabulary's as well.

Shape letters: B batch, T tokens, N nodes, H the target's width, D inner width, V vocabulary, R rows
that count.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass

import torch
from draftcore_nn.layers import RMSNorm
from draftcore_nn.losses import cross_entropy
from torch import Tensor, nn
from torch.nn import functional

from draftcore.contracts.algorithm import Draft, DraftBatch, StepOutput, TrainingDefaults

EPS = 1e-6


@dataclass(frozen=True)
class Shape:
    """Everything that fixes a draft's tensors and what it computes with them."""

    hidden_size: int
    vocab_size: int
    num_heads: int
    inner_size: int
    tied: bool
    scale_input: bool


class Norm(RMSNorm):
    """An RMS norm with a bias."""

    def __init__(self, width: int) -> None:
        super().__init__(width, EPS)
        self.bias = nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.bias


class MlpSpecDraft(nn.Module):
    """The heads with their loss. Its parameters have the names that vLLM gives them."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        heads = 1 if shape.tied else shape.num_heads
        inner, later = shape.inner_size, max(1, heads - 1)
        first = nn.Linear(shape.hidden_size, inner, bias=False)
        others = [nn.Linear(inner, inner, bias=False) for _ in range(later)]
        self.emb = nn.ModuleList(nn.Embedding(shape.vocab_size, inner) for _ in range(heads))
        self.proj = nn.ModuleList([first, *others])
        self.ln = nn.ModuleList(Norm(inner) for _ in range(heads))
        self.head = nn.ModuleList(
            nn.Linear(inner, shape.vocab_size, bias=False) for _ in range(heads)
        )
        for matrix in (weight for weight in self.parameters() if weight.ndim == 2):
            nn.init.trunc_normal_(matrix, std=inner**-0.5)
        state_weight = 0.5 ** (0.5 / shape.num_heads)
        self.ratio = math.sqrt((1 - state_weight**2) * inner / 2) / state_weight

    @property
    def first(self) -> Tensor:
        """The first projection, [D, H]; it has the draft's device and dtype."""
        return self.get_parameter("proj.0.weight")

    def enter(self, hidden: Tensor) -> Tensor:
        """Make the target's hidden states [..., H] what the first head takes."""
        hidden = hidden.to(self.first.dtype)
        if not self.shape.scale_input:
            return hidden
        return functional.rms_norm(hidden, hidden.shape[-1:], eps=EPS) / math.sqrt(2)

    def step(self, head: int, state: Tensor, tokens: Tensor) -> Tensor:
        """Carry states on by the tokens [...] that follow them; returns [..., D]."""
        sum_D = self._of(self.proj, head)(state) + self.ratio * self._of(self.emb, head)(tokens)
        return functional.gelu(self._of(self.ln, head)(sum_D))

    def logits(self, head: int, state: Tensor) -> Tensor:
        """Return what a head says of states [..., D], [..., V]."""
        logits: Tensor = self._of(self.head, head)(state)
        return logits

    @staticmethod
    def _of(parts: nn.ModuleList, head: int) -> nn.Module:
        return parts[min(head, len(parts) - 1)]

    def forward(self, batch: DraftBatch) -> StepOutput:
        """Return the loss, the mean over heads of each head's mean cross entropy: a term per head.

        Head i counts where the loss mask has its label, token t+2+i; its metric is `accuracy_i`.
        """
        tokens_BT, mask_BT = batch.token_ids_BT, batch.loss_mask_BT
        state_BTD, terms, counts = self.enter(batch.features["last_hidden"]), [], {}
        for i in range(self.shape.num_heads):
            rows = max(0, tokens_BT.shape[1] - 2 - i)
            state_BTD = self.step(i, state_BTD[:, :rows], tokens_BT[:, i + 1 : i + 1 + rows])
            counting_BT = mask_BT[:, i + 2 :]
            labels_R, number = tokens_BT[:, i + 2 :][counting_BT], counting_BT.sum()
            head_VD = self.get_parameter(f"head.{min(i, len(self.head) - 1)}.weight")
            loss_R, best_R = cross_entropy(state_BTD[counting_BT], head_VD, labels_R)
            terms.append((loss_R.sum(), number, 1 / self.shape.num_heads))
            counts[f"accuracy_{i}"] = (best_R == labels_R).sum(), number
        return StepOutput(terms=terms, counts=counts)


def build(shape: Shape) -> Draft:
    """Build a draft with fresh weights, drawn from torch's global generator."""
    module = MlpSpecDraft(shape)
    defaults = TrainingDefaults(lr=1e-3, warmup_ratio=0.04, clip=1.0)
    return Draft(module, asdict(shape), defaults, [{"params": list(module.parameters())}])
