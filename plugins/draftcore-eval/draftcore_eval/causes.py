"""Why does an engine draft otherwise? Its known mistakes are made by our own decoder, one by one.

A mistake changes an export's config.json, a draft's weights, or what a drafter is fed. Each is decoded
like the draft itself; the one after which prompts take the engine's rounds is the cause. So are other
prompts tried, where the target's own output is another.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn

from draftcore.contracts.algorithm import Draft, Drafter, Proposal
from draftcore.contracts.capture import FeatureRequest
from draftcore.contracts.run import OpenDraft
from draftcore.contracts.target import TargetSpec
from draftcore.errors import DraftcoreError
from draftcore.files import regular, write_atomic
from draftcore.progress import Progress
from draftcore_eval.decode import EagerRunner, decode
from draftcore_eval.options import EvalOptions
from draftcore_eval.report import Decoded
from draftcore_eval.runner import Prompts

FEW = 3  # prompts that each mistake is tried on; one that gives the rounds of two is tried on all
THETAS = (1e4, 1e5, 5e5, 1e6, 5e6, 1e7)  # RoPE bases of published targets
EPS = (1e-6, 1e-5)
SPECIAL = 16  # special tokens that may be put before a prompt, at most
BLOCK = 32  # weights that share a scale where they are quantised, as in Q8_0
# What a draft that cannot be computed so raises: it is left out.
IMPOSSIBLE = (DraftcoreError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)


@dataclass(frozen=True)
class Mistake:
    """What an engine may do otherwise, and what to do about it.

    `config` changes what config.json says, `module` the draft's weights, `drafter` the decoder, each
    where it is given. `options` are other options of the algorithm.
    """

    cause: str
    remedy: str
    config: Callable[[dict[str, Any]], object] | None = None
    module: Callable[[nn.Module], object] | None = None
    drafter: Callable[[Drafter], Drafter] | None = None
    options: Mapping[str, Any] | None = None


class Fed:
    """A drafter that is fed other features than it asks for, or whose proposals are changed."""

    def __init__(
        self, drafter: Drafter, request: FeatureRequest,
        fed: Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]] = dict,
        drafts: int = 0,
    ) -> None:  # fmt: skip
        self.drafter, self.request, self.fed, self.drafts = drafter, request, fed, drafts

    def __getattr__(self, name: str) -> Any:
        return getattr(self.drafter, name)

    def prefill(
        self, state: Any, tokens_BT: Tensor, lengths_B: Tensor, features: Mapping[str, Tensor],
        next_B: Tensor,
    ) -> None:  # fmt: skip
        self.drafter.prefill(state, tokens_BT, lengths_B, self.fed(features), next_B)

    def propose(
        self, state: Any, temperature: float = 0.0, generator: torch.Generator | None = None
    ) -> Proposal:
        proposal = self.drafter.propose(state, temperature, generator)
        if not self.drafts:
            return proposal
        counts_B = torch.full_like(proposal.tokens_BK[:, 0], self.drafts)
        return replace(proposal, counts_B=counts_B)

    def accept(
        self, state: Any, tokens_BK: Tensor, features: Mapping[str, Tensor], counts_B: Tensor
    ) -> None:
        self.drafter.accept(state, tokens_BK, self.fed(features), counts_B)


class Variants:
    """Drafts of an export with one mistake each, and what they decode of some prompts."""

    def __init__(
        self, draft: OpenDraft, export: Path, prompts: Prompts, options: EvalOptions
    ) -> None:
        self.draft, self.export, self.prompts, self.options = draft, export, prompts, options
        self.decoded: dict[tuple[str, int], Decoded] = {}  # by cause and prompt

    def mistakes(self) -> Iterator[Mistake]:
        """Yield the mistakes that this draft can be drafted with, frequent ones first."""
        built, drafter = self._make(Mistake("", ""))
        target = self.draft.run.target
        config = read_config(self.export)
        yield from fed_otherwise(drafter, target.num_layers)
        yield from drafted_otherwise(drafter, self.draft.options, config)
        yield from read_otherwise(config, built.config, target)
        for cause, remedy, other in getattr(drafter, "mistakes", tuple)():
            yield Mistake(cause, remedy, drafter=partial(instead, other))
        yield from computed_otherwise(built.module, int(value_in(config, "head_dim") or 0))

    def decode(self, mistake: Mistake, rows: Sequence[int], batch: int = 0) -> list[Decoded]:
        """Return what is decoded of prompts by their numbers, each once; raises one of IMPOSSIBLE."""
        key, batch = f"{mistake.cause} {batch}", batch or self.options.batch
        if missing := [row for row in rows if (key, row) not in self.decoded]:
            _, drafter = self._make(mistake)
            runner = EagerRunner(self.draft.run.target.load_model(), drafter)
            options = self.options.model_copy(update={"batch": batch})
            prompts = [self.prompts[row] for row in missing]
            found, _ = decode(runner, prompts, options, check=False)
            self.decoded |= {(key, row): one for row, one in zip(missing, found, strict=True)}
        return [self.decoded[key, row] for row in rows]

    def rounded(self, rows: Sequence[int]) -> list[set[int]]:
        """Return by prompt what rounds the draft itself takes where it is rounded otherwise."""
        exact = Mistake("in double", "", module=lambda module: module.double())
        found = [set[int]() for _ in rows]
        for mistake, batch in ((exact, 0), (Mistake("", ""), 1)):
            with suppress(*IMPOSSIBLE):
                for rounds, decoded in zip(found, self.decode(mistake, rows, batch), strict=True):
                    rounds.add(len(decoded.accepted))
        return found

    def explain(
        self, rounds: Mapping[int, int], own: Mapping[int, int]
    ) -> tuple[list[Mistake], str]:
        """Return the mistakes that give an engine's `rounds`, by prompt, best; else which is nearest.

        `own` are the rounds of the draft as it is. In a prompt of ten a rounding may have chosen otherwise,
        and so in one of ten whose rounds are not its own. The nearest gives those of more prompts than the
        draft itself, by more than their root: of a mistake that changes little that many are chance.
        """
        differ = [row for row in rounds if own[row] != rounds[row]]
        few = sorted(differ, key=lambda row: len(self.prompts[row]))[:FEW]
        known, fits = list(self.mistakes()), dict[int, set[int]]()
        with Progress(len(known), verb="trying causes") as progress:
            for number, mistake in enumerate(known):
                with suppress(*IMPOSSIBLE):
                    if 3 * len(self._fits(mistake, rounds, few)) >= 2 * len(few):
                        fits[number] = self._fits(mistake, rounds, [*rounds])
                progress.show(number + 1)
        most = max(map(len, fits.values()), default=0)
        best = [(known[number], rows) for number, rows in fits.items() if len(rows) == most]
        explained = min((len(rows & {*differ}) for _, rows in best), default=0)
        if most and 10 * most >= 9 * len(rounds) and 10 * explained >= 9 * len(differ):
            return [mistake for mistake, _ in best], ""
        clearly = most > len(rounds) - len(differ) + len(rounds) ** 0.5
        nearest = [mistake.cause for mistake, _ in best if clearly]
        return [], "".join(f"{cause} ({most} of {len(rounds)} prompts)" for cause in nearest[:1])

    def _fits(self, mistake: Mistake, rounds: Mapping[int, int], rows: Sequence[int]) -> set[int]:
        """Return in which prompts a mistake gives the engine's rounds."""
        decoded = zip(rows, self.decode(mistake, rows), strict=True)
        return {row for row, found in decoded if len(found.accepted) == rounds[row]}

    def _make(self, mistake: Mistake) -> tuple[Draft, Drafter]:
        """Read the export with a mistake; raises where it cannot be read so."""
        run, choice, bound = self.draft.run, self.draft.config.algorithm, self.draft.algorithm
        if mistake.options is not None or mistake.config:
            # Other options that the run sets would be compared with a config.json that was changed.
            number = getattr(self.draft.options, "num_drafts", None)
            options = mistake.options or ({"num_drafts": number} if number else {})
            bound = run.bind("algorithm", choice.name, options, choice.plugin)
        with TemporaryDirectory() as folder:
            for file in self.export.iterdir():
                Path(folder, file.name).symlink_to(file.resolve())
            if mistake.config:
                mistake.config(config := read_config(self.export))
                (file := Path(folder, "config.json")).unlink()
                write_atomic(file, json.dumps(config))
            hook, options = bound.hook, bound.options
            given = {"folder": Path(folder), "target": run.target, "options": options}
            built: Draft = hook.import_draft(**given)
        model = run.target.load_model()
        built.module.to(model.device).eval()
        if mistake.module:
            with torch.no_grad():
                mistake.module(built.module)
        drafter: Drafter = hook.drafter(draft=built, target=model, options=options)
        return built, mistake.drafter(drafter) if mistake.drafter else drafter


def read_config(export: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads(regular(export / "config.json").read_text(encoding="utf-8"))
    return config


# ---------------------------------------------------------------- what a draft is fed, and how it drafts


def fed_otherwise(drafter: Drafter, num_layers: int) -> Iterator[Mistake]:
    """Yield other states of the target: of other layers, and rounded."""
    own = drafter.request.layers
    for layers, how in (
        (tuple(layer - 1 for layer in own), "each one below"),
        (tuple(layer + 1 for layer in own), "each one above"),
        (own[::-1], "in another order than"),
    ):
        if layers != own and all(0 <= layer < num_layers for layer in layers):
            yield Mistake(
                f"layers: the engine feeds the outputs {[*layers]}, {how} the trained {[*own]}",
                "layer ids count outputs from 0; an engine that counts inputs reads the same id plus one: "
                "correct the ids in what it loads",
                drafter=partial(feed_layers, layers),
            )
    for dtype in (torch.bfloat16, torch.float16):
        yield Mistake(
            f"dtype: the target's states reach the draft in {str(dtype)[6:]}",
            f"serve the target in the dtype of the states that are compared: {drafter.request.dtype}",
            drafter=partial(feed_in, dtype),
        )


def feed_layers(layers: Sequence[int], drafter: Drafter) -> Fed:
    """Give a drafter the outputs of other layers in the place of those that it asks for."""
    request = drafter.request
    names = {
        f"hidden.{old}": f"hidden.{new}" for old, new in zip(request.layers, layers, strict=True)
    }
    both = replace(request, layers=tuple(sorted({*request.layers, *layers})))
    return Fed(drafter, both, lambda fed: {**fed, **{old: fed[new] for old, new in names.items()}})


def feed_in(dtype: torch.dtype, drafter: Drafter) -> Fed:
    """Give a drafter states that were rounded to a dtype."""

    def rounded(features: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: state.to(dtype).to(state.dtype) for name, state in features.items()}

    return Fed(drafter, drafter.request, rounded)


def instead(other: Drafter, drafter: Drafter) -> Drafter:
    return other


def cut_to(drafts: int, drafter: Drafter) -> Fed:
    return Fed(drafter, drafter.request, drafts=drafts)


def drafted_otherwise(
    drafter: Drafter, options: Any, config: Mapping[str, Any]
) -> Iterator[Mistake]:
    """Yield other numbers of drafts a round."""
    own = drafter.num_drafts
    advice = (
        f"set the engine's number of drafted tokens to {own}; some count the last token as well"
    )
    for drafts in range(1, own):
        cause = f"number of drafts: {drafts} of {own} drafts a round are read"
        yield Mistake(cause, advice, drafter=partial(cut_to, drafts))
    if "num_drafts" in getattr(type(options), "model_fields", {}):
        cause = f"number of drafts: {own + 1} a round in place of {own}"
        yield Mistake(cause, advice, options={"num_drafts": own + 1})
    if isinstance(size := value_in(config, "block_size"), int):
        for rows in range(2, size):
            yield Mistake(
                f"number of drafts: the block has {rows} rows, and was trained with {size}",
                f"serve {size - 1} drafts a round: a shorter block is another computation",
                config=partial(put, "block_size", rows),
                options={"num_drafts": rows - 1},
            )


# ---------------------------------------------------------------- what config.json says


def read_otherwise(
    config: Mapping[str, Any], built: Mapping[str, Any], target: TargetSpec
) -> Iterator[Mistake]:
    """Yield other values of fields; `built` is the config of the draft that was read."""
    text, own = target.text_config, value_in(config, "rope_theta")
    rope = dict(getattr(text, "rope_parameters", None) or {})
    for theta in dict.fromkeys((*THETAS, rope.get("rope_theta"))):
        if own and theta and float(theta) != float(own):
            yield taken(config, "rope_theta", theta, "rope base")
    if value_in(config, "rope_type") not in (None, "default"):
        yield taken(config, "rope_type", "default", "rope scaling")
    if isinstance(mask := value_in(config, "mask_token_id"), int):
        special = (getattr(text, f"{name}_token_id", None) for name in ("bos", "eos", "pad"))
        for token in dict.fromkeys((0, mask - 1, mask + 1, target.vocab_size - 1, *special)):
            if isinstance(token, int) and token != mask and 0 <= token < target.vocab_size:
                yield taken(config, "mask_token_id", token, "mask token")
    switches = {name for name, value in flat(config) if isinstance(value, bool)}
    for name in sorted({*switches, *({"is_causal"} & built.keys())}):
        word = "causality" if name == "is_causal" else name
        values = (not value_in(config, name),) if name in switches else (True, False)
        yield from (taken(config, name, value, word) for value in values)
    if value_in(config, "sliding_window"):
        yield Mistake(
            "window: the engine ignores the sliding window, and attends to all",
            "serve by an engine that has sliding windows in drafts",
            config=unwindow,
        )
    for eps in EPS:
        if value_in(config, "rms_norm_eps") not in (None, eps):
            yield taken(config, "rms_norm_eps", eps, "norm")


def taken(config: Mapping[str, Any], name: str, value: Any, word: str) -> Mistake:
    own = json.dumps(value_in(config, name))
    return Mistake(
        f"{word}: the engine takes {name} for {json.dumps(value)}, the draft has {own}",
        f"set {name} to {own} in what the engine reads, or have it read the export's",
        config=partial(put, name, value),
    )


def flat(config: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the fields of a config.json, nested ones too."""
    for name, value in config.items():
        yield from flat(value) if isinstance(value, dict) else [(name, value)]


def value_in(config: Mapping[str, Any], name: str) -> Any:
    """Return a field's value, wherever it is nested; None without one."""
    return next((value for key, value in flat(config) if key == name), None)


def put(name: str, value: Any, config: dict[str, Any]) -> None:
    """Set a field wherever it stands, or where it stands nowhere, at the top."""
    if name not in dict(flat(config)):
        config[name] = value
    for key, old in config.items():
        if key == name:
            config[key] = value
        elif isinstance(old, dict) and name in dict(flat(old)):
            put(name, value, old)


def unwindow(config: dict[str, Any]) -> None:
    put("sliding_window", None, config)
    put("layer_types", ["full_attention"] * len(value_in(config, "layer_types")), config)


# ---------------------------------------------------------------- what is computed with the weights


def computed_otherwise(module: nn.Module, head_dim: int) -> Iterator[Mistake]:
    """Yield other weights: norms, rows of queries and keys, vocabulary, dtype, fewer bits."""
    convert = "convert the export again by the engine's current converter, or load it as it is"
    norms = defaultdict[str, list[str]](list)
    for name, part in module.named_modules():
        if isinstance(weight := getattr(part, "weight", None), Tensor) and weight.ndim == 1:
            norms[".".join(word for word in name.split(".") if not word.isdigit())].append(name)
    for name, parts in norms.items():
        why = f"the engine lacks this norm, or does not know its tensor's name: {convert}"
        yield Mistake(f"norm: {name} is left out", why, module=partial(leave_out, parts))
        cause = f"norm: the weights of {name} were not loaded, and are ones"
        yield Mistake(cause, why, module=partial(fill_with_ones, parts))
    names = [name for name, _ in module.named_parameters()]
    if head_dim and any(".q_proj." in name for name in names):
        for halves, how in ((True, "were reordered, and the engine rotates halves"),
                            (False, "are as they are, and the engine rotates neighbours")):  # fmt: skip
            yield Mistake(
                f"row order: rows of q_proj and k_proj {how}",
                f"pairs are (i, i + half) here, and (2i, 2i + 1) in some engines: {convert}",
                module=partial(reorder, head_dim, halves),
            )
    yield from mapped_otherwise(module, convert)
    for dtype in (torch.bfloat16, torch.float16):
        cause = f"dtype: the draft is computed in {str(dtype)[6:]}"
        advice = "serve the draft in float32; or keep it so, and this is what it costs"
        yield Mistake(cause, advice, module=partial(cast_to, dtype))
    heads = [name for name in names if "head" in name]
    for chosen, what in ((heads, "the head is"), (names, "all matrices are")):
        for bits in (8, 4) if chosen else ():
            yield Mistake(
                f"quantised: {what} in {bits} bits",
                "leave the draft as it is: it is small, and its head decides what it drafts",
                module=partial(quantise, chosen, bits),
            )


def mapped_otherwise(module: nn.Module, convert: str) -> Iterator[Mistake]:
    """Yield other maps from the draft's vocabulary to the target's, of a draft that has one."""
    if not isinstance(offsets := getattr(module, "d2t", None), Tensor):
        return
    index = torch.arange(len(offsets), device=offsets.device)
    right = offsets + index
    largest, last = int(right.max()), len(right) - 1
    for ids, how in (
        (offsets, "offsets of d2t are taken for token ids"),
        (index, "d2t is not read: draft token i is taken for token i"),
        ((right + index).clamp_max(largest), "i is added to d2t twice"),
        (right[(index + 1).clamp_max(last)], "d2t is one off: draft token i is read at i + 1"),
        (right[(index - 1).clamp_min(0)], "d2t is one off: draft token i is read at i - 1"),
    ):
        yield Mistake(
            f"vocabulary: {how}",
            f"a draft's token i is the target's token i + d2t[i]: {convert}",
            module=partial(set_offsets, ids - index),
        )


def leave_out(names: Iterable[str], module: nn.Module) -> None:
    for name in names:
        module.set_submodule(name, nn.Identity())


def fill_with_ones(names: Iterable[str], module: nn.Module) -> None:
    for name in names:
        module.get_parameter(f"{name}.weight").fill_(1)


def set_offsets(offsets_U: Tensor, module: nn.Module) -> None:
    module.get_buffer("d2t").copy_(offsets_U)


def cast_to(dtype: torch.dtype, module: nn.Module) -> None:
    for weight in module.parameters():
        weight.data = weight.to(dtype)


def reorder(head_dim: int, halves: bool, module: nn.Module) -> None:
    """Reorder the rows of each head of queries and keys: two halves to pairs, or pairs to halves."""
    size = (2, head_dim // 2) if halves else (head_dim // 2, 2)
    for name, weight in module.named_parameters():
        if any(part in name for part in (".q_proj.", ".k_proj.", ".q_norm.", ".k_norm.")):
            rows = weight.reshape(-1, *size, *weight.shape[1:])
            weight.copy_(rows.transpose(1, 2).reshape(weight.shape))


def quantise(names: Iterable[str], bits: int, module: nn.Module) -> None:
    """Round matrices to so many bits, with a scale for each BLOCK of a row."""
    most = 2 ** (bits - 1) - 1
    for weight in map(module.get_parameter, names):
        for block in torch.split(weight, BLOCK, -1) if weight.ndim == 2 else ():
            scale = (block.abs().amax(-1, keepdim=True) / most).clamp_min(1e-12)
            block.copy_((block / scale).round() * scale)


# ---------------------------------------------------------------- what the target reads


def begin_with(token: int, ids: Sequence[int]) -> list[int]:
    return [token, *ids]


def prompts_otherwise(tokenizer: Any) -> Iterator[tuple[str, Callable[[Sequence[int]], list[int]]]]:
    """Yield what an engine may make of a prompt's token ids, and how."""
    special = [getattr(tokenizer, f"{name}_token_id", None) for name in ("bos", "eos", "pad")]
    for token in dict.fromkeys([*special, *getattr(tokenizer, "all_special_ids", ())[:SPECIAL]]):
        if token is not None:
            yield f"{token} is put before them", partial(begin_with, token)
    yield "the first is left out", lambda ids: [*ids[1:]]
    yield "the last is left out", lambda ids: [*ids[:-1]]
    yield "the last is repeated", lambda ids: [*ids, ids[-1]]
