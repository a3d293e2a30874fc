"""What is refused before a vLLM is started, and without one."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from draftcore_eval.engines import Serving
from draftcore_sdk.suite import opened
from draftcore_sdk.targets import tiny_target

from draftcore.errors import UsageError
from draftcore.files import EXPORT, write_sealed


def test_what_vllm_would_serve_wrongly_or_not_at_all_is_refused_before_it_starts(
    tmp_path: Path,
) -> None:
    target, export = tiny_target(tmp_path / "target"), tmp_path / "export"
    export.mkdir()

    def refused(says: str, algorithm: str = "", config: Any = None, **options: Any) -> None:
        if config is not None:
            (export / "config.json").write_text(json.dumps(config))
        if algorithm:
            write_sealed(export / EXPORT, {"algorithm": {"name": algorithm, "plugin": ""}})
        with pytest.raises(UsageError, match=says):
            opened(
                "draftcore_vllm.plugin",
                "engine",
                "vllm",
                options,
                serving=Serving(target, export, 4, 64),
            )

    refused(f"the draft is not in {re.escape(str(export))}: it holds no config.json")
    refused(r"in the order \[5, 2, 4\]", config={"eagle_aux_hidden_state_layer_ids": [5, 2, 4]})
    refused(
        r"\[1, 1, 3\] \(target_layer_ids", config={"dflash_config": {"target_layer_ids": [1, 1, 3]}}
    )
    refused("does not say what kind of draft", config={"eagle_aux_hidden_state_layer_ids": [2, 4]})
    refused("does not serve a draft of 'domino'", "domino")
    refused("has no vLLM\n  set --option python", "eagle3", python=sys.executable)
    refused("nowhere is no Python", "eagle3", python="nowhere")
