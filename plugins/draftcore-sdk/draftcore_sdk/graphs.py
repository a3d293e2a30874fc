"""What every graph backend must do. See `draftcore_sdk` for how to use it.

Functions are recorded over static buffers on the backend's device: the one that its capability
`device:NAME` says, else the CPU. Replay is compared with the function itself, bit by bit. A backend
of capability `breaks` is tested for those as well.

Shape letters: B rows, H width.
"""

import gc
import threading
from collections.abc import Callable, Iterator, Mapping
from functools import partial

import pytest
import torch
from draftcore_graphs.breaks import run_eager
from torch import Tensor, nn
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_map

from draftcore.contracts.runner import GraphBackend, Outputs, ShapeKey
from draftcore.errors import UsageError
from draftcore_sdk.limits import until
from draftcore_sdk.memory import CYCLES, differing, watched_bytes
from draftcore_sdk.suite import Suite

ROWS, WIDTH = 16, 256
LARGE, SMALL = ShapeKey(ROWS, 2, "x"), ShapeKey(ROWS // 2, 2, "x")
REPLAYS = 500


class OnPurposeError(torch.OutOfMemoryError, LookupError):
    """What a backend may be tempted to swallow, and what nobody expects."""


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
        self.rows_B = torch.arange(ROWS, device=device)
        # Of one element, as the buffers of a batch of one row are.
        self.scale, self.shift_1 = torch.ones((), device=device), torch.zeros(1, device=device)
        self.calls = 0
        self.vary(0)

    def vary(self, seed: int) -> None:
        """Put other numbers into the static buffers."""
        generator = torch.Generator().manual_seed(seed)
        self.input_BH.copy_(torch.randn(ROWS, WIDTH, generator=generator))
        self.scale.fill_(1 + seed / 8)
        self.shift_1.fill_(seed / 16)

    def of(self, key: ShapeKey) -> Callable[[], Outputs]:
        input_BH, steps_B = self.input_BH[: key.rows], self.steps_B[: key.rows]

        def work() -> Outputs:
            self.calls += 1
            left_BH, right_BH = self.module(input_BH).chunk(2, -1)
            turned_BH = torch.cat([-right_BH, left_BH], -1)  # as rotary positions do
            hidden_BH = (turned_BH * self.scale + self.shift_1).relu()
            steps_B.view(-1).add_(1)  # through a view that is made here
            best_B = hidden_BH.argmax(-1)
            pair = best_B, [hidden_BH.double().sum(-1), hidden_BH[self.rows_B[: key.rows], best_B]]
            buffers = {"read": input_BH, "written": steps_B}
            return {"hidden": hidden_BH, "pair": pair, "no": None, **buffers}

        return work


class Bench:
    """A backend, and work that it has captured in both buckets, the larger first."""

    def __init__(self, backend: GraphBackend, device: torch.device) -> None:
        self.backend, self.device, self.work = backend, device, Work(device)
        self.capture({key: self.work.of(key) for key in (LARGE, SMALL)})

    def capture(self, functions: Mapping[ShapeKey, Callable[[], Outputs]]) -> None:
        with self.backend.capture_session():
            for key, function in functions.items():
                self.backend.capture_one(key, function)

    def can_run(self, key: ShapeKey) -> bool:
        lengths_B = torch.full((key.rows,), 9999, device=self.device)  # tokens so far, in decode
        batch = {"input_BH": self.work.input_BH[: key.rows], "lengths_B": lengths_B}
        found = self.backend.can_run(batch, key)
        assert isinstance(found, bool), f"can_run returned {found!r}, which is no bool"
        return found

    def replay(self, key: ShapeKey = LARGE) -> Outputs:
        with self.backend.replay_session():
            return self.backend.replay(key)

    def require_replays(self, key: ShapeKey = LARGE) -> None:
        """Compare a replay with the function, called on the same contents."""
        steps_B = self.work.steps_B.clone()
        found = copied(self.replay(key))
        self.work.steps_B.copy_(steps_B)
        require_same(found, self.work.of(key)())


class GraphBackendSuite(Suite):
    """The behaviour of a graph backend, opened through its plugin."""

    @pytest.fixture
    def device(self) -> torch.device:
        wanted = self.said("graph", "device:")
        if not wanted or "cpu" in wanted:
            return torch.device("cpu")
        if wanted[0] == "cuda" and not torch.cuda.is_available():
            pytest.skip("there is no CUDA device here")
        return torch.device(wanted[0])

    @pytest.fixture
    def backend(self, device: torch.device) -> Iterator[GraphBackend]:
        backend = self.opened()
        with torch.inference_mode():
            yield backend
        backend.cleanup()

    def opened(self) -> GraphBackend:
        try:
            backend: GraphBackend = self.open("graph")
        except UsageError as error:
            if "cuda" not in self.said("graph", "device:") or torch.cuda.is_available():
                raise
            pytest.skip(f"it cannot be opened here: {error}")
        return backend

    @pytest.fixture
    def bench(self, backend: GraphBackend, device: torch.device) -> Bench:
        return Bench(backend, device)

    def require(self, capability: str) -> None:
        if capability not in self.said("graph", ""):
            pytest.skip(f"the backend does not claim the capability {capability}")

    def test_capture_calls_twice_to_warm_up_and_once_to_record(self, bench: Bench) -> None:
        assert bench.work.calls == 2 * 3

    def test_what_was_not_captured_cannot_run(self, bench: Bench) -> None:
        for key in (LARGE, SMALL):
            assert bench.can_run(key), f"{key} was captured and cannot run, whatever lengths_B says"
        others = ShapeKey(3, 2, "x"), ShapeKey(ROWS, 3, "x"), ShapeKey(ROWS, 2, "y")
        for unknown, what in zip(others, ("rows", "length", "variant"), strict=True):
            told = f"`can_run` says yes for what differs by `{what}` alone from a captured key"
            assert not bench.can_run(unknown), told

    def test_a_key_captured_again_is_replaced(self, bench: Bench) -> None:
        other = torch.full((3,), 7.0, device=bench.device)
        bench.capture({LARGE: lambda: (other * 2, [other + 1])})
        other.fill_(3.0)
        require_same(bench.replay(), (other * 2, [other + 1]))

    def test_every_key_has_a_graph_of_its_own(self, bench: Bench) -> None:
        """Of as many rows, or of the same area or digits, too; and of more than forty none is dropped."""
        keys = [ShapeKey(ROWS, length, variant) for length in range(1, 22) for variant in "xy"]
        keys += [ShapeKey(2, ROWS, "x"), ShapeKey(1, 64, "x"), ShapeKey(6, 41, "x")]
        keys += [ShapeKey(6, 4, "x1"), ShapeKey(ROWS, 1, "1x"), ShapeKey(ROWS, 1, "X")]
        keys += [ShapeKey(ROWS, 1, f"{'hidden.1,' * 30}{last}") for last in "23"]
        bench.capture({k: partial(bench.work.input_BH.mul, at) for at, k in enumerate(keys)})
        bench.work.vary(4)
        for at, key in enumerate(keys):
            assert bench.can_run(key), f"of {len(keys)} keys that were captured, {key} cannot run"
            require_same(bench.replay(key), bench.work.input_BH * at)

    def test_another_backend_has_graphs_of_its_own(self, bench: Bench) -> None:
        """Prefill and decoding have one each. What it runs on ends with its cleanup."""
        threads = set(threading.enumerate())
        other, batch = self.opened(), {"input_BH": bench.work.input_BH}
        assert not other.can_run(batch, LARGE), "it has another's graphs"
        with other.capture_session():
            other.capture_one(LARGE, bench.work.input_BH.neg)
        other.cleanup()
        left = set(threading.enumerate()) - threads
        until(lambda: not any(map(threading.Thread.is_alive, left)), f"cleanup leaves {left}")
        assert bench.can_run(LARGE), "the cleanup of one was that of another"

    @pytest.mark.parametrize("failing", [ShapeKey(ROWS, 9), SMALL], ids=["new", "captured"])
    @pytest.mark.parametrize("at", [1, 2, 3])
    def test_a_failing_function_leaves_the_backend_usable(
        self, bench: Bench, at: int, failing: ShapeKey
    ) -> None:
        """At either warm-up or while it is recorded; a key that was captured before is so no more.

        The process is left as it was: what collects, takes gradients and draws numbers elsewhere.
        """
        calls, drawn = list[int](), torch.manual_seed(7).get_state()

        def fail() -> Tensor:
            calls.append(1)
            if len(calls) == at:
                raise OnPurposeError("on purpose")
            return bench.work.input_BH + 1

        with torch.inference_mode(False):
            with pytest.raises(OnPurposeError):
                bench.capture({failing: fail})
            assert torch.is_grad_enabled(), "the caller's gradients are off from here on"
        assert not bench.can_run(failing), "its capture failed, and it can run"
        assert gc.isenabled(), "the garbage collector is still off"
        for session in (bench.backend.capture_session, bench.backend.replay_session):
            with pytest.raises(OnPurposeError), session():
                raise OnPurposeError("on purpose")
        bench.require_replays()
        bench.capture({failing: fail})
        bench.work.vary(5)
        require_same(bench.replay(failing), bench.work.input_BH + 1)
        same = torch.equal(torch.get_rng_state(), drawn)
        assert same, "a capture changed the state of torch's generator, which others draw from"

    def test_replay_gives_what_the_function_would_on_other_contents(self, bench: Bench) -> None:
        """The type, the keys, dtypes, shapes and every bit, in buckets of two sizes in turn.

        Outputs may be buffers; and the caller's autocast holds inside the function.
        """
        for seed, key in enumerate((SMALL, LARGE, SMALL, SMALL, LARGE, LARGE), 1):
            bench.work.vary(seed)
            bench.require_replays(key)
        with torch.autocast(bench.device.type, torch.bfloat16, cache_enabled=False):
            bench.capture({LARGE: bench.work.of(LARGE)})
            bench.require_replays()

    def test_replay_writes_static_buffers_once(self, bench: Bench) -> None:
        bench.work.steps_B.zero_()
        for key in (LARGE, LARGE, LARGE, SMALL):
            bench.replay(key)
        counted = [4] * SMALL.rows + [3] * (LARGE.rows - SMALL.rows)
        stepped = bench.work.steps_B.tolist()
        assert stepped == counted, f"rows are {stepped} steps on, of replays that each take one"

    def test_parameters_that_are_updated_in_place_are_read_as_they_are(self, bench: Bench) -> None:
        for factor in (2.0, -1.0):
            bench.work.module.weight.mul_(factor)
            bench.work.module.bias.add_(factor)
            bench.require_replays()

    def test_a_break_runs_on_what_is_there_at_replay(self, bench: Bench) -> None:
        """Of several breaks that give several outputs. What fails there is heard of."""
        self.require("breaks")
        seen: list[float] = []

        def outside(x_BH: Tensor, pair: list[Tensor]) -> Outputs:
            seen.append(float(x_BH.sum()))  # waits for the device, as no graph could
            if len(seen) == failing:
                raise OnPurposeError("on purpose")
            return {"thrice": x_BH * 3, "rest": (pair[0] - pair[1], None)}

        def broken() -> Tensor:
            hidden_BH = bench.work.input_BH
            for _ in range(2):
                inside_BH = bench.work.module(hidden_BH)
                found = run_eager(outside, inside_BH, [inside_BH, bench.work.input_BH])
                hidden_BH = found["thrice"] + found["rest"][0]
            return hidden_BH

        failing = -1
        bench.capture({LARGE: broken})
        for seed in (1, 2):
            bench.work.vary(seed)
            calls = len(seen)
            found = bench.replay().clone()
            assert len(seen) == calls + 2
            require_same(found, broken())
            assert seen[-4:-2] == seen[-2:]
        failing = len(seen) + 2
        with pytest.raises(OnPurposeError):
            bench.replay()

    def test_what_is_forked_off_and_joined_is_part_of_the_replay(self, bench: Bench) -> None:
        """On a second stream where the device has such; elsewhere the one follows the other."""
        self.require("forks")
        work, device = bench.work, bench.device
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

        bench.capture({LARGE: forked})
        for seed in (1, 2):
            work.vary(seed)
            require_same(bench.replay().clone(), forked())

    def test_after_cleanup_nothing_runs_until_it_is_captured_again(self, bench: Bench) -> None:
        bench.backend.cleanup()
        left = [key for key in (LARGE, SMALL) if bench.can_run(key)]
        assert not left, f"after cleanup {left} can run"
        bench.capture({LARGE: bench.work.of(LARGE)})
        bench.require_replays()

    def test_capturing_and_cleaning_up_again_and_again_keeps_nothing(self, bench: Bench) -> None:
        counts: list[int] = []
        with watched_bytes(bench.device) as held:
            for cycle in range(CYCLES):
                bench.capture({key: bench.work.of(key) for key in (LARGE, SMALL)})
                bench.replay()
                bench.backend.cleanup()
                if cycle in (2, CYCLES - 1):  # a look at all that a process holds takes a second
                    counts.append(held())
        # The first cycles may fill caches; one output kept per cycle would be many times this.
        assert counts[1] - counts[0] <= bench.work.input_BH.nbytes, counts

    def test_replaying_again_and_again_keeps_nothing(self, bench: Bench) -> None:
        with watched_bytes(bench.device) as held:
            bench.replay()
            before = held()
            for _ in range(REPLAYS):
                bench.replay()
            assert held() - before <= bench.work.input_BH.nbytes


def copied(outputs: Outputs) -> Outputs:
    return tree_map(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, outputs)


def require_same(found: Outputs, expected: Outputs, what: str = "what a replay returns") -> None:
    """Compare the type, the keys, dtypes, shapes and every bit."""
    ours, built = tree_flatten_with_path(found)
    theirs, right = tree_flatten_with_path(expected)
    assert built == right, f"{what} is of the form {built}, that of the function {right}"
    for (path, one), (_, other) in zip(ours, theirs, strict=True):
        assert (one is None) == (other is None), f"{what}{keystr(path)} is {one}, not {other}"
        if other is not None:
            same = one.dtype == other.dtype and torch.equal(one, other)
            assert same, f"{what}{keystr(path)}: {differing(one, other)}"
            assert not one.requires_grad, "an output is data, and needs no gradient"
