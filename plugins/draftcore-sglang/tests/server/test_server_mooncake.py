"""Straight from a server into Mooncake: the trainer lends the memory, the server is a writer."""

from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("draftcore_mooncake")

import torch
from draftcore_mooncake.engine import load, package_folder
from draftcore_mooncake.master import Master
from draftcore_mooncake.store import MooncakeStore
from draftcore_sdk.captures import ALL, LAYERS, ROWS, Reference
from draftcore_sdk.loopback import only_loopback
from draftcore_sdk.serving import Serving
from draftcore_sglang.options import ServerOptions
from draftcore_sglang.remote import ServerCapture

from draftcore.contracts.capture import CaptureBatch
from draftcore.contracts.target import TargetSpec

pytestmark = pytest.mark.sglang


def test_a_server_puts_into_mooncake_what_transformers_computes(
    start_server: Callable[..., Serving], target: TargetSpec, served_folder: Path
) -> None:
    """Largest difference to transformers, relative to the largest number; below 1e-6 in fp32."""
    with only_loopback():
        load()
        master = Master(package_folder())
        uri = f"mooncake://{master.address}/served"
        trainer = MooncakeStore.open(f"{uri}?max_bytes={64 << 20}")
        server = start_server(
            DRAFTCORE_SINK=f"{uri}?patience=5", DRAFTCORE_LAYERS="0,1,2,3", MC_LOG_LEVEL="ERROR"
        )
        capture = ServerCapture(
            target, ALL, ServerOptions(servers=(server.url,), patience=60, self_test=True)
        )
        ids = tuple(f"{row:024x}" for row in range(len(ROWS)))
        batch = CaptureBatch(0, tuple(range(len(ROWS))), ids, tuple(ROWS))
        text = [{"token_ids": torch.tensor(row)} for row in ROWS]
        assert capture.reaches(trainer)
        refs = capture.deliver(batch, text, "made so", trainer)
        reference = Reference(served_folder)
        for ref, tokens in zip(refs, ROWS, strict=True):
            layers = [*reference.layers(tokens), reference.before_norm(tokens)]
            expected = {f"hidden.{k}": layers[k] for k in range(LAYERS)}
            expected["last_hidden"] = reference.after_norm(tokens)
            with trainer.get(ref) as handle:
                assert handle.tensors["token_ids"].tolist() == tokens
                for name, expected_TH in expected.items():
                    gap = (handle.tensors[name] - expected_TH).abs().max()
                    assert gap < 1e-5 * expected_TH.abs().max(), name
        trainer.free(refs)
        assert trainer.lookup(ids) == {}
        capture.close()
        server.kill()
        trainer.close()
        master.stop()
