"""Straight from a server into Mooncake: the trainer lends the memory, the server is a writer."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("draftcore_mooncake")

import torch
from capturing import require_features
from draftcore_mooncake.engine import load, package_folder
from draftcore_mooncake.master import Master
from draftcore_mooncake.store import MooncakeStore
from draftcore_sdk.captures import ROWS, Reference, batch
from draftcore_sdk.loopback import only_loopback
from draftcore_sdk.serving import Serving

pytestmark = pytest.mark.sglang


def test_a_server_puts_into_mooncake_what_transformers_computes(
    start_server: Callable[..., Serving], open_capture: Callable[..., Any], served_folder: Path
) -> None:
    with only_loopback():
        load()
        master = Master(package_folder())
        uri = f"mooncake://{master.address}/served"
        trainer = MooncakeStore.open(f"{uri}?max_bytes={64 << 20}")
        server = start_server(
            DRAFTCORE_SINK=f"{uri}?patience=5", DRAFTCORE_LAYERS="0,1,2,3", MC_LOG_LEVEL="ERROR"
        )
        capture = open_capture(server, patience=60, self_test=True)
        assert capture.reaches(trainer)
        ids = tuple(f"{row:024x}" for row in range(len(ROWS)))
        text = [{"token_ids": torch.tensor(row)} for row in ROWS]
        asked = replace(batch(*range(len(ROWS))), ids=ids)
        refs = capture.deliver(asked, text, "made so", trainer)
        for ref, tokens in zip(refs, ROWS, strict=True):
            with trainer.get(ref) as handle:
                assert handle.tensors["token_ids"].tolist() == tokens
                require_features(handle.tensors, tokens, Reference(served_folder))
        trainer.free(refs)
        assert trainer.lookup(ids) == {}
        capture.close()
        server.kill()
        trainer.close()
        master.stop()
