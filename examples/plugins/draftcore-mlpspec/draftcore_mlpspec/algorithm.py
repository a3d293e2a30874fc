"""What a run asks of the two algorithms: each method answers the hook of its name."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from draftcore_nn import batches, serving
from draftcore_nn.target import dtype_name

from draftcore.contracts.algorithm import (
    Algorithm,
    DataSummary,
    Draft,
    DraftBatch,
    Drafter,
    Sample,
    StepContext,
    StepOutput,
)
from draftcore.contracts.capture import FeatureRequest
from draftcore_mlpspec.drafter import ChainDrafter, TreeDrafter
from draftcore_mlpspec.model import MlpSpecDraft, Shape, build

if TYPE_CHECKING:
    from draftcore_nn.served import ServedDraft

    from draftcore.contracts.target import TargetModel, TargetSpec
    from draftcore_mlpspec.options import MlpSpecOptions, MlpSpecTreeOptions

ARCHITECTURE = "MLPSpeculatorPreTrainedModel"
# Fields of a shape, by their names in config.json.
FIELDS = {
    "emb_dim": "hidden_size",
    "vocab_size": "vocab_size",
    "n_predict": "num_heads",
    "inner_dim": "inner_size",
    "tie_weights": "tied",
    "scale_input": "scale_input",
}


class MlpSpec(Algorithm):
    """The algorithm `mlpspec`, which drafts a chain."""

    options: MlpSpecOptions

    def feature_request(self, target: TargetSpec) -> FeatureRequest:
        return FeatureRequest(layers=(), last_hidden=True, dtype=dtype_name(target.dtype))

    def build_draft(self, target: TargetSpec, data: DataSummary) -> Draft:
        options, width = self.options, int(target.text_config.hidden_size)
        sizes = width, target.vocab_size, options.num_heads, options.inner_size or width
        return build(Shape(*sizes, options.tied, options.scale_input))

    def collate(self, samples: Sequence[Sample]) -> DraftBatch:
        return batches.collate(samples)

    def forward_loss(self, draft: Draft, batch: DraftBatch, context: StepContext) -> StepOutput:
        output: StepOutput = draft.module(batch)
        return output

    def drafter(self, draft: Draft, target: TargetModel) -> Drafter:
        assert isinstance(draft.module, MlpSpecDraft)
        return ChainDrafter(draft.module, self.feature_request(target.spec))

    def export_draft(self, draft: Draft, folder: Path, layout: str) -> None:
        """Write what vLLM reads as `mlp_speculator`, in fp32."""
        config = {theirs: draft.config[ours] for theirs, ours in FIELDS.items()}
        config |= {"architectures": [ARCHITECTURE], "model_type": "mlp_speculator"}
        # vLLM wants one per head, and drafts one token of each.
        config["top_k_tokens_per_head"] = [1] * draft.config["num_heads"]
        serving.write_export(folder, layout, config, dict(draft.module.named_parameters()))

    def import_draft(self, folder: Path, target: TargetSpec) -> Draft:
        """Read such a draft, our own or a published one."""
        config = serving.read_config(folder)
        serving.require_architecture(config, folder, ARCHITECTURE)
        shape = {ours: serving.required(config, name, folder) for name, ours in FIELDS.items()}
        shape["inner_size"] = shape["inner_size"] or shape["hidden_size"]
        serving.require_target(shape, target, folder)
        serving.require_options(shape, self.options, folder)
        draft = build(Shape(**shape))
        serving.fill(draft.module, serving.read_tensors(folder, {"speculator.": ""}), folder)
        return draft

    def read_export(self, folder: Path, server: str) -> ServedDraft:
        from draftcore_mlpspec import served  # for `verify` alone

        return served.read(folder, server)


class MlpSpecTree(MlpSpec):
    """The algorithm `mlpspec-tree`: the same draft, which drafts a tree."""

    options: MlpSpecTreeOptions

    def drafter(self, draft: Draft, target: TargetModel) -> Drafter:
        assert isinstance(draft.module, MlpSpecDraft)
        rest = draft.module.shape.num_heads - len(self.options.branches)
        branches = [*self.options.branches, *[1] * rest]
        return TreeDrafter(draft.module, self.feature_request(target.spec), branches)
