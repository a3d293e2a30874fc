"""DFlash2: DFlash's backbone and data, with convolutions in its layers and a selector after them."""

from __future__ import annotations

from draftcore_dflash.algorithm import DFlash
from draftcore_dflash.config import DraftConfig

from draftcore.contracts.algorithm import Draft
from draftcore.contracts.target import TargetSpec
from draftcore_dflash2 import served, serving
from draftcore_dflash2.config import DFlash2Config
from draftcore_dflash2.convolution import reset_convolutions
from draftcore_dflash2.drafter import DFlash2Drafter
from draftcore_dflash2.model import DFlash2Draft
from draftcore_dflash2.options import DFlash2Options


class DFlash2(DFlash):
    """Collates and takes prefilled requests over as DFlash does; its draft is another."""

    options: DFlash2Options
    shape = DFlash2Config
    module = DFlash2Draft
    decoder = DFlash2Drafter
    serving = serving
    served = served

    def fresh(self, target: TargetSpec, config: DraftConfig) -> Draft:
        """Build a draft that computes what DFlash's does: the identity for each convolution."""
        draft = super().fresh(target, config)
        reset_convolutions(draft.module)
        return draft
