"""What every graph backend must do. See `draftcore_sdk` for how to use it.

Functions are recorded over static buffers on the backend's device: the one that its capability
`device:NAME` says, else the CPU. Replay is compared with the function itself, bit by bit. A backend
of capability `breaks` is tested for those as well.

Shape letters: B rows, H width.
"""

import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from draftcore_graphs.breaks import run_eager
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map

from draftcore.contracts.runner import GraphBackend, Outputs, ShapeKey
from draftcore.errors import DraftcoreError
from draftcore_sdk.suite import Suite, hooks_of, offer_of, options_of

ROWS, WIDTH = 16, 256
LARGE, SMALL = ShapeKey(ROWS, 2, "x"), ShapeKey(ROWS // 2, 2, "x")
CYCLES, REPLAYS = 20, 1000


class Work:
    """A function over static buffers that returns every kind of output, and counts."""

    def __init__(self, device: torch.device) -> None:
        generator = torch.Generator().manual_seed(1)
        self.module = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        for parameter in self.module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / WIDTH**0.5)
        self.module.to(device)
        self.input_BH = torch.zeros(ROWS, WIDTH, device=device)
        self.steps_B = torch.zeros(ROWS, dtype=torch.long, device=device)
        self.calls = 0
        self.vary(0)

    def vary(self, seed: int) -> None:
        """Put other numbers into the static buffers."""
        generator = torch.Generator().manual_seed(seed)
        self.input_BH.copy_(torch.randn(ROWS, WIDTH, generator=generator))

    def of(self, key: ShapeKey) -> Callable[[], Outputs]:
        input_BH, steps_B = self.input_BH[: key.rows], self.steps_B[: key.rows]

        def work() -> Outputs:
            self.calls += 1
            hidden_BH = self.module(input_BH).relu()
            steps_B.add_(1)
            best_B = hidden_BH.argmax(-1)
            return {"hidden": hidden_BH, "pair": (best_B, [hidden_BH.double().sum(-1)]), "no": None}

        return work


class GraphBackendSuite(Suite):
    """The behaviour of a graph backend, opened through its plugin."""

    # ------------------------------------------------------------ fixtures

    @pytest.fixture
    def device(self) -> torch.device:
        words = offer_of(self.plugin, "graph", self.name).capabilities
        wanted = sorted(w.removeprefix("device:") for w in words if w.startswith("device:"))
        if not wanted or "cpu" in wanted:
            return torch.device("cpu")
        if wanted[0] == "cuda" and not torch.cuda.is_available():
            pytest.skip("there is no CUDA device here")
        return torch.device(wanted[0])

    @pytest.fixture
    def backend(self, device: torch.device) -> Iterator[GraphBackend]:
        offer = offer_of(self.plugin, "graph", self.name)
        options = options_of(offer, self.options)
        try:
            opened = hooks_of(self.plugin).graph_backend(name=offer.name, options=options)
        except DraftcoreError as error:
            pytest.skip(f"it cannot be opened here: {error}")
        assert isinstance(opened, GraphBackend), "a backend is a subclass of GraphBackend"
        with torch.inference_mode():
            yield opened
        opened.cleanup()

    @pytest.fixture
    def work(self, backend: GraphBackend, device: torch.device) -> Work:
        return Work(device)

    @pytest.fixture
    def captured(self, backend: GraphBackend, work: Work) -> Work:
        """The work, captured in both buckets, the larger first."""
        capture(backend, work, LARGE, SMALL)
        return work

    # ------------------------------------------------------------ capture

    def test_capture_calls_twice_to_warm_up_and_once_to_record(
        self, backend: GraphBackend, work: Work
    ) -> None:
        capture(backend, work, LARGE)
        assert work.calls == 3

    def test_what_was_not_captured_cannot_run(self, backend: GraphBackend, captured: Work) -> None:
        batch = {"input_BH": captured.input_BH}
        assert backend.can_run(batch, LARGE) is True
        assert backend.can_run({"input_BH": captured.input_BH[: SMALL.rows]}, SMALL) is True
        for unknown in (ShapeKey(3, 2, "x"), ShapeKey(ROWS, 3, "x"), ShapeKey(ROWS, 2, "y")):
            assert backend.can_run(batch, unknown) is False, unknown

    def test_a_key_captured_again_is_replaced(
        self, backend: GraphBackend, captured: Work, device: torch.device
    ) -> None:
        other = torch.full((3,), 7.0, device=device)
        with backend.capture_session():
            backend.capture_one(LARGE, lambda: other * 2)
        assert replay(backend, LARGE).tolist() == [14.0] * 3

    @pytest.mark.parametrize("at", [1, 2, 3])
    def test_a_failing_function_leaves_the_backend_usable(
        self, backend: GraphBackend, captured: Work, at: int
    ) -> None:
        """At either warm-up or while it is recorded."""
        failing, calls = ShapeKey(ROWS, 9), []

        def fail() -> Tensor:
            calls.append(1)
            if len(calls) == at:
                raise LookupError("on purpose")
            return captured.input_BH + 1

        with pytest.raises(LookupError, match="on purpose"), backend.capture_session():
            backend.capture_one(failing, fail)
        assert backend.can_run({"input_BH": captured.input_BH}, failing) is False
        require_replays(backend, captured, LARGE)
        with backend.capture_session():
            backend.capture_one(failing, fail)
        captured.vary(5)
        assert torch.equal(replay(backend, failing), captured.input_BH + 1)

    # ------------------------------------------------------------ replay

    def test_replay_gives_what_the_function_would_on_other_contents(
        self, backend: GraphBackend, captured: Work
    ) -> None:
        """The type, the keys, dtypes, shapes and every bit."""
        for seed in (1, 2, 3):
            captured.vary(seed)
            require_replays(backend, captured, LARGE)

    def test_buckets_do_not_disturb_each_other(self, backend: GraphBackend, captured: Work) -> None:
        for seed, key in enumerate((SMALL, LARGE, SMALL, SMALL, LARGE)):
            captured.vary(seed)
            require_replays(backend, captured, key)

    def test_replay_writes_static_buffers_once(self, backend: GraphBackend, captured: Work) -> None:
        captured.steps_B.zero_()
        for _ in range(3):
            replay(backend, LARGE)
        replay(backend, SMALL)
        counted = [4] * SMALL.rows + [3] * (LARGE.rows - SMALL.rows)
        assert captured.steps_B.tolist() == counted

    def test_parameters_that_are_updated_in_place_are_read_as_they_are(
        self, backend: GraphBackend, captured: Work
    ) -> None:
        for factor in (2.0, -1.0):
            captured.module.weight.mul_(factor)
            captured.module.bias.add_(factor)
            require_replays(backend, captured, LARGE)

    def test_a_break_runs_on_what_is_there_at_replay(
        self, backend: GraphBackend, work: Work
    ) -> None:
        if "breaks" not in offer_of(self.plugin, "graph", self.name).capabilities:
            pytest.skip("the backend does not claim the capability breaks")
        seen: list[float] = []

        def outside(x_BH: Tensor) -> Tensor:
            seen.append(float(x_BH.sum()))  # waits for the device, as no graph could
            return x_BH * 3

        def broken() -> Tensor:
            return run_eager(outside, work.module(work.input_BH)) + 1  # type: ignore[no-any-return]

        with backend.capture_session():
            backend.capture_one(LARGE, broken)
        for seed in (1, 2):
            work.vary(seed)
            calls = len(seen)
            found = replay(backend, LARGE).clone()
            assert len(seen) == calls + 1
            assert torch.equal(found, broken())
            assert seen[-1] == seen[-2]

    def test_what_is_forked_off_and_joined_is_part_of_the_replay(
        self, backend: GraphBackend, work: Work, device: torch.device
    ) -> None:
        """On a second stream where the device has such; elsewhere the one follows the other."""
        if "forks" not in offer_of(self.plugin, "graph", self.name).capabilities:
            pytest.skip("the backend does not claim the capability forks")
        side = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]

        def forked() -> Tensor:
            if side is None:
                return work.input_BH * 2 + work.module(work.input_BH)  # type: ignore[no-any-return]
            here = torch.cuda.current_stream(device)
            side.wait_stream(here)
            with torch.cuda.stream(side):
                twice_BH = work.input_BH * 2
            hidden_BH = work.module(work.input_BH)
            here.wait_stream(side)
            return twice_BH + hidden_BH  # type: ignore[no-any-return]

        with backend.capture_session():
            backend.capture_one(LARGE, forked)
        for seed in (1, 2):
            work.vary(seed)
            assert torch.equal(replay(backend, LARGE).clone(), forked())

    # ------------------------------------------------------------ the end

    def test_after_cleanup_nothing_runs_until_it_is_captured_again(
        self, backend: GraphBackend, captured: Work
    ) -> None:
        backend.cleanup()
        assert backend.can_run({"input_BH": captured.input_BH}, LARGE) is False
        capture(backend, captured, LARGE)
        require_replays(backend, captured, LARGE)

    def test_capturing_and_cleaning_up_again_and_again_keeps_nothing(
        self, backend: GraphBackend, work: Work, device: torch.device
    ) -> None:
        held: list[int] = []
        for _ in range(CYCLES):
            capture(backend, work, LARGE, SMALL)
            replay(backend, LARGE)
            backend.cleanup()
            held.append(live_bytes(device))
        # The first cycles may fill caches; one output kept per cycle would be 17 times this.
        assert held[-1] - held[2] <= work.input_BH.nbytes, held

    def test_replaying_again_and_again_keeps_nothing(
        self, backend: GraphBackend, captured: Work, device: torch.device
    ) -> None:
        replay(backend, LARGE)
        before = live_bytes(device)
        for _ in range(REPLAYS):
            replay(backend, LARGE)
        assert live_bytes(device) - before <= captured.input_BH.nbytes


# ---------------------------------------------------------------- pieces of the tests


def capture(backend: GraphBackend, work: Work, *keys: ShapeKey) -> None:
    with backend.capture_session():
        for key in keys:
            backend.capture_one(key, work.of(key))


def replay(backend: GraphBackend, key: ShapeKey) -> Outputs:
    with backend.replay_session():
        return backend.replay(key)


def require_replays(backend: GraphBackend, work: Work, key: ShapeKey) -> None:
    """Compare a replay with the function, called on the same contents."""
    steps_B = work.steps_B.clone()
    found = tree_map(_copied, replay(backend, key))
    work.steps_B.copy_(steps_B)
    expected = work.of(key)()
    ours, built = tree_flatten(found)
    theirs, right = tree_flatten(expected)
    assert built == right, f"replay returns {built}, the function {right}"
    for one, other in zip(ours, theirs, strict=True):
        assert (one is None) == (other is None)
        if other is not None:
            assert (one.dtype, one.shape) == (other.dtype, other.shape)
            assert torch.equal(one, other), "replay gives other bits than the function"


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


def live_bytes(device: torch.device) -> int:
    """What tensors hold: on a CUDA device all of them, else those that Python knows."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        return torch.cuda.memory_allocated(device)
    storages = {
        item.untyped_storage().data_ptr(): item.untyped_storage().nbytes()
        for item in gc.get_objects()
        if type(item) in (Tensor, nn.Parameter)  # others may have no memory, or be imported lazily
    }
    return sum(storages.values())
