"""A real run with the plugin under test: a tiny target, and the small algorithm that `new-plugin` writes."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

import draftcore
from draftcore.contracts.run import OpenRun
from draftcore_sdk.internals import Registry, load_plugins
from draftcore_sdk.new_plugin import render, write
from draftcore_sdk.suite import registry_of

SMALL = "wrapped-chain"


def small_algorithm(folder: Path) -> Path:
    """Write the algorithm that `new-plugin` writes, once; return a loose plugin that offers it."""
    file, package = folder / "small_chain.py", folder / f"draftcore-{SMALL}"
    if not file.exists():
        write(package, render(SMALL, "algorithm"))
        file.write_text("from draftcore_wrapped_chain.plugin import *\n")
    for place in (str(folder), str(package)):
        if place not in sys.path:
            sys.path.append(place)
    return file


@contextmanager
def open_run(base: Path, folder: Path, plugin: str, **sections: Any) -> Iterator[OpenRun]:
    """Open a run in a folder with a plugin, installed or not; `base` is that of all tests."""
    registry = load_plugins(files=[small_algorithm(base)])
    registry = Registry([*registry.installed, *registry_of(plugin).installed])
    folder.mkdir(parents=True, exist_ok=True)
    config = {"run": str(folder / "run"), "algorithm": {"name": SMALL}, **sections}
    config["train"] = {"batch": 2, "device": "cpu", "log_every": 1, **sections.get("train", {})}
    file = folder / "run.yaml"
    file.write_text(yaml.safe_dump(config))
    with draftcore.open_run(file, registry=registry) as run:
        yield run
