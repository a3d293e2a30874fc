"""draftcore: train draft models for speculative decoding; every method is a plugin.

A plugin author needs `hookimpl` from here, and what a hook is given and returns from
`draftcore.contracts`. What is heavy is imported where it is used.
From Python the verbs are functions: `draftcore.train("run.yaml")`, see `draftcore.api`.
"""

import importlib
from typing import Any

import pluggy

hookspec = pluggy.HookspecMarker("draftcore")
hookimpl = pluggy.HookimplMarker("draftcore")

FUNCTIONS = {
    **dict.fromkeys(("capture", "export", "open_run", "train"), "api"),
    "bind": "plugins.binding",
    "install_line": "plugins.dists",
    **dict.fromkeys(("RunConfig", "load_config"), "config"),
    "load_plugins": "plugins.registry",
    "open_checkpoint": "training.checkpoint",
    "open_draft": "drafts",
    "Plan": "data.plan",
}
__all__ = ["__version__", "hookimpl", "hookspec", *FUNCTIONS]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib_metadata import version  # 40 ms: paid only by who asks

        return version("draftcore")
    if name in FUNCTIONS:
        return getattr(importlib.import_module(f"draftcore.{FUNCTIONS[name]}"), name)
    raise AttributeError(f"module 'draftcore' has no attribute {name!r}")
