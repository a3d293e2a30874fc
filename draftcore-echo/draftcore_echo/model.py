"""The draft: a small gated cell that carries the target's last hidden state on, token by token.

    g_0 = last_hidden[t]                              with which the target wrote token t+1
    g_k = g_(k-1) + cell(norm(g_(k-1)), norm(E[token t+k]))
    token t+k+1 ~ softmax(W g_k)                      k = 1 ... steps

E and W are the target's own embedding and head, frozen, and kept out of checkpoints and exports.
Training unrolls all steps from every position at once, on the data's tokens. Its loss is the sum of
cross entropies over the tokens to be learned, divided by the sum of their weights: one ratio, so
that neither padding nor the split into batches changes an update.

Shape letters: B batch, T tokens, H hidden, V vocabulary, R rows that count, S a slice of them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from draftcore.errors import DraftcoreError, UsageError
from draftcore.records import Draft, DraftBatch, StepOutput, TrainingDefaults
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

if TYPE_CHECKING:
    from draftcore.target import TargetSpec

    from draftcore_echo.options import ChainOptions

# Logits exist for this many rows at a time: with 150,000 tokens they fill 300 MiB in fp32.
SLICE = 512


class Cell(nn.Module):
    """One step of the draft, [..., H] and [..., H] to [..., H]."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.state_norm = nn.RMSNorm(width, eps=1e-6)
        self.token_norm = nn.RMSNorm(width, eps=1e-6)
        self.gate = nn.Linear(2 * width, inner, bias=False)
        self.up = nn.Linear(2 * width, inner, bias=False)
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, state: Tensor, token: Tensor) -> Tensor:
        both = torch.cat([self.state_norm(state), self.token_norm(token)], -1)
        change: Tensor = self.down(functional.silu(self.gate(both)) * self.up(both))
        return state + change


class ChainDraft(nn.Module):
    """The cell between the target's embedding and its head (None where it is the embedding)."""

    embedding: Tensor
    head: Tensor | None

    def __init__(
        self, inner: int, steps: int, decay: float, embedding_VH: Tensor, head_VH: Tensor | None
    ) -> None:
        super().__init__()
        self.steps, self.decay = steps, decay
        self.cell = Cell(embedding_VH.shape[1], inner)
        self.register_buffer("embedding", embedding_VH, persistent=False)
        self.register_buffer("head", head_VH, persistent=False)

    def forward(self, batch: DraftBatch) -> StepOutput:
        """Unroll the cell; metrics are `accuracy` and, per step k, `accuracy_k`."""
        tokens_BT, mask_BT, head_VH = batch.token_ids_BT, batch.loss_mask_BT, self.head_weight()
        state_BTH = self.enter(batch.features)
        numerator = denominator = hits = total = torch.zeros((), device=tokens_BT.device)
        counts: dict[str, tuple[Tensor, Tensor]] = {}
        for k in range(1, self.steps + 1):
            # Row t takes token t+k and predicts token t+k+1, so each step has one row less.
            rows = max(0, tokens_BT.shape[1] - 1 - k)
            state_BTH = self.cell(state_BTH[:, :rows], self.embed(tokens_BT[:, k : k + rows]))
            counting = mask_BT[:, k + 1 :]
            labels_R = tokens_BT[:, k + 1 :][counting]
            loss, right = summed_loss(state_BTH[counting], head_VH, labels_R)
            weight, number = self.decay ** (k - 1), counting.sum()
            numerator, denominator = numerator + weight * loss, denominator + weight * number
            hits, total = hits + right, total + number
            counts[f"accuracy_{k}"] = right, number
        return StepOutput(numerator, denominator, {"accuracy": (hits, total), **counts})

    def enter(self, features: Mapping[str, Tensor]) -> Tensor:
        """Take the target's features [..., H] as states, in the dtype of the weights."""
        return features["last_hidden"].to(self.cell.down.weight.dtype)

    def embed(self, tokens: Tensor) -> Tensor:
        """Embed tokens [...] into [..., H]."""
        return functional.embedding(tokens, self.embedding).to(self.cell.down.weight.dtype)

    def head_weight(self) -> Tensor:
        """The target's head [V, H], in the dtype of products: autocast's, or the weights'."""
        head_VH, weight = self.embedding if self.head is None else self.head, self.cell.down.weight
        autocast = torch.is_autocast_enabled(weight.device.type)
        dtype = torch.get_autocast_dtype(weight.device.type) if autocast else weight.dtype
        return head_VH.to(dtype)


def summed_loss(state_RH: Tensor, head_VH: Tensor, labels_R: Tensor) -> tuple[Tensor, Tensor]:
    """Return the sum of cross entropies and the number of right answers; 0 and 0 for no rows.

    A slice's logits are made again in the backward pass, instead of kept.
    """
    loss, right = state_RH[:0].sum(), labels_R.new_zeros(())
    for start in range(0, len(labels_R), SLICE):
        part = slice(start, start + SLICE)
        more, hits = checkpoint(
            _slice_loss, state_RH[part], head_VH, labels_R[part], use_reentrant=False
        )
        loss, right = loss + more, right + hits
    return loss, right


def _slice_loss(state_SH: Tensor, head_VH: Tensor, labels_S: Tensor) -> tuple[Tensor, Tensor]:
    logits_SV = functional.linear(state_SH, head_VH)
    logits_SV = logits_SV.to(torch.promote_types(logits_SV.dtype, torch.float32))
    loss = functional.cross_entropy(logits_SV, labels_S, reduction="sum")
    return loss, (logits_SV.argmax(-1) == labels_S).sum()


def build(target: TargetSpec, inner_size: int, options: ChainOptions) -> Draft:
    """Build a draft with fresh weights, drawn from torch's global generator."""
    tied = bool(target.text_config.tie_word_embeddings)
    head_VH = None if tied else target.head()
    module = ChainDraft(inner_size, options.steps, options.decay, target.embedding(), head_VH)
    for linear in (module.cell.gate, module.cell.up, module.cell.down):
        nn.init.normal_(linear.weight, std=0.02)
    vocab_size, hidden_size = module.embedding.shape
    return Draft(
        module=module,
        config={"hidden_size": hidden_size, "vocab_size": vocab_size, "inner_size": inner_size},
        defaults=TrainingDefaults(lr=1e-3, warmup_ratio=0.04, clip=1.0),
        parameter_groups=[{"params": list(module.parameters())}],
        frozen=frozenset({"embedding", "head"}),
        wrap_units=("cell",),
    )


# ---------------------------------------------------------------- files


def save(draft: Draft, folder: Path, layout: str) -> None:
    """Write config.json and model.safetensors; raises UsageError for another layout."""
    if layout != "serving":
        raise UsageError(f"there is no layout {layout!r}\n  ask for layout serving")
    tensors = {name: p.detach().cpu().contiguous() for name, p in draft.module.named_parameters()}
    broken = [name for name, tensor in tensors.items() if not tensor.isfinite().all()]
    if broken:
        raise DraftcoreError(
            f"{', '.join(broken)} holds inf or nan: the training run diverged\n"
            "  export an earlier checkpoint, or train with a lower learning rate"
        )
    config = {"architectures": ["ChainDraft"], **draft.config}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def load(folder: Path, target: TargetSpec, options: ChainOptions) -> Draft:
    """Read what `save` wrote. Raises UsageError for a draft of another target, or another kind."""
    try:
        config: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        draft = build(target, int(config["inner_size"]), options)
        draft.module.load_state_dict(load_file(folder / "model.safetensors"))
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        raise UsageError(
            f"{folder} holds no draft that echo can read\n"
            f"  {type(error).__name__}: {error}\n"
            "  give a folder that `draftcore export` wrote"
        ) from error
    theirs = {name: config.get(name) for name in draft.config}
    if theirs != draft.config:
        raise UsageError(
            f"the draft in {folder} is not for the target {target.path!r}\n"
            f"  draft: {theirs}, target: {dict(draft.config)}\n"
            "  set target.path to the model that it was trained for"
        )
    return draft
