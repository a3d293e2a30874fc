"""The backends on a CUDA device: `nox -s gpu`."""

from __future__ import annotations

import gc
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from draftcore_graphs import cuda
from draftcore_graphs.breaks import run_eager
from draftcore_graphs.cuda import CudaSegments, Pool, open_backend
from draftcore_graphs.decode import DecodeGraphRunner
from draftcore_graphs.graph_plugin import GraphPlugin
from draftcore_graphs.options import BreakableOptions
from draftcore_graphs.prefill import PrefillGraphRunner
from draftcore_graphs.resolve import Phase
from draftcore_graphs.tbo import Halves, TwoBatchOverlap, balanced_cut
from draftcore_hf.target import TransformersModel, TransformersTarget
from draftcore_sdk.graphs import GraphBackendSuite
from draftcore_sdk.replays import largest_gap
from draftcore_sdk.runners import RepeatingDrafter
from draftcore_sdk.suite import opened
from draftcore_sdk.targets import tiny_target
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from draftcore.contracts.capture import FeatureRequest
from draftcore.contracts.runner import GraphBackend, ShapeKey
from draftcore.errors import DraftcoreError

pytestmark = pytest.mark.gpu

PLUGIN = "draftcore_graphs.plugin"
MIB = 1 << 20


class TestFull(GraphBackendSuite):
    plugin, name = PLUGIN, "full"


class TestBreakable(GraphBackendSuite):
    plugin, name = PLUGIN, "breakable"


class TestBreakableDebug(GraphBackendSuite):
    plugin, name, options = PLUGIN, "breakable", {"debug": True}


def cleaned(name: str) -> Iterator[GraphBackend]:
    backend: GraphBackend = opened(PLUGIN, "graph", name, {})
    yield backend
    backend.cleanup()


@pytest.fixture
def full() -> Iterator[GraphBackend]:
    yield from cleaned("full")


@pytest.fixture
def breakable() -> Iterator[GraphBackend]:
    yield from cleaned("breakable")


@pytest.fixture
def piecewise() -> Iterator[GraphBackend]:
    yield from cleaned("piecewise")


@pytest.fixture
def buffer() -> Tensor:
    return torch.ones(64, 64, device="cuda")


KEY, OTHER = ShapeKey(64, 64), ShapeKey(32, 64)


def capture(backend: GraphBackend, work: Callable[[], object], key: ShapeKey = KEY) -> None:
    with backend.capture_session():
        backend.capture_one(key, work)


def tower(depth: int = 4) -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(depth)]
    return nn.Sequential(*layers).cuda().requires_grad_(False)


# ---------------------------------------------------------------- what is launched


def launches(work: Callable[[], object]) -> Counter[str]:
    """Count the CUDA calls of a function that launch something."""
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as trace:
        work()
        torch.cuda.synchronize()
    calls = [event.name for event in trace.events() if event.name.startswith("cu")]
    names = [name for name in calls if "Launch" in name]
    return Counter("graph" if "GraphLaunch" in name else "kernel" for name in names)


def test_a_replay_launches_graphs_in_the_place_of_kernels(
    full: GraphBackend, breakable: GraphBackend, piecewise: GraphBackend, buffer: Tensor
) -> None:
    module = tower()
    eager = launches(lambda: module(buffer))
    if not eager["kernel"]:
        pytest.skip("the profiler sees no CUDA calls on this machine")
    capture(full, lambda: module(buffer))
    assert launches(lambda: full.replay(KEY)) == {"graph": 1}
    capture(breakable, lambda: module(run_eager(torch.neg, module(buffer))))
    seen = launches(lambda: breakable.replay(KEY))
    assert seen["graph"] == 2
    assert 1 <= seen["kernel"] <= 2  # the break, and the copy of what it returns
    assert eager["kernel"] > seen["kernel"]
    capture(piecewise, lambda: module(buffer))
    assert launches(lambda: piecewise.replay(KEY))["graph"] == 1


# ---------------------------------------------------------------- memory


def gone(pool: weakref.ref[Pool]) -> bool:
    """Whether nothing holds the pool any more."""
    gc.collect()
    return pool() is None


def test_a_break_keeps_neither_what_it_takes_nor_what_it_returns(breakable: GraphBackend) -> None:
    """16 breaks between tensors of 8 MiB: kept, they would be 256 MiB."""
    x = torch.ones(2 * MIB, device="cuda")

    def work() -> Tensor:
        y = x
        for _ in range(16):
            y = run_eager(torch.neg, y + 1)
        return y + 1

    gc.collect()
    before = torch.cuda.memory_allocated()
    capture(breakable, work)
    gc.collect()
    assert torch.cuda.memory_allocated() - before <= 40 * MIB
    for value in (1.0, 5.0):
        x.fill_(value)
        assert torch.equal(breakable.replay(KEY), work())


def test_all_backends_share_one_pool_and_one_stream(
    full: GraphBackend, breakable: GraphBackend, buffer: Tensor
) -> None:
    """A smaller capture costs nothing beside a larger one, of whatever phase."""
    large = torch.ones(16 * MIB, device="cuda")

    def chain(x: Tensor) -> Callable[[], Tensor]:
        return lambda: ((x + 1) * 2 - 3).sum()

    capture(full, chain(large))
    reserved = torch.cuda.memory_reserved()
    capture(full, chain(large[: 8 * MIB]), OTHER)
    capture(breakable, chain(large[: 4 * MIB]))
    assert torch.cuda.memory_reserved() - reserved <= 4 * MIB
    device = large.device
    segments = [CudaSegments(device, name) for name in ("full", "breakable")]
    assert segments[0].pools == segments[1].pools == [cuda.shared_pool(device)]
    pool = weakref.ref(cuda.shared_pool(device))
    assert segments[0].stream is segments[1].stream is cuda.capture_stream(device)
    segments.clear()
    full.cleanup()
    large.fill_(2)
    assert torch.equal(breakable.replay(KEY), chain(large[: 4 * MIB])())
    breakable.cleanup()
    assert gone(pool)
    assert torch.cuda.memory_reserved() < reserved


def require_no_growth(cycle: Callable[[int], object]) -> None:
    """Twenty cycles of captures, replays and cleanups hold and reserve no more than three."""
    held = []
    for at in range(20):
        cycle(1000 if at == 10 else 2)
        gc.collect()
        held.append((torch.cuda.memory_allocated(), torch.cuda.memory_reserved()))
    assert all(last <= early for last, early in zip(held[-1], held[2], strict=True)), held


@pytest.mark.parametrize("name", ["full", "breakable", "piecewise"])
def test_captures_and_replays_come_and_go_without_leaving_memory(
    name: str, buffer: Tensor, request: pytest.FixtureRequest
) -> None:
    backend, module = request.getfixturevalue(name), tower()

    def cycle(replays: int) -> None:
        capture(backend, lambda: module(run_eager(torch.neg, module(buffer))))
        capture(backend, lambda: module(buffer[:32]), OTHER)
        for _ in range(replays):
            backend.replay(KEY)
        backend.cleanup()

    require_no_growth(cycle)


def test_a_device_without_room_is_said_and_stays_usable(
    full: GraphBackend, buffer: Tensor, tmp_path: Path
) -> None:
    """A mask of 16,384 x 16,384 takes 1 GiB; buckets that nobody chose run eagerly."""
    sizes: dict[str, Any] = {"rows": (4,), "lengths": (32, 16384)}
    asked = r"a graph of 4 rows x 16384: .* is free\."
    with pytest.raises(DraftcoreError, match=asked) as refused, little_memory():
        prefill(full, tmp_path / "chosen", "float32", **sizes, decided={"lengths": "you"})
    assert "lower runner.prefill.options.max_bs (it is 4)" in str(refused.value)
    usable(full, buffer)
    full.cleanup()
    with little_memory():
        runner = prefill(full, tmp_path / "default", "float32", **sizes)
    assert runner.captures == 1
    runner.features(*batch_of(4, 16384), REQUEST)
    assert runner.counts == {"replayed": 1, "out of memory": 1}


@contextmanager
def little_memory() -> Iterator[None]:
    gc.collect()
    torch.cuda.empty_cache()
    share = (torch.cuda.memory_reserved() + 256 * MIB) / torch.cuda.mem_get_info()[1]
    torch.cuda.set_per_process_memory_fraction(share)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


# ---------------------------------------------------------------- what cannot be recorded


def usable(backend: GraphBackend, buffer: Tensor) -> None:
    """CUDA, its random numbers and another capture work, and the new graph gives eager's bits."""
    torch.manual_seed(0)
    drawn = torch.rand(8, device="cuda")
    torch.manual_seed(0)
    assert torch.equal(torch.rand(8, device="cuda"), drawn)
    assert not backend.can_run({}, KEY)
    capture(backend, lambda: buffer.tanh() @ buffer, OTHER)
    for value in (0.5, 2.0):
        buffer.fill_(value)
        assert torch.equal(backend.replay(OTHER), buffer.tanh() @ buffer)


@pytest.mark.parametrize("name", ["full", "breakable"])
def test_a_wait_for_the_host_is_refused_and_leaves_everything_usable(
    name: str, full: GraphBackend, breakable: GraphBackend, buffer: Tensor
) -> None:
    """Also the other backend: they record into one pool, which a failed capture spoils for new graphs."""
    backend, other = (full, breakable) if name == "full" else (breakable, full)
    for one in (backend, other):
        capture(one, lambda: buffer + 1, ShapeKey(1))
    for _ in range(5):
        with pytest.raises(DraftcoreError, match="cannot be recorded as a CUDA graph") as refused:
            capture(backend, lambda: (buffer * 2) * float(buffer.sum()))
        assert "debug=true" in str(refused.value)
    for one in (other, backend):
        usable(one, buffer)
        assert torch.equal(one.replay(ShapeKey(1)), buffer + 1)
    pool = weakref.ref(cuda.shared_pool(buffer.device))
    for one in (backend, other):
        one.cleanup()
    assert gone(pool)


def test_an_error_between_a_fork_and_its_join_leaves_everything_usable(
    full: GraphBackend, buffer: Tensor
) -> None:
    side, calls = torch.cuda.Stream(), []  # type: ignore[no-untyped-call]

    def work() -> Tensor:
        calls.append(1)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            found = buffer * 2
            if len(calls) == 3:
                raise LookupError("on purpose")
        torch.cuda.current_stream().wait_stream(side)
        return found

    with pytest.raises(LookupError, match="on purpose"):
        capture(full, work)
    usable(full, buffer)


def test_a_fork_that_is_never_joined_is_refused(full: GraphBackend, buffer: Tensor) -> None:
    """Made by events, which nobody notes; torch itself would say 'unjoined'."""
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def work() -> Tensor:
        forked = torch.cuda.Event()  # type: ignore[no-untyped-call]
        forked.record()
        side.wait_event(forked)
        with torch.cuda.stream(side):
            return buffer * 2

    with pytest.raises(DraftcoreError):
        capture(full, work)
    usable(full, buffer)


def test_work_on_the_cpu_is_refused(full: GraphBackend) -> None:
    x = torch.ones(3)
    with pytest.raises(DraftcoreError, match="runs on cpu"):
        capture(full, lambda: x + 1)
    with pytest.raises(DraftcoreError, match="nothing ran there"):
        capture(full, lambda: None)


# ---------------------------------------------------------------- streams and threads


def test_side_streams_are_joined_before_a_break_and_forked_after_it(
    breakable: GraphBackend, buffer: Tensor
) -> None:
    side, out = torch.cuda.Stream(), torch.zeros_like(buffer)  # type: ignore[no-untyped-call]

    def work() -> Tensor:
        main = torch.cuda.current_stream()
        side.wait_stream(main)
        with torch.cuda.stream(side):
            out.copy_(buffer @ buffer)
        left: Tensor = run_eager(torch.neg, buffer)  # while the side stream is away
        with torch.cuda.stream(side):
            out.add_(1)
        main.wait_stream(side)
        return left + out

    capture(breakable, work)
    for value in (0.25, 3.0):
        buffer.fill_(value)
        expected = -buffer + (buffer @ buffer + 1)
        assert torch.equal(breakable.replay(KEY), expected)
    assert torch.cuda.Stream.wait_stream.__name__ == "wait_stream"


def test_other_threads_may_use_cuda_while_graphs_are_recorded(
    full: GraphBackend, breakable: GraphBackend, buffer: Tensor
) -> None:
    stop, failed = threading.Event(), []

    def other() -> None:
        with torch.cuda.stream(torch.cuda.Stream()):  # type: ignore[no-untyped-call]
            while not stop.is_set():
                try:
                    fresh = torch.ones(MIB, device="cuda")
                    assert float((fresh * 2).sum()) == 2 * MIB
                except Exception as error:
                    failed.append(error)
                    return

    thread = threading.Thread(target=other)
    thread.start()
    try:
        for rows in range(12, 0, -1):
            part = buffer[:rows]
            for backend in (full, breakable):
                capture(backend, lambda x=part: run_eager(torch.neg, x * 2) + 1, ShapeKey(rows))  # type: ignore[misc]
    finally:
        stop.set()
        thread.join()
    assert not failed
    buffer.fill_(4)
    for backend in (full, breakable):
        assert backend.replay(ShapeKey(3)).tolist() == [[-7.0] * 64] * 3


# ---------------------------------------------------------------- torch.compile


def test_compiled_pieces_read_buffers_and_weights_as_they_are(piecewise: GraphBackend) -> None:
    """Fused kernels round differently: a sum of 64 products in fp32, four times."""
    module, x = tower(), torch.randn(64, 64, device="cuda")
    capture(piecewise, lambda: {"y": module(x)})
    for seed in (1, 2):
        x.copy_(torch.randn(64, 64, generator=torch.Generator().manual_seed(seed)))
        module.get_parameter("0.0.weight").mul_(1.5)
        torch.testing.assert_close(piecewise.replay(KEY)["y"], module(x), rtol=1e-4, atol=1e-5)


# ---------------------------------------------------------------- a target's prefill


REQUEST = FeatureRequest((0, 5), True, "float32")
WIDER = FeatureRequest((0, 5), True, "float32", topk=3, embeddings=True)


def prefill(
    backend: GraphBackend,
    folder: Path,
    dtype: str,
    *plugins: GraphPlugin,
    breaks: bool = False,
    **changes: Any,
) -> PrefillGraphRunner:
    """A runner of a tiny target, whose buckets are captured."""
    target = TransformersModel(
        TransformersTarget(str(tiny_target(folder)), dtype=dtype, device="cuda")
    )
    sizes = {"rows": (1, 2, 3, 4), "lengths": (8, 32), **changes}
    runner = PrefillGraphRunner(
        target, Phase("prefill", "named", **sizes), backend, plugins, breaks=breaks
    )
    runner.features(*batch_of(1, 8), REQUEST)
    return runner


def batch_of(rows: int, length: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rows + length)
    tokens_BT = torch.randint(1, 200, (rows, length), generator=generator)
    return tokens_BT.cuda(), torch.full((rows,), length, device="cuda")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["full", "breakable", "debug"])
def test_every_bucket_of_prefill_replays_to_the_bits_of_eager(
    name: str, dtype: str, tmp_path: Path
) -> None:
    """The same padded batch: the runner's own work, called on what its buffers hold."""
    options = BreakableOptions(debug=name == "debug")
    backend = open_backend("full" if name == "full" else "breakable", options)
    runner = prefill(backend, tmp_path, dtype, breaks=name != "full")
    runner.features(*batch_of(1, 8), WIDER)
    for key in sorted(runner.captured):
        request = WIDER if "topk" in key.variant else REQUEST
        runner.features(*batch_of(key.rows, key.length - 2), request)
        assert largest_gap(runner, key) == 0, key
    assert runner.counts == {"replayed": 18}
    runner.forget()


class Repeats(RepeatingDrafter):
    """A drafter that proposes the last token again and again."""

    def __init__(self) -> None:
        self.module = nn.Module()

    def allocate(self, batch: int, max_len: int) -> dict[str, Tensor]:
        return {"last_B": torch.zeros(batch, dtype=torch.long, device="cuda")}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_bucket_of_decoding_replays_to_the_bits_of_eager(
    full: GraphBackend, dtype: str, tmp_path: Path
) -> None:
    target = TransformersModel(
        TransformersTarget(str(tiny_target(tmp_path)), dtype=dtype, device="cuda")
    )
    phase, drafter = Phase("decode", "full", rows=(1, 2, 4), lengths=(32, 64)), Repeats()
    runner = DecodeGraphRunner(target, drafter, drafter.module, phase, full)
    runner.reserve(4, 60)
    with torch.inference_mode():
        runner.ready(runner.keys())
        runner.admit(4, *batch_of(3, 9))
    assert len(runner.captured) == 3 + 3 * 2
    for key in sorted(runner.captured):
        assert largest_gap(runner, key) == 0, key
    runner.forget()


# ---------------------------------------------------------------- by halves, on two streams


@pytest.mark.parametrize(("dtype", "bound"), [("float32", 1e-5), ("bfloat16", 0.05)])
def test_prefill_by_halves_on_two_streams_has_the_features_of_the_whole(
    full: GraphBackend, dtype: str, bound: float, tmp_path: Path
) -> None:
    """To the bits of the same halves run eagerly; of the whole within rounding."""
    halved = prefill(full, tmp_path / "halved", dtype, TwoBatchOverlap())
    plain = prefill(open_backend("full", None), tmp_path / "plain", dtype)
    assert len(halved.captured) == 8
    for key in sorted(halved.captured):
        given = batch_of(key.rows, key.length)
        found, whole = (runner.features(*given, REQUEST) for runner in (halved, plain))
        batch = halved.buffers.view(key)
        cut = balanced_cut(key.rows, key.length)
        assert cut is not None
        eager = Halves(halved.work(key), cut, batch)(batch)
        for name, value in whole.items():
            assert torch.equal(found[name], eager[name].float()), (key, name)
            gap = float((found[name] - value).abs().max() / value.abs().max())
            assert gap <= bound, (key, name, gap)
    plain.forget()


def test_halves_are_recorded_and_dropped_again_and_again_without_leaving_memory(
    full: GraphBackend, tmp_path: Path
) -> None:
    runner = prefill(full, tmp_path, "bfloat16", TwoBatchOverlap())

    def cycle(replays: int) -> None:
        for _ in range(replays):
            runner.features(*batch_of(3, 32), REQUEST)
        runner.forget()

    require_no_growth(cycle)


def test_the_second_half_runs_on_a_stream_of_its_own() -> None:
    here, there = torch.cuda.current_stream(), []
    with cuda.beside(torch.device("cuda", 0)) as second_stream:
        with second_stream:
            there.append(torch.cuda.current_stream())
        assert torch.cuda.current_stream() == here
    assert there == [cuda.second_stream(torch.device("cuda", 0))] != [here]
