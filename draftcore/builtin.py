"""The plugin that draftcore brings along: the verbs that do its work.

It registers as third parties do, by an entry point and through hooks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from draftcore import hookimpl

if TYPE_CHECKING:
    import click


@hookimpl
def commands() -> Sequence[click.Command]:
    from draftcore.verbs import capture, export, train

    return [capture, train, export]
