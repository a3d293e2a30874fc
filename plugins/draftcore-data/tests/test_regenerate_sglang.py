"""Answers of an unmodified sglang, which runs on the CPU, are those that transformers generates."""

from __future__ import annotations

import importlib.util
import socket
import sys
from pathlib import Path

import pytest
from draftcore_sdk.serving import Serving
from talking import Cli, chat, require_generated, write_rows

if importlib.util.find_spec("sglang") is None:
    pytest.skip("sglang is not installed", allow_module_level=True)

if importlib.util.find_spec("draftcore_sglang_cpu"):
    from draftcore_sglang_cpu import mend_torchvision

    mend_torchvision()  # before transformers looks for it

sys.path.insert(0, str(Path(__file__).parents[2] / "draftcore-sglang" / "tests"))

from sglang_on_cpu import ARGUMENTS, flags

pytestmark = [pytest.mark.sglang, pytest.mark.smoke]
TOKENS = 12


def test_a_server_answers_every_turn_as_the_target_does(
    cli: Cli, target_folder: Path, tmp_path: Path
) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    where = {"model_path": target_folder, "host": "127.0.0.1", "port": port}
    command = [sys.executable, "-m", "sglang.launch_server", *flags({**where, **ARGUMENTS})]
    source = write_rows(tmp_path / "a.jsonl", *(chat("hi" * i, "", "so?", "") for i in range(1, 9)))
    out = tmp_path / "answers.jsonl"
    with Serving(command, port, tmp_path / "log", SGLANG_PLATFORM="draftcore_cpu") as server:
        asked = ("data", "regenerate", source, "--out", out, "--endpoint", server.url)
        result = cli(*asked, "--temperature", 0, "--max-tokens", TOKENS)
    assert "answers to 8 of 8 rows" in result.stdout
    assert require_generated(out, target_folder, TOKENS) == 8
