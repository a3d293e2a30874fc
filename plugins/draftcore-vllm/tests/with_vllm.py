"""vLLM itself on the CPU, unpatched, in an environment of its own: what it captures, and what it serves.

`nox -s vllm` makes the environment, and names its Python in DRAFTCORE_VLLM_PYTHON. A start takes some
20 seconds of a processor, so there are as few as the claims allow.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, ClassVar

import pytest
from draftcore_hf.target import TransformersTarget
from draftcore_sdk.captures import CaptureSuite, capture_target
from draftcore_sdk.suite import opened
from draftcore_vllm.capture import VllmCapture

PYTHON = os.environ["DRAFTCORE_VLLM_PYTHON"]
PLUGIN = "draftcore_vllm.plugin"
STARTED: dict[str, Any] = {"python": PYTHON, "kv_cache": "64MiB", "max_tokens": 512}


@pytest.fixture(scope="module")
def capturing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmCapture]:
    """A capture of all that vLLM gives, which shares its server with all others of its target."""
    folder = capture_target(tmp_path_factory.mktemp("target"), head_dim=32)
    target = TransformersTarget(str(folder), device="cpu")
    asked = {"target": target, "request": Everything().everything}
    with closing(opened(PLUGIN, "capture", "vllm", STARTED, **asked)) as capture:
        yield capture


class Everything(CaptureSuite):
    plugin, name, options = PLUGIN, "vllm", STARTED

    @pytest.fixture
    def target_folder(self, capturing: VllmCapture) -> Path:
        return Path(capturing.target.path)


class TestStarted(Everything):
    """One server serves all of them."""


class TestServer(Everything):
    """The same server, as any other that runs."""

    name: ClassVar[str] = "vllm-server"

    @pytest.fixture(autouse=True)
    def _running(self, capturing: VllmCapture) -> None:
        server, folder = capturing.source.server.url, str(capturing.source.folder)
        type(self).options = {"server": server, "folder": folder, "in_flight": 4}
