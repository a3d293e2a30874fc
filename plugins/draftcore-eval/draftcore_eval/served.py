"""Does an engine serve the draft that was trained? The comparison behind `draftcore served`.

Prompts are decoded greedily by the engine, plain and with the draft, and by our own decoder. As the output
is the target's either way, a wrong draft shows in its rounds alone, and there prompt by prompt: a mean hides
it. What differs by a rounding, of the target's choice or of the draft's, is a tie and no difference.

In 16 bits the engine's kernels and ours round otherwise, and so do an engine's own, plain and drafting, as
they read other numbers of tokens at once. Nobody can tell each of these roundings from a fault, so there

- an output that parts where the target's two best are up to FAR tie bounds apart is a tie as well, of one
  prompt or of 2 % of them: a lossy engine, another target or other prompts part more of them, or farther;
- rounds that differ are ties where those of all prompts are within 2 % of ours, and no known mistake gives
  the rounds of clearly more prompts than the draft itself does.
"""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from draftcore.contracts.algorithm import Draft
from draftcore.contracts.run import OpenDraft, OpenRun
from draftcore.contracts.target import TargetModel
from draftcore.errors import DraftcoreError, UsageError, one_line, plural, raised
from draftcore.progress import Progress
from draftcore_eval.causes import Mistake, Variants, prompts_otherwise
from draftcore_eval.decode import TIE_BOUNDS, DecodingProgress, EagerRunner, decode
from draftcore_eval.engines import Answer, Engine, Serving
from draftcore_eval.options import EvalOptions
from draftcore_eval.report import Decoded
from draftcore_eval.runner import Prompts

# In these a rounding of target or draft parts the rounds of many prompts, and an output now and then. Gaps of
# the small target were off by up to 0.119 in float16 and 0.65 in bfloat16 (a CPU, 7,541 positions, 2026-11),
# about one tie bound, and engines round as well as we do.
HALF, ALIKE, FAR = ("bfloat16", "float16"), 0.02, 2
CONTEXTS = (128, 512, 2048, 8192, 32768)  # tokens of a prompt, below which it counts
SHOWN = 3  # ties
OWNERS = {"sglang": "sglang", "vllm": "vllm", "llamacpp": "llamacpp", "llama.cpp": "llamacpp"}


# ---------------------------------------------------------------- the engine


def named(engine: str) -> tuple[str, str | None]:
    """Return an engine's name, and the URL where that was given: its server says what it is."""
    if not engine.startswith(("http://", "https://")):
        return engine, None
    engine = engine.rstrip("/").removesuffix("/v1")
    try:
        with urllib.request.urlopen(f"{engine}/v1/models", timeout=30) as reply:
            owner = str(json.load(reply)["data"][0].get("owned_by", ""))
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise UsageError(
            f"no server of OpenAI's API answers at {engine}: {raised(error)}\n"
            "  start one there, or name an engine that is started here"
        ) from None
    if owner not in OWNERS:
        raise UsageError(
            f"the server at {engine} says that its model is owned by {one_line(owner)!r}\n"
            f"  known are {', '.join(sorted({*OWNERS.values()}))}"
        )
    return OWNERS[owner], engine


@contextmanager
def opened(run: OpenRun, name: str, serving: Serving, options: Mapping[str, Any]) -> Iterator[Any]:
    """Start or find an engine, and close it."""
    bound = run.bind("engine", name, options)
    engine = bound.hook.engine(name=name, serving=serving, options=bound.options)
    try:
        yield engine
    finally:
        engine.close()


def ask(
    engine: Engine, name: str, prompts: Prompts, limit: int, requests: int, model: TargetModel
) -> list[Answer]:
    """Have prompts answered, so many at a time; raises DraftcoreError for an answer that is none."""
    answers, pool = list[Answer](), ThreadPoolExecutor(requests)
    with Progress(len(prompts), verb=f"decoding on {name}") as progress, ExitStack() as stack:
        stack.callback(pool.shutdown, cancel_futures=True)  # after an error nothing more is asked
        for answer in pool.map(lambda prompt: engine.decode(prompt, limit), prompts):
            tokens = tuple(getattr(answer, "tokens", ()))
            ended = len(tokens) == limit or (tokens and tokens[-1] in model.end_tokens)
            if not ended or len(tokens) > limit or not 0 <= answer.rounds < len(tokens):
                raise DraftcoreError(
                    f"{name} answered {len(answers)} of {plural(len(prompts), 'prompt')}: to the next, of "
                    f"{len(prompts[len(answers)])} tokens, it says {one_line(answer, 200)}\n"
                    f"  an answer has {limit} tokens or ends with an end token, and fewer rounds than tokens"
                )
            answers.append(answer)
            progress.show(len(answers))
    return answers


# ---------------------------------------------------------------- what was found


@dataclass(frozen=True)
class Difference:
    """Where the rounds of a prompt part: the place of a token in its answer, what each side does there."""

    prompt: int
    token: int
    id: int
    text: str
    engine: str
    here: str


@dataclass
class Served:
    """What an engine decoded beside our own decoder, by prompt, and whether it serves the draft.

    `outputs` are the prompts whose output is not plain decoding's, `different` those whose rounds differ;
    `ties` say of others why they are not compared, or differ by a rounding.
    """

    engine: str
    draft: str
    num_drafts: int
    dtype: str
    prompts: Prompts
    categories: Sequence[str]
    here: Sequence[Decoded]
    drafted: Sequence[Answer]
    outputs: list[int] = field(default_factory=list)
    different: list[int] = field(default_factory=list)
    ties: dict[int, str] = field(default_factory=dict)
    first: Difference | None = None
    causes: list[tuple[str, str]] = field(default_factory=list)  # each with its remedy
    nearest: str = ""

    @property
    def as_trained(self) -> bool:
        return not (self.outputs or self.different)

    def groups(self) -> dict[str, list[int]]:
        """Return prompts by category and by length, where there are several of these."""
        by_category, by_context = dict[str, list[int]](), dict[str, list[int]]()
        for row, prompt in enumerate(self.prompts):
            if self.categories and self.categories[row]:
                by_category.setdefault(self.categories[row], []).append(row)
            below = next((n for n in CONTEXTS if len(prompt) < n), None)
            name = f"below {below}" if below else f"{CONTEXTS[-1]} or more"
            by_context.setdefault(f"prompts of {name} tokens", []).append(row)
        by_context = dict(sorted(by_context.items(), key=lambda x: len(self.prompts[x[1][0]])))
        return {**by_category, **by_context}

    def lengths(self, rows: Sequence[int]) -> dict[str, Any]:
        """Return the acceptance lengths of some prompts on both sides."""
        tokens = sum(len(self.drafted[row].tokens) - 1 for row in rows)
        ours = sum(len(self.here[row].tokens) - 1 for row in rows)
        equal = sum(self.drafted[row].rounds == len(self.here[row].accepted) for row in rows)
        return {
            "prompts": len(rows),
            "engine": tokens / max(1, sum(self.drafted[row].rounds for row in rows)),
            "here": ours / max(1, sum(len(self.here[row].accepted) for row in rows)),
            "equal_rounds": equal,
        }

    def by_position(self) -> dict[str, list[float] | None]:
        """Return the share of rounds in which a position was accepted; None where nobody says."""
        ours = [count for decoded in self.here for count in decoded.accepted]
        shares = [sum(n > k for n in ours) / max(1, len(ours)) for k in range(self.num_drafts)]
        said, rounds = [answer.accepted for answer in self.drafted], 0
        theirs = [0] * self.num_drafts
        for answer in self.drafted:
            rounds += answer.rounds
            for position, count in enumerate((answer.accepted or ())[: self.num_drafts]):
                theirs[position] += count
        engine = None if None in said else [count / max(1, rounds) for count in theirs]
        return {"engine": engine, "here": shares}

    def to_json(self) -> dict[str, Any]:
        everything = self.lengths(range(len(self.prompts)))
        rows = [
            {
                "prompt_tokens": len(prompt), "tokens": len(answer.tokens),
                "engine_rounds": answer.rounds, "here_rounds": len(decoded.accepted),
                **({"tie": self.ties[row]} if row in self.ties else {}),
            }
            for row, (prompt, answer, decoded) in enumerate(
                zip(self.prompts, self.drafted, self.here, strict=True)
            )
        ]  # fmt: skip
        return {
            "served_as_trained": self.as_trained,
            **{name: getattr(self, name) for name in ("engine", "draft", "num_drafts", "dtype")},
            "acceptance_length": everything,
            "acceptance_by_position": self.by_position(),
            "groups": {name: self.lengths(rows) for name, rows in self.groups().items()},
            "other_outputs": self.outputs,
            "other_rounds": self.different,
            "first_difference": self.first and vars(self.first),
            "causes": [{"cause": cause, "remedy": remedy} for cause, remedy in self.causes],
            "nearest": self.nearest,
            "rows": rows,
        }

    def lines(self) -> Iterator[tuple[str, str]]:
        """Yield names and values for people."""

        def both(found: Mapping[str, Any]) -> str:
            return (
                f"{found['engine']:.4f} on {self.engine}, {found['here']:.4f} here; rounds are equal in "
                f"{found['equal_rounds']} of {plural(found['prompts'], 'prompt')}"
            )

        count = len(self.prompts)
        if self.draft:
            yield "draft", self.draft
        yield "acceptance length", both(self.lengths(range(count)))
        sides = self.by_position()
        for side, name in (("engine", self.engine), ("here", "here")):
            shares = sides[side]
            text = "it does not say" if shares is None else "  ".join(f"{x:.2f}" for x in shares)
            yield f"by position, {name}", text
        for name, rows in self.groups().items():
            if len(rows) < count:
                yield name, both(self.lengths(rows))
        tied = sum(list(self.drafted[row].tokens) != self.here[row].tokens for row in self.ties)
        text = f"{count - len(self.outputs)} of {count} are those of plain decoding"
        yield "outputs", text + f", {tied} of them up to a tie" * bool(tied)
        for row, why in list(self.ties.items())[:SHOWN]:
            yield "tie", f"prompt {row + 1}: {why}"
        if len(self.ties) > SHOWN:
            yield "ties", f"{len(self.ties)} in all"
        if self.first:
            first = self.first
            yield (
                "first difference",
                f"prompt {first.prompt + 1}, token {first.token + 1} of its answer, {first.text!r} "
                f"({first.id}): {first.engine} on {self.engine}; here {first.here}",
            )
        for number, (cause, remedy) in enumerate(self.causes):
            yield "or" if number else "cause", cause
            yield "remedy", remedy
        if not (self.causes or self.as_trained):
            nearest = f"; nearest is: {self.nearest}" if self.nearest else ""
            yield "cause", f"none that is known: no known mistake gives these rounds{nearest}"
        yield "served as trained", "yes" if self.as_trained else "NO"


# ---------------------------------------------------------------- the comparison


@dataclass
class Comparison:
    """Compares what an engine decoded with what the trained draft does."""

    run: OpenRun
    options: EvalOptions
    variants: Variants
    found: Served
    gaps: dict[int, float] = field(default_factory=dict)  # of the target's two best, by prompt

    @property
    def model(self) -> TargetModel:
        return self.run.target.load_model()

    @property
    def bound(self) -> float:
        return self.options.tie_bound or TIE_BOUNDS[self.run.target.dtype]

    def outputs(self, answers: Sequence[Answer], whose: str, *, of_draft: bool) -> None:
        """Note which outputs are not the target's own, and which part from it at a tie."""
        wrong = list[int]()
        for row, (answer, decoded) in enumerate(zip(answers, self.found.here, strict=True)):
            if (at := parting(answer.tokens, decoded.tokens)) is None:
                continue
            gap = self.model.top2_gap([*decoded.prompt, *decoded.tokens[:at]])
            if gap <= self.bound and len(answer.tokens) > at < len(decoded.tokens):
                self.found.ties[row] = (
                    f"at token {at + 1} the target's two best are {gap:.1e} apart"
                )
            else:
                wrong.append(row)
                self.gaps[row] = max(gap, self.gaps.get(row, 0.0))
        if wrong and not self.found.outputs:
            first = wrong[0]
            at = parting(answers[first].tokens, self.found.here[first].tokens) or 0
            self.found.first = self.difference(
                first, at, f"another {whose} output", "the target's own"
            )
            gap = max(self.gaps[row] for row in wrong)
            self.found.causes = self.why_outputs(answers, wrong, gap, of_draft=of_draft)
        self.found.outputs = sorted({*self.found.outputs, *wrong})

    def why_outputs(
        self, answers: Sequence[Answer], wrong: Sequence[int], gap: float, *, of_draft: bool
    ) -> list[tuple[str, str]]:
        """Return why outputs are not the target's: other prompts, a smaller dtype, or a lossy engine."""
        if of_draft:
            return [(
                "the engine's output changes with the draft: it is not lossless; where the outputs part, "
                f"the target's two best are up to {gap:.2g} apart",
                "serve greedily, without relaxed acceptance; else report it to the engine",
            )]  # fmt: skip
        rows = wrong[:2]
        for what, change in prompts_otherwise(self.run.target.load_tokenizer()):
            asked = [change(self.found.prompts[row]) for row in rows]
            outputs = self.model.generate(asked, self.options.max_new_tokens)
            if [list(answers[row].tokens) for row in rows] == outputs:
                return [(
                    f"prompt: of its token ids {what}",
                    "have the engine add and drop none: the draft learned on rows with these ids",
                )]  # fmt: skip
        return [(
            "the engine computes another target, or in another dtype, or reads other prompts; where the "
            f"outputs part, the target's two best are up to {gap:.2g} apart",
            f"serve the target, and its caches, in {self.found.dtype}; compare folders and prompts",
        )]  # fmt: skip

    def rounded_outputs(self) -> None:
        """Take outputs that part in 16 bits for ties, where they are few and part near one."""
        found = self.found
        few = len(found.outputs) <= max(1, ALIKE * len(found.here))
        if found.dtype in HALF and few and max(self.gaps.values(), default=0.0) <= FAR * self.bound:
            for row in found.outputs:
                found.ties[row] = (
                    f"in {found.dtype} roundings decide; the target's two best are "
                    f"{self.gaps[row]:.1e} apart where the output parts"
                )
            found.outputs, found.causes, found.first = [], [], None

    def rounds(self, engine: Engine) -> None:
        """Note whose rounds differ, where they part first, and why."""
        self.rounded_outputs()
        found, here = self.found, self.found.here
        compared = [row for row in range(len(here)) if row not in {*found.ties, *found.outputs}]
        if not (compared or found.outputs):
            raise DraftcoreError(
                f"the outputs of all {len(here)} prompts part from the target's own at a tie, so no rounds "
                "can be compared\n  ask more prompts, or shorter answers: eval.max_new_tokens"
            )
        theirs = {row: found.drafted[row].rounds for row in compared}
        own = {row: len(here[row].accepted) for row in compared}
        differ = [row for row in compared if theirs[row] != own[row]]
        for row, rounded in zip(differ, self.variants.rounded(differ), strict=True):
            if theirs[row] in rounded:
                found.ties[row] = (
                    "the draft's two best are a rounding apart: both rounds are its own"
                )
            else:
                found.different.append(row)
        half = found.dtype in HALF
        if not found.different or (found.causes and not half):
            return
        fitting, found.nearest = self.variants.explain(theirs, own)
        ratio = sum(theirs.values()) / sum(own.values())
        if half and not (fitting or found.nearest) and abs(ratio - 1) < ALIKE:
            why = f"in {found.dtype} roundings decide; the rounds of all prompts are {ratio:.3f} of ours"
            found.ties |= dict.fromkeys(found.different, why)
            found.different.clear()
            return
        found.causes += [(mistake.cause, mistake.remedy) for mistake in fitting]
        if found.first is None:
            row = min(found.different, key=lambda row: len(here[row].tokens))
            found.first = self.part(row, engine, fitting[0] if fitting else None)

    def part(self, row: int, engine: Engine, mistake: Mistake | None) -> Difference:
        """Find the first token at which a prompt's rounds part: with the mistake, else by asking."""
        ours = self.found.here[row]
        (theirs,) = self.variants.decode(mistake, [row]) if mistake else (None,)
        if theirs and len(theirs.accepted) == self.found.drafted[row].rounds:
            at = 1
            for mine, other in zip(ours.accepted, theirs.accepted, strict=False):
                if mine != other:
                    said = ("drafted", "not drafted")[:: 1 if other > mine else -1]
                    return self.difference(row, at + min(mine, other), *said)
                at += mine + 1
        low, high = 1, len(ours.tokens)  # so many tokens take as many rounds; they do not
        while high - low > 1:
            middle = (low + high) // 2
            same = engine.decode(ours.prompt, middle).rounds == rounds_until(ours, middle)
            low, high = (middle, high) if same else (low, middle)
        there = engine.decode(ours.prompt, high).rounds
        here = rounds_until(ours, high)
        return self.difference(row, high - 1, f"after {plural(there, 'round')}", f"after {here}")

    def difference(self, row: int, at: int, engine: str, here: str) -> Difference:
        tokens = self.found.here[row].tokens
        token = tokens[min(at, len(tokens) - 1)]
        text = self.run.target.load_tokenizer().decode([token])
        return Difference(row, at, token, text, engine, here)


def parting(tokens: Sequence[int], reference: Sequence[int]) -> int | None:
    """Return the first place where two outputs differ; None for equal ones."""
    if list(tokens) == list(reference):
        return None
    pairs = zip(tokens, reference, strict=False)
    shorter = min(len(tokens), len(reference))
    return next((at for at, (one, other) in enumerate(pairs) if one != other), shorter)


def rounds_until(decoded: Decoded, tokens: int) -> int:
    """Return how many rounds a prompt took until it had so many tokens."""
    have, rounds = 1, 0
    while have < tokens:
        have, rounds = have + decoded.accepted[rounds] + 1, rounds + 1
    return rounds


def folder_of(run: OpenRun) -> Path:
    """Return the folder of the target; one that is on the Hub is fetched, or was."""
    if (folder := Path(run.target.path)).is_dir():
        return folder.resolve()
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(run.target.path, revision=run.target.revision))


@dataclass(frozen=True)
class Asking:
    """How an engine is asked: its name, the URL of a server that runs, requests at once, its options."""

    name: str
    url: str | None = None
    requests: int = 1
    options: Mapping[str, Any] = field(default_factory=dict)


def decode_here(
    draft: OpenDraft, built: Draft, prompts: Prompts, options: EvalOptions
) -> tuple[list[Decoded], int]:
    """Decode prompts with the trained draft; returns how many it drafts a round as well.

    Raises UsageError for a draft of trees.
    """
    model, drafter = draft.run.target.load_model(), draft.drafter(built)
    built.module.to(model.device).eval()
    if hasattr(drafter, "depth"):
        raise UsageError(
            f"{draft.algorithm.offer.name} drafts trees, and engines are asked for chains\n"
            "  draftcore eval measures the acceptance length of such drafts"
        )
    with DecodingProgress(len(prompts), options.batch, "decoding here") as progress:
        decoded, _ = decode(EagerRunner(model, drafter), prompts, options, progress.show_batch)
    if not any(one.accepted for one in decoded):
        raise DraftcoreError(
            f"the target ends its answer to each of {plural(len(prompts), 'prompt')} with the first "
            "token: nothing was drafted, so nothing can be compared\n  ask other prompts"
        )
    return decoded, drafter.num_drafts


def compare(
    variants: Variants, here: Sequence[Decoded], num_drafts: int, export: Path,
    categories: Sequence[str], asking: Asking,
) -> Served:  # fmt: skip
    """Serve an export, and compare it with `here`, what the draft decoded of which `variants` are made.

    Raises DraftcoreError where the engine does not answer all prompts.
    """
    draft, ids, name = variants.draft, variants.prompts, asking.name
    run, limit, requests = draft.run, variants.options.max_new_tokens, asking.requests
    model, longest = run.target.load_model(), max(map(len, ids)) + limit
    dtype = str(model.dtype).removeprefix("torch.")
    serving = Serving(folder_of(run), export, num_drafts, longest, dtype, requests, asking.url)
    found = Served(name, draft.label, num_drafts, dtype, ids, categories, here, ())
    comparison = Comparison(run, variants.options, variants, found)
    if asking.url is None:  # a server that runs has its draft already
        plain = replace(serving, export=None, num_drafts=0)
        with opened(run, name, plain, asking.options) as engine:
            answers = ask(engine, name, ids, limit, requests, model)
        comparison.outputs(answers, "plain", of_draft=False)
    with opened(run, name, serving, asking.options) as engine:
        found.drafted = ask(engine, f"{name} with the draft", ids, limit, requests, model)
        comparison.outputs(found.drafted, "drafted", of_draft=asking.url is None)
        comparison.rounds(engine)
    return found
