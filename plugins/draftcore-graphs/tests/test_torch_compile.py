"""`piecewise` and `compiled` with compilers that work on the CPU; on CUDA in test_cuda_backends.

This file comes last: what Dynamo leaves in memory makes every later look at it slow.
"""

from __future__ import annotations

import gc
import shutil
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from draftcore_eval.decode import right_padded
from draftcore_graphs.piecewise import PiecewiseBackend
from draftcore_graphs.prefill import PrefillGraphRunner
from draftcore_graphs.resolve import Phase
from draftcore_sdk.graphs import GraphBackendSuite
from draftcore_sdk.runners import RunnerSuite
from torch import Tensor, nn

from draftcore.contracts.capture import FeatureRequest
from draftcore.contracts.runner import Outputs, ShapeKey
from draftcore.contracts.target import TargetModel
from draftcore.errors import DraftcoreError

PLUGIN = "draftcore_graphs.plugin"


@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a compiler on a CPU")
class TestCompiled(RunnerSuite):
    plugin, name = PLUGIN, "compiled"

    def test_decoding_meanwhile_runs_the_layers_as_they_are(self, target: Any) -> None:
        prefill, request = (
            self.runner("prefill").prefill(target),
            FeatureRequest((1,), True, "float32"),
        )
        given = *right_padded([[1, 2, 3]], "cpu"), request
        before = target.features(*given)
        prefill.features(*given)
        after = target.features(*given)
        assert all(torch.equal(before[name], after[name]) for name in request.names)
        assert not any("forward" in vars(layer) for layer in target.layers)


@pytest.mark.long  # Dynamo compiles anew for every bucket of its twenty cycles
class TestPiecewise(GraphBackendSuite):
    plugin, name, options = PLUGIN, "piecewise", {"compiler": "eager"}


@pytest.fixture(params=["eager", "aot_eager"])
def backend(request: pytest.FixtureRequest) -> PiecewiseBackend:
    return PiecewiseBackend(request.param, None)


def capture(backend: PiecewiseBackend, key: ShapeKey, fn: Callable[[], Outputs]) -> None:
    with backend.capture_session():
        backend.capture_one(key, fn)


def test_a_replay_reads_buffers_and_weights_as_they_are_and_cleanup_lets_go_of_them(
    backend: PiecewiseBackend,
) -> None:
    layer, x, key = nn.Linear(3, 3), torch.ones(2, 3), ShapeKey(2, 3)

    def work(layer: nn.Module) -> Callable[[], Outputs]:
        return lambda: {"y": layer(x).relu(), "none": None}

    capture(backend, key, work(layer))
    with torch.no_grad():
        layer.weight.mul_(-2)
        x.copy_(torch.randn(2, 3))
        found = backend.replay(key)
        assert torch.equal(found["y"], layer(x).relu())
    assert found["none"] is None
    seen = weakref.ref(layer)
    backend.cleanup()
    del layer
    gc.collect()
    assert seen() is None
    with pytest.raises(DraftcoreError, match="there is nothing"):
        backend.replay(key)


def test_every_bucket_is_compiled_in_its_pieces_and_stays_so() -> None:
    """Dynamo would run the ninth version of one function uncompiled, without a word."""
    graphs = list[Any]()

    def keep(module: Any, inputs: Any) -> Any:
        graphs.append(module)
        return module

    backend = PiecewiseBackend(keep, None)  # type: ignore[arg-type]
    buffers = {rows: torch.ones(rows, 4) for rows in range(12, 0, -1)}

    def work(rows: int) -> Callable[[], Tensor]:
        return lambda: buffers[rows] * rows

    def split() -> Tensor:
        y = buffers[1] * 2
        torch._dynamo.graph_break()
        return y + 1

    with backend.capture_session():
        for rows in buffers:
            backend.capture_one(ShapeKey(rows), work(rows))
    assert len(graphs) == 12
    capture(backend, ShapeKey(1, 2), split)
    assert len(graphs) == 14
    for rows, buffer in buffers.items():
        buffer.fill_(2)
        assert backend.replay(ShapeKey(rows)).tolist() == [[2.0 * rows] * 4] * rows
    assert backend.replay(ShapeKey(1, 2)).tolist() == [[5.0] * 4]
    assert len(graphs) == 14


def test_prefill_through_it_gives_the_features_of_eager(target: TargetModel) -> None:
    """fp32 on one device, one mask against another: sums of 48 products, in another order."""
    request = FeatureRequest((0, 2), True, "float32", topk=3, embeddings=True)
    phase = Phase("prefill", "piecewise", rows=(4,), lengths=(8,))
    runner = PrefillGraphRunner(target, phase, PiecewiseBackend("eager", None))
    generator = torch.Generator().manual_seed(0)
    for rows, length in ((3, 7), (1, 8)):
        tokens_BT = torch.randint(1, 200, (rows, length), generator=generator)
        given = tokens_BT, torch.full((rows,), length), request
        found, eager = runner.features(*given), target.features(*given)
        for name in request.names:
            torch.testing.assert_close(found[name], eager[name], rtol=1e-4, atol=1e-4)
    assert runner.counts == {"replayed": 2}
