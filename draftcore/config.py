"""A run's configuration: one YAML file plus dotted overrides, validated before anything starts.

The models below are the reference of every key. Plugin options stay plain mappings here and are
validated by the plugin's own model when it is bound. Importing this module costs pydantic's
70 ms, so the command line does it only for verbs that read a configuration.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self, cast

from pydantic import BaseModel, ConfigDict, Field, model_validator

from draftcore.contracts.offers import Free
from draftcore.options import Config, apply_overrides, read_yaml, validate_as
from draftcore.plugins import catalog
from draftcore.uris import require_no_secret

Dtype = Literal["auto", "float32", "bfloat16", "float16"]
Count = Annotated[int, Field(ge=1, le=10**9)]
Whole = Annotated[int, Field(ge=0, le=10**9)]
Few = Annotated[int, Field(ge=0, le=1000)]
Share = Annotated[float, Field(ge=0, lt=1)]
Label = Annotated[str, Field(pattern=r"^\w[\w.-]*$", max_length=99)]  # a folder in the run's
# What else lies in the run's folder, which no label may be.
RESERVED = {"checkpoints", "data", "eval", "export", "features", "logs", "metrics.jsonl", "secret"}
RESERVED |= {"queue.json", "run.json", "scale.json", "comparison.png", "metrics.png", "config.json"}


class Section(BaseModel):
    """Every section refuses unknown keys and never changes once read."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class Selection(Section):
    """A section that belongs to the plugin that it selects: its options stand beside name and plugin."""

    model_config = ConfigDict(extra="allow")
    name: str
    plugin: Free[str] = Field("", description="the plugin, where several offer this name")

    @property
    def options(self) -> dict[str, Any]:
        """What the plugin's own model validates."""
        return self.model_extra or {}


def selected(kind: str, description: str) -> Any:
    """Return the field of a name that is our own where a run names none."""
    return Field(catalog.default(kind), description=description)


class TargetConfig(Selection):
    name: str = selected("target", "the kind of target")


class DataConfig(Selection):
    name: str = selected("samples", "who reads the rows")
    max_skipped: float = Field(0.01, ge=0, le=1, description="share of rows, or one, that may fail")


class EvalConfig(Selection):
    name: str = selected("evaluation", "who measures drafts")


class Choice(Section):
    name: str = Field(description="the offer's name, see `draftcore list-plugins`")
    plugin: Free[str] = Field("", description="the plugin, where several offer this name")
    options: dict[str, Any] = Field({}, description="validated by the plugin")


class CaptureConfig(Choice):
    name: str = selected("capture", "the capture backend")
    options: Free[dict[str, Any]] = Field({}, description="the plugin's; some change features")
    dtype: Dtype = Field("auto", description="stored type; auto is the target's compute type")


class TuningConfig(Section):
    """How one draft is optimised: what drafts of one run may set differently."""

    lr: float | None = Field(None, gt=0, le=100, description="peak rate; or the algorithm's")
    schedule: Literal["cosine", "constant"] = "cosine"
    warmup_ratio: Share | None = Field(None, description="algorithm's default if unset")
    clip: float | None = Field(None, gt=0, le=1e9, description="gradient norm; or the algorithm's")
    weight_decay: float = Field(0.0, ge=0, le=100)
    betas: tuple[Share, Share] = (0.9, 0.999)
    precision: Literal["auto", "fp32", "bf16"] = Field("auto", description="auto: bf16 on a GPU")


class TrainConfig(TuningConfig):
    epochs: Free[Count] = 1
    max_steps: Free[Count | None] = Field(None, description="stop after this many steps")
    batch: Count = Field(8, description="rows captured and trained together")
    batch_tokens: Count | None = Field(None, description="tokens of a batch at most, padded")
    accumulate: Free[Count | None] = Field(None, description="batches a step; unset: one a rank")
    prefetch: Free[Count | None] = Field(None, description="batches ready a rank; unset: 2 or more")
    shard: Free[bool] = Field(False, description="shard drafts over ranks, by FSDP2")
    compile: Free[Literal["auto"] | bool] = Field("auto", description="auto: on CUDA if it repays")
    device: Free[str] = Field("auto", description="as target.device")
    seed: int = Field(0, ge=0, lt=2**32)
    log_every: Free[Count] = Field(10, description="steps per line of metrics.jsonl")
    checkpoint_every: Free[Count] = Field(500, description="steps between checkpoints")
    keep_checkpoints: Free[Count] = 2
    eval_every: Free[Whole | None] = Field(None, description="in steps; unset: an epoch; 0: never")
    eval_samples: Free[Count] = Field(64, description="samples whose loss is measured each time")
    eval_prompts: Free[Whole] = Field(8, description="prompts decoded; 0 is none")
    rank_timeout: Free[float] = Field(300, gt=0, le=1e6, description="seconds of silence at most")


class DraftConfig(Section):
    algorithm: Choice
    train: TuningConfig = Field(TuningConfig(), description="what differs from the run's `train`")


class TopologyConfig(Section):
    """The processes of a run, and who starts them."""

    launcher: str = selected("launcher", "who starts the processes")
    options: dict[str, Any] = Field({}, description="the launcher's")
    producers: Few = Field(0, description="that capture for the trainer; 0: it does itself")
    ranks: int = Field(1, ge=1, le=1000, description="processes of the trainer")
    restarts: Few = Field(3, description="times that a process which dies is started again")


class RunnerConfig(Section):
    """Who runs the models: `prefill` is the target's forward in capture, `decode` both in decoding."""

    prefill: Choice | None = Field(None, description="null is the target's plain forward")
    decode: Free[Choice | None] = Field(None, description="null is one forward after the other")


class RunConfig(Section):
    run: Free[Path] = Field(description="folder of the run: checkpoints, metrics, reports")
    target: Free[TargetConfig]  # but for what its own options say
    data: Free[DataConfig] = DataConfig()
    algorithm: Choice | None = Field(None, description="the draft to train")
    drafts: Free[dict[Label, DraftConfig]] = Field({}, description="or several, from one capture")
    capture: CaptureConfig = CaptureConfig()
    store: Free[str] = Field("auto", description="URI, as file:FOLDER; auto: where needed, shared")
    batches: Free[str] = selected("batches", "how batches come from processes that capture")
    channel: Free[str] = selected("channel", "URI; tcp://HOST:PORT for producers on other machines")
    topology: Free[TopologyConfig] = TopologyConfig()
    plugins: Free[tuple[str, ...]] = Field((), description="wrappers and observers, by name")
    train: TrainConfig = TrainConfig()
    eval: Free[EvalConfig] = EvalConfig()
    runner: RunnerConfig = RunnerConfig()

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if (self.algorithm is None) == (not self.drafts):
            raise ValueError("set either algorithm, for one draft, or drafts, for several by label")
        if taken := RESERVED & self.drafts.keys():
            raise ValueError(f"no draft can be labelled {taken.pop()!r}: the run's folder has it")
        if not (self.run.name and str(self.run).isprintable()):
            raise ValueError(f"run: {str(self.run)!r} names no folder of its own")
        launched = self.topology.options or self.topology.launcher != catalog.default("launcher")
        if launched and self.topology.ranks + self.topology.producers == 1:
            raise ValueError("topology.launcher starts nothing: set topology.ranks or .producers")
        for key, uri in (("store", self.store), ("channel", self.channel)):
            require_no_secret(key, uri)
        return self


def load_config(config: Config, overrides: Sequence[str] = ()) -> RunConfig:
    """Read a run's YAML, or take a mapping of what it would say, and apply overrides in order.

    Raises UsageError for a missing or malformed file, an override without `=`, and every key or
    value that the models above refuse, with the nearest known key.
    """
    data = read_yaml(config)
    apply_overrides(data, overrides)
    where = "the configuration" if isinstance(config, Mapping) else str(config)
    return cast(RunConfig, validate_as(RunConfig, data, where))
