"""The verbs for people who write plugins: `new-plugin`, `check-plugin`, `hooks`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from draftcore import hookimpl

if TYPE_CHECKING:
    import click


@hookimpl
def commands() -> Sequence[click.Command]:
    from draftcore_sdk.hooks import hooks
    from draftcore_sdk.new_plugin import new_plugin
    from draftcore_sdk.verbs import check_plugin

    return [check_plugin, hooks, new_plugin]
