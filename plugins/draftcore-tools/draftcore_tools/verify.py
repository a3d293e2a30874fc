"""Does a server compute the draft that was trained? The comparison behind `draftcore verify`.

An export is read by the algorithm's `read_export`, which knows the servers' conventions and nothing
of our export, and compared with the trained draft on the same tokens, in the order in which a server
gets things wrong: does it load, is it of this target and chat template, which layers are captured,
what do their states look like, what are the draft's log-probabilities, what does it propose. The first
difference is the finding. Its cause is found by trying: the reader names mistakes to suspect, each
with the draft as it would be without that mistake, and the one that then agrees is the cause.
"""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from draftcore.contracts.serving import Round, ServedDraft, UnservableError
from draftcore.data.rendering import Renderer
from draftcore.errors import UsageError
from draftcore_tools.served import gaps, leads, proposals
from draftcore_tools.witness import Side, Witness

# Largest difference of log-probabilities, in nats (`served.gaps`). Both sides compute in fp32, in
# other orders: at most 3e-5 was seen on tiny targets (2026-11-22). The mistakes that the tests make
# differ by 6e-3 and more.
LIMIT = 1e-3
STATES_LIMIT = 1e-3  # of the largest value; the target with a cache and without, both in fp32


@dataclass(frozen=True)
class Divergence:
    """Where a server first leaves the trained draft: at which check, what is so, and why."""

    check: str
    what: str
    cause: str = ""


@dataclass
class Verdict:
    """What one server would make of the export; `gap` is the largest difference, in nats."""

    server: str
    divergence: Divergence | None = None
    rounds: int = 0
    drafts: int = 0
    gap: float = 0.0
    notes: list[str] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "agrees": self.divergence is None}

    def lines(self) -> Iterable[str]:
        if self.divergence is None:
            yield (
                f"{self.server}: agrees with the trained draft in {self.rounds} rounds of "
                f"{self.drafts} drafts, log-probabilities to {self.gap:.1e}"
            )
        else:
            yield f"{self.server}: differs from the trained draft at: {self.divergence.check}"
            yield from (f"  {line}" for line in self.divergence.what.splitlines())
            if self.divergence.cause:
                yield f"  cause: {self.divergence.cause}"
        yield from (f"  note: {note}" for note in self.notes)


def servers_of(side: Side, asked: str) -> list[str]:
    """The servers to check: the one asked for, or all that the algorithm knows."""
    algorithm = side.run.algorithm
    known = sorted(
        name.removeprefix("served:")
        for name in algorithm.capabilities
        if name.startswith("served:")
    )
    if not known:
        raise UsageError(
            f"the algorithm {side.run.choice.name!r} cannot be verified: its plugin "
            f"{algorithm.plugin} has no hook read_export\n"
            "  implement read_export and declare the capability served:NAME (docs/hooks.md)"
        )
    return known if asked == "all" else [asked]


def verify(side: Side, export: Path, server: str) -> Verdict:
    """Compare one server's reading of an export with the trained draft."""
    verdict = Verdict(server)
    try:
        served = side.run.algorithm.hook.read_export(folder=export, server=server)
    except UnservableError as error:
        verdict.divergence = Divergence("loading", str(error))
        return verdict
    verdict.notes += notes(served, side)
    verdict.divergence = (
        other_template(side) or other_facts(served, side) or compare(served, side, verdict)
    )
    if verdict.divergence is not None and not verdict.divergence.cause:
        found = verdict.divergence
        cause = explain(served, side) or differences(side, export)
        verdict.divergence = Divergence(found.check, found.what, cause)
    return verdict


# ---------------------------------------------------------------- the checks, in order


def other_template(side: Side) -> Divergence | None:
    """The chat template of training against the one that the server would use."""
    then = side.manifest.get("chat_template") or side.found.state["data"].get("chat_template")
    if not then or then == Renderer(side.run.run.target.tokenizer).template_hash:
        return None
    return Divergence(
        "chat template",
        f"the target in {side.run.run.target.path} has another chat template than the one that wrote "
        "the training samples",
        "the template was changed after training: put the old one back, or train on samples "
        "written with the new one; prompts of another shape lower acceptance without an error",
    )


def other_facts(served: ServedDraft, side: Side) -> Divergence | None:
    """What must be equal of draft and target for a server to load the pair."""
    host = side.host
    required = {
        "vocab_size": host.vocab_size,
        "hidden_size": host.hidden_size,
        "num_target_layers": host.num_layers,
    }
    facts = served.facts
    for name, theirs in required.items():
        if facts.get(name) is not None and int(facts[name]) != theirs:
            return Divergence("config", f"{name} is {facts[name]}, the target's is {theirs}")
    mask = facts.get("mask_token_id")
    if mask is not None and not 0 <= int(mask) < host.vocab_size:
        return Divergence(
            "config", f"mask_token_id is {mask}, the target has {host.vocab_size} tokens"
        )
    return None


def compare(served: ServedDraft, side: Side, verdict: Verdict) -> Divergence | None:
    """Layers, hidden states, log-probabilities, proposals; `verdict` counts what agreed."""
    try:
        layers = served.captured(side.host)
        if layers != side.layers:
            return _other_layers(layers, side)
        for witness in side.witnesses:
            found = (
                _fewer_drafts(served, witness)
                or _other_states(layers, witness)
                or _other_words(served, side, witness, verdict)
            )
            if found is not None:
                return found
            verdict.rounds, verdict.drafts = verdict.rounds + 1, len(witness.greedy_K)
    except UnservableError as error:
        return Divergence("drafting", str(error))
    return None


def _other_layers(layers: tuple[int, ...], side: Side) -> Divergence:
    def named(ids: tuple[int, ...]) -> str:
        return f"{list(ids)} (transformers' hidden_states {[layer + 1 for layer in ids]})"

    return Divergence(
        "captured layers",
        f"trained on the outputs of layers {named(side.layers)}\n"
        f"the server would feed the outputs {named(layers)}",
    )


def _fewer_drafts(served: ServedDraft, witness: Witness) -> Divergence | None:
    most, drafts = served.most(), len(witness.greedy_K)
    if most is None or drafts <= most:
        return None
    return Divergence("block size", f"trained to draft {drafts} tokens a round, served: {most}")


def _other_states(layers: tuple[int, ...], witness: Witness) -> Divergence | None:
    """What the drafter was fed against transformers' own states, under the same number."""
    for layer in layers:
        fed_TH, state_TH = witness.features[f"hidden.{layer}"], witness.states[layer + 1]
        gap = float((fed_TH - state_TH).abs().max() / state_TH.abs().max())
        if not gap <= STATES_LIMIT:
            return Divergence(
                "hidden states",
                f"{witness.where}: hidden.{layer} of capture and transformers' hidden_states"
                f"[{layer + 1}] differ by {gap:.2g} of the largest value",
                "capture is at fault, not the export: features of training were wrong as well",
            )
    return None


@torch.inference_mode()
def _other_words(
    served: ServedDraft, side: Side, witness: Witness, verdict: Verdict
) -> Divergence | None:
    """Log-probabilities of sampled drafts, then greedy drafts, position by position."""
    hidden = tuple(witness.states[layer + 1] for layer in side.layers)
    at = Round(side.host, witness.tokens_T, witness.last, hidden, witness.states[-1])
    gap_K = gaps(served, at, witness.drawn_K, witness.probs_KV)
    for k, gap in enumerate(gap_K.tolist()):
        if not gap <= LIMIT:
            theirs_V = served.logits(at, witness.drawn_K[:k])[k]
            best = [_word(side, scores_V) for scores_V in (witness.probs_KV[k], theirs_V)]
            return Divergence(
                "log-probabilities",
                f"{witness.where}, draft {k + 1}: they differ by up to {gap:.2g} nats "
                f"(limit {LIMIT:g})\nthe trained draft's first choice is {best[0]}, the served "
                f"one's {best[1]}",
            )
    verdict.gap = max(verdict.gap, float(gap_K.max()))
    for k, lead in enumerate(leads(served, at, witness.greedy_K).tolist()):
        if not lead <= 2 * LIMIT:  # within the limit on both sides, a choice is a tie
            other = proposals(served, at, k + 1)[k]
            return Divergence(
                "proposals",
                f"{witness.where}, draft {k + 1}: trained {_token(side, int(witness.greedy_K[k]))}, "
                f"served {_token(side, int(other))}, which leads by {lead:.2g} nats",
            )
    return None


def _word(side: Side, scores_V: Tensor) -> str:
    return _token(side, int(scores_V.argmax()))


def _token(side: Side, token: int) -> str:
    return f"{side.host.tokenizer.decode([token])!r} ({token})"


def notes(served: ServedDraft, side: Side) -> list[str]:
    """What is odd, and wrong only perhaps."""
    facts, found = served.facts, []
    if served.ignored:
        found.append(f"the server leaves unread: {', '.join(served.ignored[:4])}")
    theta = side.host.rope.get("rope_theta")
    if None not in (theta, facts.get("rope_theta")) and not math.isclose(
        float(facts["rope_theta"]), float(theta or 0)
    ):
        found.append(f"rope_theta is {facts['rope_theta']}, the target's {theta}")
    dtype = str(side.run.run.target.config.dtype or "").removeprefix("torch.")
    if facts.get("dtype") and dtype and facts["dtype"] != dtype:
        found.append(f"the server would compute in {facts['dtype']}, the target is {dtype}")
    return found


# ---------------------------------------------------------------- the cause


def explain(served: ServedDraft, side: Side) -> str:
    """The first suspected mistake without which the draft agrees; '' for none."""
    for suspect in served.suspects(side.host, side.draft.config):
        if compare(suspect.draft, side, Verdict(served.server)) is None:
            return suspect.cause
    return ""


def differences(side: Side, export: Path) -> str:
    """What a fresh export of the same checkpoint has otherwise, as the last resort."""
    layouts = [n for n in side.run.algorithm.capabilities if n.startswith("layout:")]
    with tempfile.TemporaryDirectory() as aside:
        fresh = Path(aside)
        side.run.algorithm.hook.export_draft(
            draft=side.draft, folder=fresh, layout=min(layouts).removeprefix("layout:")
        )
        old, new = (json.loads((f / "config.json").read_text()) for f in (export, fresh))
        fields = [
            f"config.json has {name}: {old.get(name)}, a fresh export {new.get(name)}"
            for name in sorted({*old, *new})
            if old.get(name) != new.get(name)
        ]
        tensors = [
            f"the tensor {name} is not the checkpoint's"
            for name in _unequal(_tensors(export), _tensors(fresh))
        ]
    if found := fields + tensors:
        shown = "; ".join(found[:3]) + ("; ..." if len(found) > 3 else "")
        return f"no usual mistake, but the folder was changed since: {shown}"
    return (
        "unknown: a fresh export of the checkpoint is the same, so export and server differ in a "
        "convention; please report it"
    )


def _tensors(folder: Path) -> dict[str, Tensor]:
    return {n: t for file in folder.glob("*.safetensors") for n, t in load_file(file).items()}


def _unequal(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> list[str]:
    names = sorted({*one, *other})
    return [n for n in names if n not in one or n not in other or not _same(one[n], other[n])]


def _same(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and bool(torch.equal(one, other.to(one.device)))
