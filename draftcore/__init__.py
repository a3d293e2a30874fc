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

FUNCTIONS = (
    "bind", "capture", "export", "load_config", "load_plugins", "open_checkpoint", "open_draft",
    "open_run", "train",
)  # fmt: skip
__all__ = ["__version__", "hookimpl", "hookspec", "RunConfig", *FUNCTIONS]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib_metadata import version  # 40 ms: paid only by who asks

        return version("draftcore")
    if name == "RunConfig":
        return importlib.import_module("draftcore.config").RunConfig
    if name in FUNCTIONS:
        return getattr(importlib.import_module("draftcore.api"), name)
    raise AttributeError(f"module 'draftcore' has no attribute {name!r}")
