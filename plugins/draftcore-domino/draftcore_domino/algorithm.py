"""Domino: DFlash's backbone and data, with a head that corrects a block from left to right."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from draftcore_dflash import config as dflash
from draftcore_dflash.algorithm import DFlash
from draftcore_nn.serving import require_tools
from draftcore_nn.target import dtype_name

from draftcore.contracts.algorithm import DataSummary, Draft, Drafter
from draftcore.contracts.target import TargetModel, TargetSpec
from draftcore_domino import model, serving
from draftcore_domino.config import DominoConfig
from draftcore_domino.drafter import DominoDrafter
from draftcore_domino.options import DominoOptions

if TYPE_CHECKING:
    from draftcore_domino.served import ServedDomino


class Domino(DFlash):
    """Collates, trains and takes prefilled requests over as DFlash does; its draft is another."""

    options: DominoOptions
    serving = serving

    def build_draft(self, target: TargetSpec, data: DataSummary) -> Draft:
        options = self.options
        if options.warm_start is not None:
            return self.import_draft(Path(options.warm_start), target)
        shape = DominoConfig(
            **dflash.shape_from_target(target, options),
            gru_hidden_dim=options.gru_hidden_dim,
            emb_dim=options.emb_dim,
            shift_label=options.shift_label,
        )
        return model.build(target, shape, options)

    def drafter(self, draft: Draft, target: TargetModel) -> Drafter:
        assert isinstance(draft.module, model.DominoDraft)
        return DominoDrafter(draft.module, self.options.num_drafts, dtype_name(target.dtype))

    def read_export(self, folder: Path, server: str) -> ServedDomino:
        require_tools(server)
        from draftcore_domino import served

        return served.read(folder, server)
