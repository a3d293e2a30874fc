"""The contract between the core and its plugins: one class, every hook a typed method.

A plugin is a module named by an entry point of the group `draftcore`; it implements any of these
with `@hookimpl`, takes the arguments it needs (pluggy matches them by name), and imports neither
torch nor pydantic at import time. `First result` hooks have exactly one owner in a run, chosen by
the run's configuration; all others are called on every selected plugin. Authors who want their
implementations type-checked subclass `Specs` and register an instance.

Hooks grow by new keyword arguments with defaults; an argument or hook that goes away warns first.
"""

# mypy: disable-error-code="empty-body"
from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from draftcore import hookspec

if TYPE_CHECKING:
    from pathlib import Path

    import click
    import torch
    from torch import Tensor

    from draftcore.contracts.algorithm import (
        DataSummary,
        Draft,
        DraftBatch,
        Drafter,
        Sample,
        StepContext,
        StepOutput,
        Stop,
    )
    from draftcore.contracts.capture import Capture, FeatureRequest
    from draftcore.contracts.offers import Offer
    from draftcore.contracts.run import BatchSource, Evaluation, OpenRun, Ranks, RunSamples
    from draftcore.contracts.runner import GraphBackend, Runner, RunnerContext
    from draftcore.contracts.serving import DisaggBatch, DraftInput, RowPart
    from draftcore.contracts.store import FeatureStore
    from draftcore.contracts.target import TargetModel, TargetSpec


class Specs:
    """Every hook. Bodies are empty: a spec is documentation and a signature."""

    # ------------------------------------------------------------ what a plugin is

    @hookspec
    def describe(self) -> Sequence[Offer]:
        """List what the plugin offers. Without it: wrappers and observers."""

    @hookspec
    def commands(self) -> Sequence[click.Command]:
        """Add verbs to the command line."""

    # ------------------------------------------------------------ infrastructure

    @hookspec(firstresult=True)
    def target(self, name: str, options: Any) -> TargetSpec:
        """Open the target `name`: its config now, its weights when they are asked for. First result."""

    @hookspec(firstresult=True)
    def samples(self, name: str, run: OpenRun, options: Any) -> RunSamples:
        """Open the rows of a run, to train on, held out, and to ask from. First result."""

    @hookspec(firstresult=True)
    def batches(self, name: str, run: OpenRun) -> BatchSource:
        """Open what brings batches to ranks where other processes capture. First result."""

    @hookspec(firstresult=True)
    def evaluation(self, name: str, run: OpenRun, options: Any) -> Evaluation:
        """Open what measures drafts, by the verb `eval` and in training. First result."""

    @hookspec(firstresult=True)
    def capture(
        self, name: str, target: TargetSpec, request: FeatureRequest, options: Any
    ) -> Capture:
        """Open the capture backend `name`. First result."""

    @hookspec(firstresult=True)
    def feature_store(self, name: str, uri: str) -> FeatureStore:
        """Open the store at `uri`, whose scheme is `name` and whose query its options. First result."""

    @hookspec(firstresult=True)
    def launch(
        self, config: Any, command: Sequence[str], arguments: Sequence[str], bind: Any
    ) -> str:
        """Start the processes of a run and keep them alive; return how training ended. First result.

        `config` is the run's, `command` draftcore's and `arguments` those of its verb, none where no file
        has the configuration; `bind` reaches other offers by kind, name and options.
        """

    @hookspec(firstresult=True)
    def ranks(self, name: str, config: Any) -> Ranks:
        """Join the ranks that the environment speaks of; `config` is the section train. First result."""

    @hookspec(firstresult=True)
    def runner(self, name: str, context: RunnerContext, options: Any) -> Runner:
        """Open the runner `name`, which runs target or draft in one phase. First result."""

    @hookspec(firstresult=True)
    def graph_backend(self, name: str, options: Any) -> GraphBackend:
        """Open the graph mechanism `name`. First result."""

    # ------------------------------------------------------------ an algorithm, in training

    @hookspec(firstresult=True)
    def feature_request(self, target: TargetSpec, options: Any) -> FeatureRequest:
        """Say which target features training needs. Called before the target's weights are read."""

    @hookspec(firstresult=True)
    def build_draft(self, target: TargetSpec, data: DataSummary, options: Any) -> Draft:
        """Build the draft in fp32 on the CPU, initialised; the same seed gives the same bits."""

    @hookspec(firstresult=True)
    def collate(self, samples: Sequence[Sample], options: Any) -> DraftBatch:
        """Make a batch; tokens and masks lie on the CPU, features on the device that trains.

        The trainer moves what is made to the device. Padding must not change the loss.
        """

    @hookspec(firstresult=True)
    def forward_loss(
        self, draft: Draft, batch: DraftBatch, context: StepContext, options: Any
    ) -> StepOutput:
        """Run the draft and return its loss as numerator and denominator, or as several such terms.

        An all-masked batch gives numerator 0, never nan. The trainer divides once, over the
        accumulation window and all ranks. Also called for held-out samples: `context.training`.
        """

    @hookspec(firstresult=True)
    def optimizer(
        self, draft: Draft, lr: float, weight_decay: float, betas: tuple[float, float], options: Any
    ) -> torch.optim.Optimizer | None:
        """Build the optimizer of all that `draft.parameter_groups` hold. Without it: AdamW.

        A group's `lr` is its peak, which the schedule scales; `lr` is the run's. Its state is in
        checkpoints: what it keeps of a weight, and what it changes in a group.
        """

    @hookspec(firstresult=True)
    def schedule(
        self, step: int, total_steps: int, warmup_ratio: float, options: Any
    ) -> float | None:
        """Return the learning rate of a step as a factor of the peak. Without it: train.schedule."""

    # ------------------------------------------------------------ an algorithm, being served

    @hookspec(firstresult=True)
    def disagg_row(self, options: Any) -> Sequence[RowPart]:
        """Name what a prefill server must send beside the last token. Without it: nothing."""

    @hookspec(firstresult=True)
    def build_disagg_draft_input(
        self, batch: DisaggBatch, last_tokens: Tensor, future_map: Any, options: Any
    ) -> DraftInput:
        """Build the first draft input on the decode side of prefill/decode disaggregation.

        Called with keywords, after the core has checked every request against `disagg_row`. An
        empty batch returns an empty, well-typed input. `future_map` is for reading: the core
        publishes and stashes, once the answer has been checked.
        """

    # ------------------------------------------------------------ an algorithm, after training

    @hookspec(firstresult=True)
    def drafter(self, draft: Draft, target: TargetModel, options: Any) -> Drafter:
        """Return the reference decoder that `draftcore eval` decodes with."""

    @hookspec(firstresult=True)
    def export_draft(self, draft: Draft, folder: Path, layout: str, options: Any) -> None:
        """Write the draft into an empty folder in the serving layout `layout`."""

    @hookspec(firstresult=True)
    def import_draft(self, folder: Path, target: TargetSpec, options: Any) -> Draft:
        """Read a draft from a serving layout, our own exports or published ones."""

    @hookspec(firstresult=True)
    def read_export(self, folder: Path, server: str, options: Any) -> Any:
        """Read an export by the conventions of `server`, sharing no code with `export_draft`."""

    # ------------------------------------------------------------ observers

    @hookspec
    def run_started(self, run: Path, config: Mapping[str, Any], total_steps: int) -> None:
        """A training run starts or resumes; `config` is the resolved configuration."""

    @hookspec
    def gradients_ready(
        self, step: int, gradients: Mapping[str, Tensor], draft: str = ""
    ) -> Mapping[str, float] | None:
        """A step's gradients are there, summed and divided, and not clipped yet: copies, by weight.

        What is returned enters the step's metrics. `draft` is the label of the draft here and below,
        empty in a run of a single one.
        """

    @hookspec
    def step_finished(
        self, step: int, metrics: Mapping[str, float], draft: str = ""
    ) -> Stop | None:
        """An optimizer step is done. `metrics` holds loss, lr, gradient norm and the algorithm's own.

        A `Stop` ends the draft's training after this step, here and in `evaluated`.
        """

    @hookspec
    def eval_metrics(
        self, draft: Draft, report: Mapping[str, Any], options: Any
    ) -> Mapping[str, float] | None:
        """Add figures to an evaluation's report, in training and in `draftcore eval`.

        The algorithm is called as well; here `draft` is the draft itself.
        """

    @hookspec
    def evaluated(self, step: int, report: Mapping[str, Any], draft: str = "") -> Stop | None:
        """An evaluation is done, during training or by `draftcore eval`."""

    @hookspec
    def checkpoint_saved(self, step: int, folder: Path, draft: str = "") -> None:
        """A checkpoint is durable; training may be some steps further."""

    @hookspec
    def run_finished(self, run: Path, step: int, reason: str) -> None:
        """Training ended: `reason` is `complete`, `stopped`, `interrupted` or `failed`."""
