"""All that the kit takes of the core beyond what any dist may: plugins loaded and bound, the trainer's parts.

It may change between two versions, so nothing else of the kit reaches there.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from importlib import import_module
from typing import TYPE_CHECKING, Any

import pluggy

from draftcore.cli import main as main
from draftcore.listing import from_here as from_here
from draftcore.plugins.catalog import CORE as CORE
from draftcore.plugins.dists import Plugin as Plugin
from draftcore.plugins.registry import Registry as Registry
from draftcore.plugins.registry import load_plugins as load_plugins
from draftcore.plugins.specs import NEEDED as NEEDED
from draftcore.plugins.specs import SPECS as SPECS
from draftcore.plugins.specs import first_results as first_results
from draftcore.plugins.specs import hooks as hooks
from draftcore.plugins.specs import manager

if TYPE_CHECKING:
    from draftcore.data.skipped import Skipped as Skipped
    from draftcore.plugins.binding import Binding as Binding
    from draftcore.plugins.binding import bind as bind
    from draftcore.plugins.binding import type_error as type_error
    from draftcore.training.checkpoint import trained_tensors as trained_tensors
    from draftcore.training.optimizer import build_optimizer as build_optimizer
    from draftcore.training.optimizer import scale_and_clip as scale_and_clip

# What needs torch, numpy or yaml, which those who only write or list plugins need not wait for.
LATER = {
    "Skipped": "draftcore.data.skipped",
    **dict.fromkeys(("Binding", "bind", "type_error"), "draftcore.plugins.binding"),
    "trained_tensors": "draftcore.training.checkpoint",
    "build_optimizer": "draftcore.training.optimizer",
    "scale_and_clip": "draftcore.training.optimizer",
}


def register(plugins: Iterable[Plugin]) -> pluggy.PluginManager:
    """Make a plugin manager of these plugins alone, in the order of their names."""
    made = manager()
    for plugin in sorted(plugins, key=lambda plugin: plugin.name):
        made.register(plugin.instance, plugin.name)
    return made


@functools.cache
def bring_kinds() -> None:
    """Load the kinds of offers that installed dists bring, as a run of one of them would."""
    load_plugins().bring()


def __getattr__(name: str) -> Any:
    if name in LATER:
        return getattr(import_module(LATER[name]), name)
    raise AttributeError(name)
