"""What every graph plugin must do. See `draftcore_sdk` for how to use it.

In prefill the features of a small target are captured through the plugin and without it. All else
is tried over buffers made here, in each phase that the plugin's capabilities leave it, recorded
and replayed on the CPU.

Shape letters: B rows, T tokens, K drafts.
"""

from __future__ import annotations

import gc
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from draftcore_graphs.graph_plugin import GraphPlugin, Work
from draftcore_graphs.prefill import PrefillGraphRunner
from draftcore_graphs.recording import RecordingBackend, require_no_wait
from draftcore_graphs.resolve import Phase
from draftcore_hf.target import TransformersModel, TransformersTarget
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from draftcore.contracts.capture import FeatureRequest
from draftcore.contracts.runner import Batch, Outputs, ShapeKey
from draftcore.contracts.target import TargetModel
from draftcore_sdk.graphs import REPLAYS, copied, require_same
from draftcore_sdk.memory import CYCLES, differing, watched_bytes
from draftcore_sdk.suite import Suite
from draftcore_sdk.targets import tiny_target

PHASES = ("prefill", "decode")
ROWS, LENGTHS = (1, 2, 3), (1, 6, 16)
LARGE, SMALL = ShapeKey(3, 16), ShapeKey(2, 6)
# Relative to the largest number of a feature, in fp32: sums of another order.
ROUNDING = 1e-5


class GraphPluginSuite(Suite):
    """The behaviour of a graph plugin, opened through its hook."""

    @pytest.fixture(params=PHASES)
    def phase(self, request: pytest.FixtureRequest) -> str:
        self.require(request.param)
        return str(request.param)

    def require(self, phase: str) -> None:
        if phase not in (self.said("graph-plugin", "phase:") or PHASES):
            pytest.skip(f"its capabilities leave out {phase}")

    @pytest.fixture
    def opened(self) -> GraphPlugin:
        found: GraphPlugin = self.open("graph-plugin")
        return found

    @pytest.fixture
    def bench(self, opened: GraphPlugin, phase: str) -> Bench:
        """The plugin over buckets of two sizes, both captured, the larger first."""
        return Bench(opened, phase)

    @pytest.fixture
    def target(self, tmp_path: Path) -> TargetModel:
        folder = tiny_target(tmp_path, num_hidden_layers=2)
        return TransformersModel(TransformersTarget(str(folder), device="cpu"))

    def test_its_capabilities_name_phases_that_there_are(self) -> None:
        named = set(self.said("graph-plugin", "phase:"))
        assert named <= set(PHASES), f"there are {', '.join(PHASES)}"

    def test_it_changes_nothing_in_the_batch(self, bench: Bench) -> None:
        for seed, key in enumerate((LARGE, SMALL)):
            batch = bench.fill(key, seed)
            for value in batch.values():
                value[1:] = 0  # rows of padding
            before = {name: value.clone() for name, value in batch.items()}
            bench.opened.on_replay(key, batch)
            bench.opened.on_capture(key, batch, bench.work)
            for name, value in before.items():
                same = torch.equal(batch[name], value)
                assert same, f"it changed {name}: {differing(batch[name], value)}"

    def test_an_error_of_the_work_comes_through(self, bench: Bench) -> None:
        def fail(batch: Batch, **parts: Any) -> Outputs:
            raise LookupError("on purpose")

        batch = bench.fill(LARGE, 1)
        with pytest.raises(LookupError, match="on purpose"):
            bench.opened.on_capture(LARGE, batch, fail)(batch)
        bench.capture(LARGE)
        bench.require_replays(LARGE, 2)

    def test_a_replay_gives_what_the_work_would_on_other_contents(self, bench: Bench) -> None:
        """The type, the keys, dtypes, shapes and every bit, in buckets of two sizes in turn."""
        for seed, key in enumerate((SMALL, LARGE, SMALL, SMALL, LARGE)):
            bench.require_replays(key, seed)

    def test_features_through_it_are_those_without_it(
        self, opened: GraphPlugin, target: TargetModel
    ) -> None:
        """Of every row and token, in buckets of one row and more, with rows of padding and without."""
        self.require("prefill")
        request = FeatureRequest((0,), True, "float32")
        given = Phase("prefill", rows=ROWS, lengths=LENGTHS)
        through = PrefillGraphRunner(target, given, RecordingBackend(), [opened])
        without = PrefillGraphRunner(target, given, RecordingBackend())
        generator = torch.Generator().manual_seed(0)
        for rows in (*ROWS, *ROWS):
            for length in (1, 2, 5, 6, 11, 16):
                tokens_BT = torch.randint(1, 200, (rows, length), generator=generator)
                lengths_B = torch.full((rows,), length)
                found = through.features(tokens_BT, lengths_B, request)
                right = without.features(tokens_BT, lengths_B, request)
                assert through.masks_differ is False, "they differ: through it the runner refuses"
                for name, value in right.items():
                    shape = found[name].shape
                    assert shape == value.shape, f"{name} of {rows} x {length} tokens is {shape}"
                    gap = float((found[name] - value).abs().max() / value.abs().max())
                    assert gap <= ROUNDING, f"{name} of {rows} x {length} differs by {gap:.2g}"
        assert through.counts.keys() == {"replayed"}

    def test_decoding_does_the_work_once(self, opened: GraphPlugin) -> None:
        """It moves rows on in the buffers: done twice, it is wrong."""
        self.require("decode")
        bench = Bench(opened, "decode")
        batch = bench.fill(LARGE, 1)
        before = batch["lengths_B"].clone()
        bench.replay(LARGE)
        assert torch.equal(batch["lengths_B"], before + 1)

    def test_its_buffers_stay_where_they_were_at_capture(self, bench: Bench) -> None:
        """A graph reads them there."""
        before = {tensor.data_ptr() for tensor in tensors_of(bench.opened)}
        for seed, key in enumerate((SMALL, LARGE, SMALL)):
            bench.opened.on_replay(key, bench.fill(key, seed))
            after = {tensor.data_ptr() for tensor in tensors_of(bench.opened)}
            assert after == before, "on_replay put tensors in the place of others"

    def test_what_rows_of_padding_hold_does_not_reach_its_buffers(self, bench: Bench) -> None:
        """`live_B` says which rows those are; the phase puts into them what it likes."""
        seen, before = [], [(tensor, tensor.clone()) for tensor in tensors_of(bench.opened)]
        for junk in (0, 5):
            for tensor, value in before:
                tensor.copy_(value)  # it may sum up
            batch = bench.fill(LARGE, 1)
            batch["live_B"][2:] = False
            for name, value in batch.items():
                if name != "live_B" and value.ndim and len(value) == LARGE.rows:
                    value[2:] = junk
            bench.opened.on_replay(LARGE, batch)
            seen.append([tensor.clone() for tensor in tensors_of(bench.opened)])
        for one, other in zip(*seen, strict=True):
            same = torch.equal(one, other)
            assert same, f"other padding, another buffer: {differing(other, one)}"

    def test_a_replay_waits_for_no_device(self, bench: Bench) -> None:
        with NoWaiting():  # type: ignore[no-untyped-call]
            bench.opened.on_replay(LARGE, bench.fill(LARGE, 1))

    def test_capturing_again_and_again_keeps_nothing(self, bench: Bench) -> None:
        counts = []
        with watched_bytes(torch.device("cpu")) as held:
            for _ in range(CYCLES):
                bench.backend.cleanup()
                bench.capture(LARGE, SMALL)
                counts.append(held())
        assert counts[-1] <= counts[2], counts

    def test_replaying_again_and_again_keeps_nothing(self, bench: Bench) -> None:
        batch = bench.fill(LARGE, 1)
        with watched_bytes(torch.device("cpu")) as held:
            bench.opened.on_replay(LARGE, batch)
            before = held()
            for _ in range(REPLAYS):
                bench.opened.on_replay(LARGE, batch)
            assert held() <= before


class Bench:
    """A plugin, a recording backend, and work of a phase over static buffers."""

    def __init__(self, opened: GraphPlugin, phase: str) -> None:
        self.opened, self.phase, self.backend = opened, phase, RecordingBackend()
        self.table_V = torch.randn(64, generator=torch.Generator().manual_seed(1))
        self.batches = {key: self._buffers(key) for key in (LARGE, SMALL)}
        self.recorded: dict[ShapeKey, Work] = {}
        self.work: Work = self._prefill if phase == "prefill" else self._decode
        self.capture(LARGE, SMALL)

    def _buffers(self, key: ShapeKey) -> Mapping[str, Tensor]:
        B, T = key.rows, key.length
        shapes: dict[str, tuple[int, ...]] = {"tokens_BT": (B, T)}
        if self.phase == "decode":
            shapes = {"last_B": (B,), "drafts_BK": (B, 4)}
        buffers = {name: torch.zeros(shape, dtype=torch.long) for name, shape in shapes.items()}
        lengths_B, live_B = torch.full((B,), T), torch.ones(B, dtype=torch.bool)
        return {**buffers, "lengths_B": lengths_B, "live_B": live_B}

    def fill(self, key: ShapeKey, seed: int) -> Mapping[str, Tensor]:
        """Put a batch of real rows into the buffers of a bucket, and return these."""
        generator, batch = torch.Generator().manual_seed(seed), self.batches[key]
        for name, value in batch.items():
            most = {"lengths_B": key.length, "live_B": 0}.get(name, 63)
            value.copy_(1 + torch.randint(most + 1, value.shape, generator=generator))
        batch["lengths_B"].clamp_(max=key.length)
        return batch

    def capture(self, *keys: ShapeKey) -> None:
        with self.backend.capture_session():
            for key in keys:
                batch = self.fill(key, 0)
                work = self.recorded[key] = self.opened.on_capture(key, batch, self.work)
                assert callable(work), f"on_capture returned {work}, not what is to be recorded"
                self.backend.capture_one(key, lambda w=work, b=batch: w(b))  # type: ignore[misc]

    def replay(self, key: ShapeKey) -> Outputs:
        self.opened.on_replay(key, self.batches[key])
        with self.backend.replay_session():
            return self.backend.replay(key)

    def require_replays(self, key: ShapeKey, seed: int) -> None:
        """Compare a replay with the work itself, called on the same contents."""
        batch = self.fill(key, seed)
        expected, left = copied(self.work(batch)), copied(dict(batch))
        self.fill(key, seed)  # anew, as decoding moved on in the buffers
        require_same(self.replay(key), expected)
        require_same(dict(batch), left, "the batch after a replay")

    def _prefill(self, batch: Batch, **parts: Any) -> Outputs:
        """A token at a time, so that a row that is divided needs nothing of its other part."""
        found_BT = self.table_V[batch["tokens_BT"] % 64]
        return {"found": found_BT, "pair": (found_BT.double()[..., None], None)}

    def _decode(self, batch: Batch, **parts: Any) -> Outputs:
        assert not any(part is not None for part in parts.values()), "rows are not to be divided"
        assert len(batch["lengths_B"]) in (LARGE.rows, SMALL.rows)
        batch["lengths_B"].add_(1)
        return batch["drafts_BK"] + batch["last_B"][:, None], batch["lengths_B"] * 1


def tensors_of(plugin: GraphPlugin) -> list[Tensor]:
    """The tensors that a plugin's attributes hold, in whatever containers, in a steady order."""
    found: list[Tensor] = []
    seen: set[int] = set()

    def visit(value: Any) -> None:
        if id(value) in seen or isinstance(value, type) or callable(value):
            return
        seen.add(id(value))
        if isinstance(value, Tensor):
            found.append(value)
        else:
            for inner in gc.get_referents(value):
                visit(inner)

    for value in vars(plugin).values():
        visit(value)
    return found


class NoWaiting(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Refuses operations that wait for the device."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        require_no_wait(func, args)
        return func(*args, **(kwargs or {}))
