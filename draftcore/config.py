"""A run's configuration: one YAML file plus dotted overrides, validated before anything starts.

The models below are the reference of every key. Plugin options stay plain mappings here and are
validated by the plugin's own model when it is bound. Importing this module costs pydantic's
70 ms, so the command line does it only for verbs that read a configuration.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from draftcore.errors import UsageError
from draftcore.options import apply_overrides, explain, read_yaml
from draftcore.uris import holds_secret

Dtype = Literal["auto", "float32", "bfloat16", "float16"]
Label = Annotated[str, Field(pattern=r"^\w[\w.-]*$")]  # a folder in the run's, beside its `data`
GONE = {  # keys of earlier versions, and what replaced them
    "graphs": "now it is runner.prefill and runner.decode: {name: graphs, options: {backend: auto}}",
    "capture.batch": "rows are captured and trained on in the same batches, of train.batch rows",
    "train.window": "nothing replaces it: train.prefetch says how many batches are held",
    "train.overlap": "nothing replaces it, but topology.producers captures beside training",
}


FREE = "free"
T = TypeVar("T")
Free = Annotated[T, FREE]  # of a field: a resumed run may change it


class Section(BaseModel):
    """Every section refuses unknown keys and never changes once read."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class TargetConfig(Section):
    path: Free[str] = Field(description="a folder or a Hugging Face model id")
    revision: Free[str | None] = Field(None, description="branch, tag or commit of a model id")
    dtype: Dtype = Field("auto", description="compute type; auto is what the target's config says")
    device: Free[str] = Field("auto", description="cpu, cuda, cuda:1; auto: cuda if there is one")


class DataConfig(Section):
    train: str | None = Field(None, description="JSONL of conversations, or hf:NAME?split=train")
    eval: str | None = Field(None, description="held-out conversations, in the same forms")
    max_length: int = Field(2048, ge=2, description="longest sample, in tokens")
    last_turn_only: bool = Field(False, description="learn the last assistant turn only")
    bad_rows: Literal["skip", "refuse"] = Field("skip", description="malformed rows")
    overlong: Literal["skip", "truncate", "refuse"] = Field("skip", description="rows too long")
    limit: int | None = Field(None, ge=1, description="read this many training rows at most")
    max_skipped: float = Field(0.01, ge=0, le=1, description="share of rows, or one, that may fail")


class Choice(Section):
    name: str = Field(description="the offer's name, see `draftcore list-plugins`")
    plugin: Free[str] = Field("", description="the plugin, where several offer this name")
    options: dict[str, Any] = Field(default_factory=dict, description="validated by the plugin")


class CaptureConfig(Choice):
    name: str = Field("hf", description="the capture backend")
    options: Free[dict[str, Any]] = Field({}, description="the plugin's; some change features")
    dtype: Dtype = Field("auto", description="stored type; auto is the target's compute type")


class TuningConfig(Section):
    """How one draft is optimised: what drafts of one run may set differently."""

    lr: float | None = Field(
        None, gt=0, allow_inf_nan=False, description="peak rate; the algorithm's default if unset"
    )
    schedule: Literal["cosine", "constant"] = "cosine"
    warmup_ratio: float | None = Field(None, ge=0, lt=1, description="algorithm's default if unset")
    clip: float | None = Field(None, gt=0, description="gradient norm; algorithm's if unset")
    weight_decay: float = Field(0.0, ge=0)
    betas: tuple[float, float] = (0.9, 0.999)
    precision: Literal["fp32", "bf16"] = Field("fp32", description="compute type over fp32 masters")


class TrainConfig(TuningConfig):
    epochs: Free[int] = Field(1, ge=1)
    max_steps: Free[int | None] = Field(None, ge=1, description="stop after this many steps")
    batch: int = Field(8, ge=1, description="rows captured and trained together")
    accumulate: Free[int | None] = Field(
        None, ge=1, description="batches per step, over all ranks; unset: ranks of the first start"
    )
    prefetch: Free[int | None] = Field(
        None, ge=1, description="batches ready ahead, per rank; unset: 2, or two per producer"
    )
    shard: Free[bool] = Field(False, description="shard drafts over ranks, by FSDP2")
    device: Free[str] = Field("auto", description="as target.device")
    seed: int = Field(0, ge=0)
    log_every: Free[int] = Field(10, ge=1, description="steps per line of metrics.jsonl")
    checkpoint_every: Free[int] = Field(500, ge=1, description="steps between checkpoints")
    keep_checkpoints: Free[int] = Field(2, ge=1)
    eval_every: Free[int | None] = Field(None, ge=1, description="steps between evaluations")
    eval_samples: Free[int] = Field(
        64, ge=1, description="samples whose loss is measured each time"
    )
    eval_prompts: Free[int] = Field(8, ge=0, description="prompts decoded each time; 0 is none")
    rank_timeout: Free[float] = Field(300, gt=0, description="seconds of silence that end a rank")


class DraftConfig(Section):
    algorithm: Choice
    train: TuningConfig = Field(TuningConfig(), description="what differs from the run's `train`")


class EvalConfig(Section):
    prompts: int | None = Field(None, ge=1, description="decode this many eval prompts at most")
    batch: int = Field(32, ge=1, description="prompts decoded together")
    max_new_tokens: int = Field(128, ge=2)
    temperature: float = Field(0.0, ge=0, description="0 is greedy and checked against the target")
    seed: int = Field(0, ge=0)
    tie_bound: float | None = Field(None, gt=0, description="top-2 logit gap that is a tie")


class TopologyConfig(Section):
    """The processes of a run on this machine; `--role` starts single ones, on any machine."""

    producers: int = Field(0, ge=0, description="that capture for the trainer; 0: it does itself")
    ranks: int = Field(1, ge=1, description="processes of the trainer")
    restarts: int = Field(3, ge=0, description="times that a process which dies is started again")


class RunnerConfig(Section):
    """Who runs the models: `prefill` is the target's forward in capture, `decode` both in decoding."""

    prefill: Choice = Choice(name="eager")
    decode: Free[Choice] = Choice(name="eager")


class RunConfig(Section):
    run: Free[Path] = Field(description="folder of the run: checkpoints, metrics, reports")
    target: TargetConfig
    data: Free[DataConfig] = DataConfig()
    algorithm: Choice | None = Field(None, description="the draft to train")
    drafts: Free[dict[Label, DraftConfig]] = Field({}, description="or several, from one capture")
    capture: CaptureConfig = CaptureConfig()
    store: Free[str] = Field(
        "auto", description="URI, e.g. file:FOLDER; auto: only where needed, shared"
    )
    channel: Free[str] = Field(
        "tcp", description="URI; tcp://HOST:PORT for producers on other machines"
    )
    topology: Free[TopologyConfig] = TopologyConfig()
    plugins: Free[tuple[str, ...]] = Field(
        (), description="wrappers and observers to select, by name"
    )
    train: TrainConfig = TrainConfig()
    eval: Free[EvalConfig] = EvalConfig()
    runner: RunnerConfig = RunnerConfig()

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if (self.algorithm is None) == (not self.drafts):
            raise ValueError("set either algorithm, for one draft, or drafts, for several by label")
        if "data" in self.drafts:
            raise ValueError("no draft can be labelled 'data', as the run's own folder is")
        if self.train.eval_every and self.data.eval is None:
            raise ValueError("train.eval_every needs held-out conversations: set data.eval")
        for key in ("store", "channel"):
            if holds_secret(getattr(self, key)):  # not repeated: what is refused here is shown
                problem = "its URI holds a user name or a password, and URIs are shown and stored"
                remedy = "set it in the environment: the plugin's README names the variable"
                raise ValueError(f"{key}: {problem}\n    {remedy}")
        return self


def load_config(path: Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Read a run's YAML and apply overrides in order.

    Raises UsageError for a missing or malformed file, an override without `=`, and every key or
    value that the models above refuse, with the nearest known key.
    """
    data = read_yaml(path)
    apply_overrides(data, overrides)
    try:
        return RunConfig.model_validate(data)
    except ValidationError as error:
        raise UsageError(explain(error, RunConfig, str(path), GONE)) from None
