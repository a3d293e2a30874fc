"""Stands in until the dist's own plugin is merged: it offers nothing."""

from collections.abc import Sequence

from draftcore import hookimpl
from draftcore.offers import Offer


@hookimpl
def describe() -> Sequence[Offer]:
    return []
