"""What a plugin offers. Apart from the other records, so that listing plugins stays quick."""

from dataclasses import dataclass
from typing import Literal

Kind = Literal["algorithm", "capture", "store", "channel", "graph", "graph-plugin"]


@dataclass(frozen=True)
class Offer:
    """One thing a plugin offers.

    `options` is the dotted path `module:Class` of its options model, imported on selection; '' for
    an offer without options. Capabilities are what others may ask for instead of a name.
    """

    kind: Kind
    name: str
    capabilities: frozenset[str] = frozenset()
    options: str = ""
