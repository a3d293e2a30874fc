"""Does a server compute the draft that was trained? The comparison behind `draftcore verify`.

An export is read by the algorithm's `read_export`, which knows the servers' conventions and nothing
of our export, and is compared with the trained draft on the same tokens: does it load, is it of this
target and chat template, which layers are captured, what are their states, what are the draft's
log-probabilities, what does it propose. The first difference is reported. Its cause is found by
trying: the reader names mistakes to suspect, each with the draft as it would be without that mistake,
and the one that then agrees is the cause.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from draftcore_data.rendering import Renderer
from draftcore_nn.served import Round, ServedDraft, UnservableError, gaps, leads, proposals
from safetensors.torch import load_file
from torch import Tensor

from draftcore.errors import DraftcoreError, UsageError
from draftcore.files import altered
from draftcore_tools.reference import DraftedRound, Reference, conversations, serving_layout

# Largest difference of log-probabilities, in nats (`served.gaps`). Both sides compute in fp32, in
# other orders: at most 3e-5 was seen on tiny targets (2026-11-22). The mistakes that the tests make
# differ by 6e-3 and more.
LIMIT = 1e-3
STATES_LIMIT = 1e-3  # of the largest value; the target with a cache and without, both in fp32


@dataclass(frozen=True)
class Divergence:
    """The first check at which served and trained draft differ, what was found there, and why."""

    check: str
    what: str
    cause: str = ""


@dataclass
class Verdict:
    """Whether one server would compute the trained draft; `gap` is the largest difference, in nats."""

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


def servers_of(reference: Reference, asked: str) -> list[str]:
    """Return the servers to check: the one asked for, or all that the algorithm knows."""
    algorithm = reference.run.algorithm
    known = sorted(
        name.removeprefix("served:")
        for name in algorithm.capabilities
        if name.startswith("served:")
    )
    if not known:
        raise UsageError(
            f"the algorithm {algorithm.offer.name!r} cannot be verified: its plugin "
            f"{algorithm.plugin} has no hook read_export\n"
            "  implement read_export and declare the capability served:NAME (docs/hooks.md)"
        )
    return known if asked == "all" else [asked]


def verify_export(reference: Reference, export: Path, server: str) -> Verdict:
    """Compare one server's reading of an export with the trained draft."""
    verdict = Verdict(server)
    try:
        draft = reference.run
        served = draft.algorithm.hook.read_export(
            folder=export, server=server, options=draft.options
        )
    except UnservableError as error:
        verdict.divergence = Divergence("loading", str(error))
        return verdict
    parts = (name for name in vars(ServedDraft) if not name.startswith("_"))
    if lacking := [name for name in parts if not hasattr(served, name)]:
        raise DraftcoreError(
            f"the hook read_export of {draft.algorithm.plugin} returned a {type(served).__name__}, "
            f"which is no ServedDraft: it lacks {', '.join(lacking)}"
        )
    verdict.notes += notes(served, reference)
    found = (
        check_template(reference)
        or check_config(served, reference)
        or check_drafts(served, reference, verdict)
    )
    if found is not None and not found.cause:
        cause = find_cause(served, reference) or differences(reference, export)
        found = replace(found, cause=cause)
    files = reference.manifest.get("files")
    if files is None:
        verdict.notes.append(
            "no manifest says of what bytes its files should be: none was compared"
        )
    elif found is None and (changed := altered(export, files)):
        what = f"{changed[0]} was altered since it was exported, by less than is compared"
        found = Divergence("files", what, "a damaged file, or another writer: export again")
    verdict.divergence = found
    return verdict


# ---------------------------------------------------------------- the checks, in order


def check_template(reference: Reference) -> Divergence | None:
    """Compare the chat template of training with the one that the server would use."""
    then, target = reference.chat_template, reference.target
    options = conversations(reference.run.run).options
    if not then or then == Renderer(target.load_tokenizer(), options).template_hash:
        return None
    return Divergence(
        "chat template",
        f"the target in {target.path} has another chat template than the one that wrote "
        "the training samples",
        "the template was changed after training: put the old one back, or train on samples "
        "written with the new one; prompts of another shape lower acceptance without an error",
    )


def check_config(served: ServedDraft, reference: Reference) -> Divergence | None:
    """Compare what must be equal of draft and target for a server to load the pair."""
    host = reference.host
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


def check_drafts(served: ServedDraft, reference: Reference, verdict: Verdict) -> Divergence | None:
    """Compare layers, hidden states, log-probabilities and proposals; `verdict` counts what agreed."""

    def named(ids: tuple[int, ...]) -> str:
        return f"{list(ids)} (transformers' hidden_states {[layer + 1 for layer in ids]})"

    try:
        layers, most = served.captured(reference.host), served.most
        if layers != reference.layers:
            return Divergence(
                "captured layers",
                f"trained on the outputs of layers {named(reference.layers)}\n"
                f"the server would feed the outputs {named(layers)}",
            )
        for drafted in reference.rounds:
            count = len(drafted.greedy_K)
            if most is not None and count > most:
                what = f"trained to draft {count} tokens a round, served: {most}"
                return Divergence("block size", what)
            found = _check_states(layers, drafted)
            found = found or _check_round(served, reference, drafted, verdict)
            if found is not None:
                return found
            verdict.rounds, verdict.drafts = verdict.rounds + 1, count
    except UnservableError as error:
        return Divergence("drafting", str(error))
    return None


def _check_states(layers: tuple[int, ...], drafted: DraftedRound) -> Divergence | None:
    """Compare what the drafter was fed with transformers' own states of the same number."""
    for layer in layers:
        fed_TH, state_TH = drafted.features[f"hidden.{layer}"], drafted.states[layer + 1]
        gap = float((fed_TH - state_TH).abs().max() / state_TH.abs().max())
        if not gap <= STATES_LIMIT:
            return Divergence(
                "hidden states",
                f"{drafted.where}: hidden.{layer} of capture and transformers' hidden_states"
                f"[{layer + 1}] differ by {gap:.2g} of the largest value",
                "capture is at fault, not the export: features of training were wrong as well",
            )
    return None


@torch.inference_mode()
def _check_round(
    served: ServedDraft, reference: Reference, drafted: DraftedRound, verdict: Verdict
) -> Divergence | None:
    """Compare log-probabilities of sampled drafts, then greedy drafts, position by position."""

    def quoted(token: Tensor) -> str:
        return f"{reference.host.tokenizer.decode([int(token)])!r} ({int(token)})"

    hidden = tuple(drafted.states[layer + 1] for layer in reference.layers)
    at = Round(reference.host, drafted.tokens_T, drafted.last, hidden, drafted.states[-1])
    gap_K = gaps(served, at, drafted.drawn_K, drafted.probs_KV)
    for k, gap in enumerate(gap_K.tolist()):
        if not gap <= LIMIT:
            theirs_V = served.logits(at, drafted.drawn_K[:k])[k]
            best = [quoted(scores_V.argmax()) for scores_V in (drafted.probs_KV[k], theirs_V)]
            return Divergence(
                "log-probabilities",
                f"{drafted.where}, draft {k + 1}: they differ by up to {gap:.2g} nats "
                f"(limit {LIMIT:g})\nthe trained draft's first choice is {best[0]}, the served "
                f"one's {best[1]}",
            )
    verdict.gap = max(verdict.gap, float(gap_K.max()))
    for k, lead in enumerate(leads(served, at, drafted.greedy_K).tolist()):
        if not lead <= 2 * LIMIT:  # within the limit on both sides, a choice is a tie
            other = proposals(served, at, k + 1)[k]
            return Divergence(
                "proposals",
                f"{drafted.where}, draft {k + 1}: trained {quoted(drafted.greedy_K[k])}, "
                f"served {quoted(other)}, which leads by {lead:.2g} nats",
            )
    return None


def notes(served: ServedDraft, reference: Reference) -> list[str]:
    """Return what may be wrong, though it does not change what is compared."""
    facts, found = served.facts, []
    if served.ignored:
        found.append(f"the server leaves unread: {', '.join(served.ignored[:4])}")
    dtype = str(reference.target.config.dtype or "").removeprefix("torch.")
    if facts.get("dtype") and dtype and facts["dtype"] != dtype:
        found.append(f"the server would compute in {facts['dtype']}, the target is {dtype}")
    return found


# ---------------------------------------------------------------- the cause


def find_cause(served: ServedDraft, reference: Reference) -> str:
    """Return the first suspected mistake without which the draft agrees; '' for none."""
    for suspect in served.suspects(reference.host, reference.draft.config):
        if check_drafts(suspect.draft, reference, Verdict(served.server)) is None:
            return suspect.cause
    return ""


def differences(reference: Reference, export: Path) -> str:
    """Return how the folder differs from a fresh export of the same checkpoint: the last resort."""
    algorithm = reference.run.algorithm
    with tempfile.TemporaryDirectory() as folder:
        fresh, layout = Path(folder), serving_layout(reference.run)
        given = {"draft": reference.draft, "layout": layout, "options": algorithm.options}
        algorithm.hook.export_draft(folder=fresh, **given)
        old, new = (json.loads((f / "config.json").read_text()) for f in (export, fresh))
        fields = [
            f"config.json has {name}: {old.get(name)}, a fresh export {new.get(name)}"
            for name in sorted({*old, *new})
            if old.get(name) != new.get(name)
        ]
        ours, theirs = _tensors(export), _tensors(fresh)
        tensors = [
            f"the tensor {name} is not the checkpoint's"
            for name in sorted({*ours, *theirs})
            if name not in ours or name not in theirs or not torch.equal(ours[name], theirs[name])
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
