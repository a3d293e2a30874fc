"""A tiny target, a drafter that needs no training, and segments on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path

import pytest
from draftcore_graphs.backend import SegmentBackend
from draftcore_graphs.recording import Tape
from draftcore_hf.target import TransformersModel, TransformersTarget
from draftcore_sdk.runners import CountingDrafter
from draftcore_sdk.targets import tiny_target
from torch import Tensor

from draftcore.contracts.target import TargetModel


@pytest.fixture(scope="session")
def target_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def target(target_folder: Path) -> TargetModel:
    return TransformersModel(TransformersTarget(str(target_folder), device="cpu"))


@pytest.fixture
def own_target(target_folder: Path) -> TransformersModel:
    """The same target for one test, to be changed."""
    return TransformersModel(TransformersTarget(str(target_folder), device="cpu"))


@pytest.fixture
def windowed(tmp_path: Path) -> TargetModel:
    """A target of which every other layer sees three tokens."""
    layers = ["sliding_attention", "full_attention"] * 3
    folder = tiny_target(tmp_path, layer_types=layers, use_sliding_window=True, sliding_window=3)
    return TransformersModel(TransformersTarget(str(folder), device="cpu"))


@pytest.fixture
def drafter(target: TargetModel) -> CountingDrafter:
    return CountingDrafter(target.spec.vocab_size)


@pytest.fixture
def prompts() -> list[list[int]]:
    return [[5, 9, 5, 9, 5], list(range(40, 60)), [7], [11, 12, 13, 11, 12, 13, 11]]


class CpuSegments:
    """Segments as `recording` tapes them; `ended` counts them."""

    tape: Tape | None = None
    ended = 0

    def isolated(self) -> AbstractContextManager[None]:
        return nullcontext()

    @contextmanager
    def recording(self) -> Iterator[None]:
        try:
            yield
        finally:
            if self.tape is not None:
                self.end()

    def begin(self) -> None:
        assert self.tape is None, "two segments at a time"
        self.tape = Tape()
        self.tape.__enter__()  # type: ignore[no-untyped-call]

    def end(self) -> Callable[[], None]:
        """Every tensor of a segment keeps its place; what is computed is there when it runs."""
        assert self.tape is not None, "no segment was begun"
        tape, self.tape = self.tape, None
        tape.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        self.ended += 1
        # An allocation is no kernel.
        tape.steps = [step for step in tape.steps if "empty" not in str(step[0])]
        outside = {value.untyped_storage().data_ptr() for value, _ in tape.read.values()}
        tape.outputs = [
            tensor
            for func, *_, made in tape.steps
            for tensor in made
            if not (func.is_view or tensor.untyped_storage().data_ptr() in outside)
        ]
        for tensor in tape.outputs:
            if tensor.is_floating_point():
                tensor.fill_(float("nan"))
        return tape.replay

    def pin(self, tensor: Tensor) -> Callable[[], Tensor]:
        return lambda: tensor

    def closing(self) -> AbstractContextManager[None]:
        return nullcontext()


@pytest.fixture
def segments() -> CpuSegments:
    return CpuSegments()


@pytest.fixture
def backend(segments: CpuSegments) -> SegmentBackend:
    """`breakable`, on the CPU."""
    return SegmentBackend(lambda device: segments, breaks=True)
