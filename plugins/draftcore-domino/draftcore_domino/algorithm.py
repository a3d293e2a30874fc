"""Domino: DFlash's backbone and data, with a head that corrects a block from left to right."""

from draftcore_dflash.algorithm import DFlash

from draftcore_domino import served, serving
from draftcore_domino.config import DominoConfig
from draftcore_domino.drafter import DominoDrafter
from draftcore_domino.model import DominoDraft
from draftcore_domino.options import DominoOptions


class Domino(DFlash):
    """Collates, trains and takes prefilled requests over as DFlash does; its draft is another."""

    options: DominoOptions
    shape = DominoConfig
    module = DominoDraft
    decoder = DominoDrafter
    serving = serving
    served = served
