"""Built-in plugin `authors`: the verbs for people who write plugins."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from draftcore import hookimpl

if TYPE_CHECKING:
    import click


@hookimpl
def commands() -> Sequence[click.Command]:
    from draftcore.checking import check_plugin
    from draftcore.scaffold import new_plugin

    return [check_plugin, new_plugin]
