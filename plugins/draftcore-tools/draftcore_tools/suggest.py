"""A run for a model, whose settings fit the devices, each with its reason: `draftcore plan MODEL`."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from types import MappingProxyType
from typing import Any

import numpy as np

from draftcore import RunConfig, open_run
from draftcore.contracts.capture import FeatureRequest
from draftcore.contracts.run import OpenRun
from draftcore.errors import UsageError
from draftcore.options import apply_overrides, validate_as
from draftcore.uris import format_size, parse_size
from draftcore_tools.configuration import Setting, as_yaml, leaves
from draftcore_tools.plan import RunPlan, plan_run, read_rows
from draftcore_tools.recipes import CHARACTERS, Recipe, config_and_tokenizer, recipe_of

SAMPLED = 1000  # rows whose lengths say how long a row may be
LONGEST = 8192  # tokens of a row that are looked at for that
ROWS_OF_STEP = 8  # on each device that trains
LEARNED_ROWS = 10**6  # over all epochs
ASSUMED_ROWS, ASSUMED_TOKENS = 100_000, 1000  # where no data is named
WRITTEN_ROWS = 64  # in their place
DRAFT_VOCABULARY = 32_000
PARTS = (2, 4, 8)  # devices that may share a target
MOST_GPUS = 16  # that are tried, to say how many suffice
CUTS = (1, 2, 4)  # of the longest row, in turn, where nothing else makes a run fit
SERVERS = "sglang-server"  # a capture by servers, which have devices of their own


@dataclass(frozen=True)
class Suggestion:
    """A run's settings by dotted key with their reasons, and what it takes; `assumed` is not known."""

    settings: Mapping[str, Any]
    reasons: Mapping[str, str]
    plan: RunPlan
    recipe: Recipe | None
    assumed: Sequence[str]

    def lines(self) -> Iterator[tuple[str, str]]:
        """Yield names and values for people."""
        published = self.recipe.published if self.recipe else ()
        yield "acceptance", "none was measured by us for this target"
        yield from (("published", str(one)) for one in published)
        yield from (("assumed", text) for text in self.assumed)
        yield from self.plan.lines()

    def text(self) -> str:
        """Return the run as YAML, each setting with its reason."""
        sections = list(RunConfig.model_fields)
        keys = sorted(
            self.settings, key=lambda key: (sections.index(key.split(".")[0]), key.count("."))
        )
        head = [f"# {name}: {value}" for name, value in self.lines()]
        rows = [Setting(key, self.settings[key], self.reasons[key]) for key in keys]
        return "\n".join([*head, as_yaml(rows), ""])

    def to_json(self) -> dict[str, Any]:
        published = [asdict(one) for one in (self.recipe.published if self.recipe else ())]
        known = {"published": published, "assumed": [*self.assumed], "plan": self.plan.to_json()}
        return {"settings": {**self.settings}, "reasons": {**self.reasons}, **known}


def suggest(
    model: str, overrides: Sequence[str], registry: Any, *, device: str, gpu: str | None = None,
    gpus: int | None = None, disk: str | None = None, data: str | None = None,
    held_out: str | None = None,
) -> Suggestion:  # fmt: skip
    """Choose a run for a model that fits so many GPUs of this memory; what `overrides` set is kept.

    `disk` is what features may take there, and `device` whose speed is reckoned with. Raises UsageError,
    with the figures, where no run fits.
    """
    recipe = recipe_of(model)
    with config_and_tokenizer(model, recipe) as (path, tokenizer), TemporaryDirectory() as scratch:
        chooser = Chooser(recipe.model if recipe else model, registry, overrides)
        chooser.path, chooser.tokenizer, chooser.scratch = path, tokenizer, Path(scratch)
        chooser.data, chooser.device = chooser.asked.get("data.train", data), device
        chooser.gpus, chooser.gpu_bytes = gpus or 1, parse_size(gpu or "80GB")
        chooser.choose_target(recipe.source if recipe else "the model's own files", held_out)
        chooser.choose_rows(parse_size(disk or "0"))
        plan = chooser.choose_sizes()
    assumed = []
    if tokenizer is not None:  # which tokens are frequent is not known
        plan = replace(plan, vocabulary={})
        assumed.append(f"{CHARACTERS} characters a token, as the tokenizer is not here")
    if chooser.data is None:
        assumed.append(
            f"{ASSUMED_ROWS:,} rows of {ASSUMED_TOKENS:,} tokens; --data FILE takes yours"
        )
    plan = replace(plan, run=str(chooser.settings["run"]))
    return Suggestion(chooser.settings, chooser.reasons, plan, recipe, assumed)


class Chooser:
    """Adds settings, one after the other, by what those so far would take."""

    path: str  # where the target's config is read
    tokenizer: Any  # what stands for the target's own, if that is not there
    scratch: Path
    data: Any
    gpus: int
    gpu_bytes: int
    device: str

    def __init__(self, model: str, registry: Any, overrides: Sequence[str]) -> None:
        self.model, self.registry = model, registry
        self.settings, self.reasons = dict[str, Any](), dict[str, str]()
        asked: dict[str, Any] = {}
        apply_overrides(asked, overrides)
        self.asked = {".".join(path): value for path, value in leaves(asked)}
        self.plans = dict[str, RunPlan]()
        self.servers = self.asked.get("capture.name") == SERVERS
        for key, value in self.asked.items():
            self.settings[key], self.reasons[key] = value, "as the command line says"

    def set(self, key: str, value: Any, reason: str) -> None:
        if key not in self.asked:
            self.settings[key], self.reasons[key] = value, reason

    @contextmanager
    def opened(self, changes: Mapping[str, Any] = MappingProxyType({})) -> Iterator[OpenRun]:
        """Open the run as it is chosen so far, with changes, but for where files lie."""
        places: dict[str, Any] = {"run": str(self.scratch / "run"), "target.path": self.path}
        places["data.train"] = self.data or str(self.write_rows())
        if self.servers:  # as if they were processes of the run: no device here holds the target
            places["topology.producers"] = 1
        tree: dict[str, Any] = {}
        chosen = {**self.settings, **changes, **self.asked, **places}
        apply_overrides(tree, (f"{key}={json.dumps(value)}" for key, value in chosen.items()))
        config = validate_as(RunConfig, tree, self.model)
        with open_run(config, (), self.registry) as run:
            if self.tokenizer is not None:
                vars(run.target)["load_tokenizer"] = lambda: self.tokenizer
            yield run

    def requested(self) -> FeatureRequest:
        with self.opened() as run:
            draft = run.drafts[0]
            hook, asked = draft.algorithm.hook, {"target": run.target, "options": draft.options}
            request: FeatureRequest = hook.feature_request(**asked)
        return request

    def write_rows(self) -> Path:
        """Write rows of up to twice the assumed tokens; each of their words is one, or about."""
        file = self.scratch / "rows.jsonl"
        if not file.exists():
            halves = [ASSUMED_TOKENS * i // WRITTEN_ROWS for i in range(1, WRITTEN_ROWS + 1)]
            turns = [
                [{"role": role, "content": " the" * half} for role in ("user", "assistant")]
                for half in halves
            ]
            file.write_text("".join(json.dumps({"messages": turn}) + "\n" for turn in turns))
        return file

    # ---------------------------------------------------------------- what is chosen

    def choose_target(self, source: str, held_out: str | None) -> None:
        """Set what follows from the target: its type, the algorithm, its layers and vocabulary."""
        algorithm = self.asked.get("algorithm.name", "eagle3")
        self.set("run", f"runs/{Path(self.model).name.lower()}-{algorithm}", "what training writes")
        self.set("target.path", self.model, f"config: {source}")
        self.set("data.train", self.data or "conversations.jsonl", "answers of the target's own")
        if held_out:
            self.set("data.eval", held_out, "held out: says when to stop, and which step is best")
        why = "of ours it accepts most after the same rows, and sglang and vLLM serve it"
        self.set("algorithm.name", algorithm, why)
        with self.opened() as run:
            target, options = run.target, type(run.drafts[0].options).model_fields
            text = target.text_config
            if str(target.dtype) == "torch.float32":
                why = "its config names no type, or one that a GPU computes slowly in"
                self.set("target.dtype", "bfloat16", why)
        heads, hidden = int(text.num_attention_heads), int(text.hidden_size)
        try:
            self.request = self.requested()
        except UsageError:  # of servers that want a whole number of the draft's heads in its width
            if "num_attention_heads" not in options or hidden % heads == 0:
                raise
            why = f"servers want a divisor of the width, {hidden:,}; the target has {heads}"
            width = int(getattr(text, "head_dim", 0) or hidden // heads)
            self.set("algorithm.options.num_attention_heads", hidden // width, why)
            self.request = self.requested()
        self.token_bytes = self.request.token_bytes(hidden)
        if "layers" in options:
            why = (
                f"early to late: {len(self.request.names)} states of {format_size(self.token_bytes)}"
                " in all are captured of each token"
            )
            self.set("algorithm.options.layers", [*self.request.layers], why)
        if "draft_vocab_size" in options and target.vocab_size > 2 * DRAFT_VOCABULARY:
            why = f"the most frequent of {target.vocab_size:,}: less memory, and faster drafting"
            self.set("algorithm.options.draft_vocab_size", DRAFT_VOCABULARY, why)
        self.positions = int(text.max_position_embeddings)
        self.key_heads = int(getattr(text, "num_key_value_heads", 0) or 0)
        self.shareable = bool(getattr(text, "base_model_tp_plan", None))
        self.set("train.precision", "bf16", "half the time and memory; weights are kept in fp32")

    def choose_rows(self, disk: int) -> None:
        """Set how long a row may be, how often all are read, and whether features are kept between."""
        longest, rows, tokens = 2048, ASSUMED_ROWS, ASSUMED_ROWS * ASSUMED_TOKENS
        why = "usual; longer rows are left out"
        if self.data is not None:
            with self.opened({"data.max_length": min(LONGEST, self.positions)}) as run:
                samples, times = read_rows(run, SAMPLED)
            rows, tokens = (
                round(n * times) for n in (len(samples.lengths), samples.summary.tokens)
            )
            longest = int(np.quantile(samples.lengths, 0.95, method="inverted_cdf"))
            why = f"95 of 100 rows have {longest:,} tokens at most; longer ones are left out"
            longest = min(4096, max(512, math.ceil(longest / 256) * 256))
        self.set("data.max_length", min(longest, self.positions), why)
        why = "a million rows in all, in 2 to 10 epochs, as others read theirs"
        self.set("train.epochs", min(10, max(2, math.ceil(LEARNED_ROWS / rows))), why)
        kept = f"features take {format_size(tokens * self.token_bytes)} of disk"
        if tokens * self.token_bytes <= 0.9 * disk:
            why = f"captured once: {kept}, of {format_size(disk)}"
            self.set("store", f"file:{self.settings['run']}/features", why)
        else:
            self.set("store", "auto", f"captured anew in each epoch; kept, {kept}")

    def choose_sizes(self) -> RunPlan:
        """Set batch, blocks and topology to the largest that fit; return the plan of that.

        Raises UsageError where none do.
        """
        fitting = self.fitting(self.gpus)
        if fitting is None:
            raise self.too_large()
        changes, plan = fitting
        room = format_size(self.gpu_bytes)
        whys = {
            "data.max_length": "longer rows do not fit",
            "train.batch": f"{format_size(self.fullest(plan))} of {room} on the fullest device",
            "train.accumulate": f"{ROWS_OF_STEP} rows a step on each device that trains",
            "target.tensor_parallel": "devices share the target, which one does not hold",
            "topology.ranks": "each GPU captures, and trains on, its share",
            "topology.producers": "capture for the GPU that trains, which then holds no target",
        }
        for key, value in changes.items():
            self.set(key, value, whys.get(key, "as many as fit"))
        return self.scaled(plan)

    # ---------------------------------------------------------------- what fits

    def fitting(self, gpus: int) -> tuple[dict[str, Any], RunPlan] | None:
        """Return how a run fits on so many devices, by which settings, and its plan; the best first."""
        for cut in CUTS:
            for placement in self.placements(gpus):
                changes: dict[str, Any] = {"train.batch": ROWS_OF_STEP, **placement}
                if cut > 1:
                    changes["data.max_length"] = self.settings["data.max_length"] // cut
                plan: RunPlan | None = self.plan_with(changes)
                while plan and self.fullest(plan) > self.gpu_bytes:
                    plan = self.lowered(plan, changes)
                if plan:
                    return changes, plan
        return None

    def lowered(self, plan: RunPlan, changes: dict[str, Any]) -> RunPlan | None:
        """Change what the plan says to lower; return the plan of that, None where nothing helps."""
        before = dict(changes)
        for setting, need in plan.lower:
            key, _, value = setting.partition("=")
            if key.startswith("topology."):
                break
            changes[key] = json.loads(value)
            if need <= self.gpu_bytes:
                break
        batch = plan.batch if "train.batch" in self.asked else changes["train.batch"]
        if batch < ROWS_OF_STEP:
            changes["train.accumulate"] = changes.get("topology.ranks", 1) * ROWS_OF_STEP // batch
        return None if changes == before else self.plan_with(changes)

    def plan_with(self, changes: Mapping[str, Any]) -> RunPlan:
        key = json.dumps(changes)
        if key not in self.plans:
            with self.opened(changes) as run:
                asked: dict[str, Any] = {"device": self.device, "device_bytes": self.gpu_bytes}
                self.plans[key] = plan_run(run, **asked, rows=0 if self.data is None else SAMPLED)
        return self.plans[key]

    def fullest(self, plan: RunPlan) -> int:
        """Return the bytes that the fullest device needs: one that trains, or one that only captures."""
        memory = plan.memory
        return int(
            max(memory["together"], 0 if self.servers else memory["target"] + memory["capture"])
        )

    def placements(self, gpus: int) -> Iterator[dict[str, int]]:
        """Yield who captures on so many devices, what is quickest first.

        That is each rank, processes beside one rank, or such that share the target.
        """
        yield {"topology.ranks": gpus} if gpus > 1 else {}
        if self.servers:
            return
        if gpus > 1:
            yield {"topology.producers": gpus - 1}
        for parts in PARTS:
            if self.shareable and parts <= gpus and self.key_heads % parts == 0:
                beside = {"topology.producers": (gpus - 1) // parts} if gpus > parts else {}
                yield {"target.tensor_parallel": parts, **beside}

    def too_large(self) -> UsageError:
        """Say what a run would need that fits in no way, and how many devices hold it."""
        longest = self.settings["data.max_length"] // CUTS[-1]
        memory = self.plan_with({"train.batch": 1, "data.max_length": longest}).memory
        figures = {"the target": memory["target"], "its activations": memory["capture"]}
        figures["the draft's step"] = max(draft["peak"] for draft in memory["drafts"].values())
        told = ", ".join(f"{name} {format_size(size)}" for name, size in figures.items())
        enough = (n for n in range(self.gpus + 1, MOST_GPUS + 1) if self.fitting(n))
        more = next((f"--gpus {n} suffices; or " for n in enough), "")
        return UsageError(
            f"no run for {self.model} fits {self.gpus} x {format_size(self.gpu_bytes)}: "
            f"a row of {longest:,} tokens takes {told}\n"
            f"  {more}take a larger --gpu, a quantised target, or let servers with GPUs of their own "
            f"capture: capture.name={SERVERS}"
        )

    def scaled(self, plan: RunPlan) -> RunPlan:
        """Return a plan for the assumed rows in the place of those that were written."""
        hours = dict(plan.hours)
        if self.servers:  # nobody knows how fast they are
            hours["capture"] = None
        if self.data is not None:
            return replace(plan, hours=hours)
        times = ASSUMED_ROWS / plan.rows
        hours |= {name: h * times for name, h in hours.items() if h is not None}
        counts = {
            name: round(getattr(plan, name) * times) for name in ("tokens", "steps", "store_bytes")
        }
        return replace(plan, rows=ASSUMED_ROWS, hours=hours, **counts)
