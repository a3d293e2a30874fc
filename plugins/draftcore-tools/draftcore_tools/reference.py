"""What the trained draft drafts on some prompts: the reference that an export has to agree with.

The draft is loaded from its checkpoint and decoded by its own drafter through the target's cache, as
`draftcore eval` does. The hidden states that transformers itself gives for the same tokens are kept
too, numbered as transformers does: what a server would capture is looked up there, by its own ids.

All in fp32. Shape letters: T tokens, K drafts, H hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from draftcore_data.conversations import Conversation
from draftcore_data.dataset import read_prompts
from draftcore_data.options import DataOptions
from draftcore_data.rendering import Renderer
from draftcore_data.rows import Conversations
from draftcore_eval.proposals import verify
from draftcore_hf.decoder import decoder_model
from draftcore_nn.served import Host
from torch import Tensor

from draftcore import RunConfig, open_checkpoint, open_draft, open_run
from draftcore.contracts.algorithm import Draft, Drafter
from draftcore.contracts.run import OpenDraft, OpenRun
from draftcore.errors import UsageError
from draftcore.files import EXPORT, STEPS, read_sealed

if TYPE_CHECKING:
    from draftcore.contracts.target import TargetModel, TargetSpec

MARK = "COMPLETE"  # lies in every finished checkpoint
ROUNDS, PROMPTS, LONGEST = 3, 4, 1024
QUESTIONS = (
    "Name three colours.",
    "def fibonacci(n):",
    "Explain in two sentences why the sky is blue.",
    "Count: 1, 2, 3,",
)


@dataclass(frozen=True)
class DraftedRound:
    """One round of one prompt, as the trained draft drafted it.

    `where` names prompt and round in messages. tokens_T: what the target has read; last: the token it
    chose then; features: what the drafter was fed, [T, H] by name; states: transformers'
    hidden_states of the same tokens, [T, H] each; greedy_K: the greedy drafts; drawn_K, probs_KV:
    sampled drafts, and the distributions they were drawn from.
    """

    where: str
    tokens_T: Tensor
    last: int
    features: Mapping[str, Tensor]
    states: tuple[Tensor, ...]
    greedy_K: Tensor
    drawn_K: Tensor
    probs_KV: Tensor


@dataclass(frozen=True)
class Reference:
    """The trained draft of an export, the target it drafts for, and what it drafted.

    `layers` are those that its features were captured at; `chat_template` is the hash of the one that
    wrote its samples; `manifest` is the export's.
    """

    run: OpenDraft
    target: TargetSpec
    chat_template: str
    draft: Draft
    host: Host
    layers: tuple[int, ...]
    rounds: tuple[DraftedRound, ...]
    manifest: Mapping[str, Any]


@contextmanager
def open_reference(
    registry: Any, export: Path, run: Path | None, target: str, device: str,
    prompts: str | None = None,
) -> Iterator[Reference]:  # fmt: skip
    """Open the draft that was trained, and let it draft on the prompts.

    Raises UsageError where its checkpoint cannot be found, or is of another target.
    """
    manifest = read_manifest(export)
    folder = find_folder(export, manifest, run)
    state = open_checkpoint(folder).state
    config, data = state["config"], state["data"]
    place = {"path": target, "revision": None, "dtype": "float32", "device": device}
    settings = {**config, "target": {**config["target"], **place}}
    with open_run(RunConfig.model_validate(settings), (), registry) as opened:
        draft, spec = opened.drafts[0], opened.target
        built, model = open_draft(draft, folder, None)[0], spec.load_model()
        built.module.to(model.device).eval()
        drafter = draft.drafter(built)
        rounds = tuple(
            drafted
            for number, tokens in enumerate(prompts_of(opened, prompts, data.get("date", "")))
            for drafted in draft_rounds(model, drafter, tokens, number)
        )
        host, layers = Host.of(spec, model.device), drafter.request.layers
        template = manifest.get("chat_template") or data.get("chat_template", "")
        yield Reference(draft, spec, template, built, host, layers, rounds, manifest)


def serving_layout(draft: OpenDraft) -> str:
    """Return the layout that servers load: `serving`, or the only one; '' for an algorithm without any.

    Raises UsageError where there are several of other names.
    """
    names = [name.partition(":") for name in sorted(draft.algorithm.capabilities)]
    layouts = [layout for kind, _, layout in names if kind == "layout"]
    if "serving" in layouts or not layouts:
        return "serving" if layouts else ""
    if len(layouts) > 1:
        raise UsageError(
            f"{draft.algorithm.offer.name} offers the layouts {', '.join(layouts)}, and which of them "
            "servers load is not known\n  its plugin should call that one layout:serving"
        )
    return layouts[0]


def read_manifest(export: Path) -> dict[str, Any]:
    """Return what `draftcore export` wrote of the export's origin; {} for one from elsewhere."""
    if not (export / "config.json").is_file():
        raise UsageError(f"{export} holds no config.json\n  give a folder that `export` wrote")
    file = export / EXPORT
    try:
        return read_sealed(file) if file.is_file() else {}
    except ValueError as error:
        remedy = "export the draft again, or delete this file and name the checkpoint with --run"
        raise UsageError(f"{file} is not as it was written: {error}\n  {remedy}") from None


def find_folder(export: Path, manifest: Mapping[str, Any], run: Path | None) -> Path:
    """Return the checkpoint that was exported: the one named, or that of its step in its run's folder.

    An export lies in the folder of its run, unless that is named.
    """
    named = run if run is not None else export.resolve().parent
    steps = sorted(file.parent for file in named.glob(f"checkpoints/{STEPS}/{MARK}"))
    if (named / MARK).is_file():
        steps = [named]
    elif "step" in manifest:
        wanted = [folder for folder in steps if int(folder.name[5:]) == manifest["step"]]
        if steps and not wanted:
            raise UsageError(
                f"{export} is of step {manifest['step']}, and {named} holds checkpoints of other "
                f"steps: {', '.join(folder.name for folder in steps)}\n"
                "  export one of these, or name another run with --run"
            )
        steps = wanted
    if not steps:
        raise UsageError(
            f"the checkpoint behind {export} is not at {named}\n"
            "  give the run's folder, or the checkpoint's, with --run"
        )
    return steps[-1]


def conversations(run: OpenRun) -> Conversations:
    """Return the run's conversations, with their options; of a run on other rows, the default ones."""
    rows = run.data
    return rows if isinstance(rows, Conversations) else Conversations(run, DataOptions())


def prompts_of(run: OpenRun, source: str | None, date: str) -> list[list[int]]:
    """Return the token ids of a few prompts: a file's first, or built-in questions."""
    rows, tokenizer = conversations(run), run.target.load_tokenizer()
    options = rows.options.model_copy(update={"max_length": LONGEST})
    if source is not None:
        read = read_prompts(source, tokenizer, PROMPTS, options, find=rows.find, date=date)
        return [list(prompt) for prompt in read.token_ids]
    renderer = Renderer(tokenizer, options, date)
    asked = [{"role": "user", "content": text} for text in QUESTIONS]
    return [renderer.prompt_ids(Conversation("", (message,))) for message in asked]


@torch.inference_mode()
def draft_rounds(
    model: TargetModel, drafter: Drafter, prompt: Sequence[int], number: int
) -> list[DraftedRound]:
    """Decode one prompt for a few rounds; return what the drafter was fed and drafted in each."""
    room = len(prompt) + ROUNDS * (drafter.num_drafts + 1)
    cache, state = model.allocate(1, room), drafter.allocate(1, room)
    tokens_1T = torch.tensor([list(prompt)], device=model.device)
    lengths_1 = torch.tensor([len(prompt)], device=model.device)
    starts_1 = torch.zeros_like(lengths_1)
    features = model.forward(cache, tokens_1T, starts_1, len(prompt), drafter.request)
    last_1 = model.logits(features["last_hidden"][:, -1]).argmax(-1)
    drafter.prefill(state, tokens_1T, lengths_1, features, last_1)
    fed, rounds = dict(features), []
    generator = torch.Generator(model.device).manual_seed(number)
    for round_ in range(ROUNDS):
        greedy, drawn = drafter.propose(state), drafter.propose(state, 1.0, generator)
        if drawn.parents_BK is not None or drawn.counts_B is not None:
            raise UsageError(
                f"{drafter.propose.__qualname__} proposes trees, or fewer tokens than "
                f"{drafter.num_drafts}, and verify compares whole chains\n"
                "  draftcore eval measures the acceptance length of such drafts"
            )
        assert drawn.probs_BKV is not None
        whole = decoder_model(model, "draftcore verify").model
        states = whole(input_ids=tokens_1T, output_hidden_states=True).hidden_states
        rounds.append(
            DraftedRound(
                f"prompt {number + 1}, round {round_ + 1}", tokens_1T[0], int(last_1),
                {name: x[0] for name, x in fed.items()}, tuple(state[0] for state in states),
                greedy.tokens_BK[0], drawn.tokens_BK[0], drawn.probs_BKV[0],
            )
        )  # fmt: skip
        window_1T = torch.cat([last_1[:, None], greedy.tokens_BK], 1)
        starts_1 = torch.full_like(last_1, tokens_1T.shape[1])
        span = tokens_1T.shape[1] + window_1T.shape[1]
        features = model.forward(cache, window_1T, starts_1, span, drafter.request)
        logits_1TV = model.logits(features["last_hidden"])
        new_1T, counts_1, _ = verify(logits_1TV, greedy, 0.0, generator)
        drafter.accept(state, new_1T, features, counts_1)
        count = int(counts_1)
        fed = {name: torch.cat([x, features[name][:, :count]], 1) for name, x in fed.items()}
        tokens_1T = torch.cat([tokens_1T, last_1[:, None], new_1T[:, : count - 1]], 1)
        last_1 = new_1T[:, count - 1]
    return rounds
