"""DSpark: DFlash's backbone and data, with a head that corrects a block and one that judges it."""

from __future__ import annotations

from draftcore_dflash.algorithm import DFlash

from draftcore.contracts.algorithm import Draft, Drafter
from draftcore.contracts.target import TargetModel
from draftcore.errors import UsageError
from draftcore_dspark import served, serving
from draftcore_dspark.config import DSparkConfig
from draftcore_dspark.drafter import DSparkDrafter
from draftcore_dspark.model import DSparkDraft
from draftcore_dspark.options import DSparkOptions


class DSpark(DFlash):
    """Collates and takes prefilled requests over as DFlash does; it learns the target's distribution, too."""

    options: DSparkOptions
    shape = DSparkConfig
    module = DSparkDraft
    decoder = DSparkDrafter
    serving = serving
    served = served

    def drafter(self, draft: Draft, target: TargetModel) -> Drafter:
        drafter, threshold = super().drafter(draft, target), self.options.confidence_threshold
        assert isinstance(drafter, DSparkDrafter)
        if threshold and drafter.draft.confidence_head is None:
            raise UsageError(
                f"confidence_threshold is {threshold}, and the draft has no confidence head\n"
                "  set confidence_threshold=0, or train with enable_confidence_head=true"
            )
        drafter.threshold = threshold
        return drafter
