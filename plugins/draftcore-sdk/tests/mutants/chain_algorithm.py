"""A small right algorithm in one file: a chain of MLP steps under the target's own head.

Row t joins two layers and the last hidden state of token t; a step adds the next token's embedding
and predicts the token after it; the step's state is the next step's input. The algorithm suite is
run over this file as it is, and over the mutants that `algorithms.py` makes of it.
"""

import json
from dataclasses import dataclass

import torch
from draftcore_nn.served import Suspect, require_server
from pydantic import BaseModel, Field
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence

from draftcore import hookimpl
from draftcore.contracts.algorithm import Draft, DraftBatch, Proposal, StepOutput, TrainingDefaults
from draftcore.contracts.capture import FeatureRequest
from draftcore.contracts.offers import Offer
from draftcore.contracts.serving import DraftInput
from draftcore.errors import UsageError


class Options(BaseModel):
    steps: int = Field(default=3, ge=1, description="tokens drafted")


class Chain(nn.Module):
    def __init__(self, layers, steps, embedding_VH, head_VH):
        super().__init__()
        self.layers, self.steps, width = layers, steps, embedding_VH.shape[1]
        self.join = nn.Linear(3 * width, width, bias=False)
        self.mix = nn.Linear(2 * width, 256)
        self.out = nn.Linear(256, width)
        self.norm = nn.RMSNorm(width)
        self.register_buffer("embedding", embedding_VH, persistent=False)
        self.register_buffer("head", head_VH, persistent=False)

    def combine(self, features):
        """Features [..., H] of tokens to the first state."""
        names = [f"hidden.{layer}" for layer in self.layers]
        parts = [features[name] for name in (*names, "last_hidden")]
        return self.join(torch.cat([functional.rms_norm(x, x.shape[-1:]) for x in parts], -1))

    def advance(self, state, tokens):
        """One step: the state after a token, and the logits of the token after that."""
        embedded = functional.embedding(tokens, self.embedding).to(state.dtype)
        inner = functional.silu(self.mix(torch.cat([self.norm(state), embedded], -1)))
        state = state + self.out(inner)
        return state, self.norm(state) @ self.head.T.to(state.dtype)

    def forward(self, batch, context):
        state, tokens, mask = self.combine(batch.features), batch.token_ids_BT, batch.loss_mask_BT
        shift = lambda x, k: functional.pad(x[:, k:], (0, min(k, x.shape[1])))  # noqa: E731
        numerator, denominator = state.sum() * 0, torch.zeros((), dtype=state.dtype)
        for k in range(self.steps):
            state, logits = self.advance(state, shift(tokens, k + 1))
            weight = shift(mask, k + 2).to(state.dtype)
            loss = functional.cross_entropy(
                logits.flatten(0, 1), shift(tokens, k + 2).flatten(), reduction="none"
            )
            numerator = numerator + (loss * weight.flatten()).sum()
            denominator = denominator + weight.sum()
        counts = {"loss": (numerator.detach(), denominator)}
        return StepOutput(numerator, denominator, counts)


@hookimpl
def describe():
    capabilities = frozenset(
        {"compile", "disagg", "cross_entropy", "layout:serving", "served:chat"}
    )
    return [Offer("algorithm", "chain", capabilities, f"{__name__}:Options")]


@hookimpl
def feature_request(target, options):
    return FeatureRequest((2, target.num_layers - 3), last_hidden=True, dtype="float32")


@hookimpl
def build_draft(target, options):
    layers = feature_request(target, options).layers
    module = Chain(layers, options.steps, target.embedding(), target.head())
    return Draft(
        module=module,
        config={"layers": layers, "steps": options.steps},
        defaults=TrainingDefaults(lr=1e-3, warmup_ratio=0.0, clip=1.0),
        parameter_groups=[{"params": list(module.parameters())}],
        frozen=frozenset({"embedding", "head"}),
        wrap_units=("mix", "out"),
    )


@hookimpl
def collate(samples):
    pad = lambda parts: pad_sequence(list(parts), batch_first=True)  # noqa: E731
    return DraftBatch(
        ids=tuple(s.id for s in samples),
        token_ids_BT=pad(s.token_ids_T for s in samples),
        loss_mask_BT=pad(s.loss_mask_T for s in samples),
        attention_mask_BT=pad(torch.ones_like(s.loss_mask_T) for s in samples),
        features={n: pad(s.features[n] for s in samples) for n in samples[0].features},
    )


@hookimpl
def forward_loss(draft, batch, context):
    return draft.module(batch, context)


@hookimpl
def disagg_row():
    return ("hidden", "topk")


@hookimpl
def build_disagg_draft_input(batch, last_tokens, future_map):
    return DraftInput(batch.hidden_BH, batch.topk_p_BK, batch.topk_index_BK, last_tokens)


@dataclass
class State:
    hidden_BH: torch.Tensor
    last_B: torch.Tensor


class ChainDrafter:
    def __init__(self, module):
        self.module, self.num_drafts = module, module.steps
        self.request = FeatureRequest(module.layers, last_hidden=True, dtype="float32")

    @torch.inference_mode()
    def allocate(self, batch, max_len):
        width = self.module.head.shape[1]
        return State(torch.zeros(batch, width), torch.zeros(batch, dtype=torch.long))

    @torch.inference_mode()
    def prefill(self, state, tokens_BT, lengths_B, features, next_B):
        self.take(state, features, lengths_B - 1)
        state.last_B.copy_(next_B)

    @torch.inference_mode()
    def propose(self, state, temperature=0.0, generator=None):
        hidden_BH, tokens, probs = state.hidden_BH, [state.last_B], []
        for _ in range(self.num_drafts):
            hidden_BH, logits_BV = self.module.advance(hidden_BH, tokens[-1])
            if temperature > 0:
                probs_BV = torch.softmax(logits_BV / temperature, -1)
                probs.append(probs_BV)
                tokens.append(torch.multinomial(probs_BV, 1, generator=generator)[:, 0])
            else:
                tokens.append(logits_BV.argmax(-1))
        return Proposal(torch.stack(tokens[1:], 1), torch.stack(probs, 1) if probs else None)

    @torch.inference_mode()
    def accept(self, state, tokens_BK, features, counts_B):
        self.take(state, features, counts_B - 1)
        state.last_B.copy_(tokens_BK.gather(1, counts_B[:, None] - 1)[:, 0])

    @torch.inference_mode()
    def select(self, state, rows_B):
        return State(state.hidden_BH[rows_B], state.last_B[rows_B])

    def take(self, state, features, index_B):
        rows = torch.arange(len(index_B))
        state.hidden_BH.copy_(
            self.module.combine({n: x[rows, index_B] for n, x in features.items()})
        )


@hookimpl
def drafter(draft):
    return ChainDrafter(draft.module)


@hookimpl
def export_draft(draft, folder, layout):
    if layout != "serving":
        raise UsageError(f"no layout {layout!r}\n  there is: serving")
    tensors = {name: tensor.detach() for name, tensor in draft.module.state_dict().items()}
    (folder / "config.json").write_text(json.dumps(draft.config))
    save_file(tensors, folder / "model.safetensors")


@hookimpl
def import_draft(folder, target, options):
    draft = build_draft(target, options)
    draft.module.load_state_dict(load_file(folder / "model.safetensors"))
    return draft


class ServedChain:
    """The chain as a server named `chat` computes it: the last row alone."""

    server, ignored, most = "chat", (), None

    def __init__(self, layers, tensors):
        self.layers, self.tensors = tuple(layers), tensors
        self.facts = {"hidden_size": len(tensors["norm.weight"])}

    def suspects(self, host, trained):
        exchanged = ServedChain(self.layers[::-1], self.tensors)
        return [Suspect("the layers are exchanged", exchanged)]

    def captured(self, host):
        return self.layers

    def logits(self, at, drafts_K):
        read, logits = self.tensors, []
        parts = [x[-1] for x in (*at.hidden, at.last_hidden_TH)]
        state = read["join.weight"] @ torch.cat([functional.rms_norm(x, x.shape) for x in parts])
        for token in [at.last, *drafts_K.tolist()]:
            normed = functional.rms_norm(state, state.shape, read["norm.weight"])
            joined = torch.cat([normed, at.host.embedding_VH[token]])
            inner = functional.silu(read["mix.weight"] @ joined + read["mix.bias"])
            state = state + read["out.weight"] @ inner + read["out.bias"]
            normed = functional.rms_norm(state, state.shape, read["norm.weight"])
            logits.append(at.host.head_VH @ normed)
        return torch.stack(logits)


@hookimpl
def read_export(folder, server):
    require_server(server, ["chat"])
    layers = json.loads((folder / "config.json").read_text())["layers"]
    return ServedChain(layers, load_file(folder / "model.safetensors"))
