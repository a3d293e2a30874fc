"""A tiny target, a drafter that needs no training, and segments on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from draftcore_graphs.backend import SegmentBackend
from draftcore_sdk.targets import tiny_target
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from draftcore.contracts.capture import FeatureRequest
from draftcore.contracts.target import TargetModel
from draftcore.target import TransformersModel, TransformersTarget

PROMPTS = [[5, 9, 5, 9, 5], list(range(40, 60)), [7], [11, 12, 13, 11, 12, 13, 11]]


@dataclass
class Followed:
    """Per row what followed each token, and the last token."""

    table_BV: Tensor
    last_B: Tensor


class FollowDrafter:
    """Proposes what followed a token before, plus the weight of `shift`, by which it can be moved."""

    def __init__(self, vocabulary: int, num_drafts: int = 4) -> None:
        self.vocabulary, self.num_drafts = vocabulary, num_drafts
        self.request = FeatureRequest((1,), True, "float32")
        self.module = nn.Module()
        self.module.shift = nn.Parameter(torch.zeros(1))

    def allocate(self, batch: int, max_len: int) -> Followed:
        table_BV = torch.zeros(batch, self.vocabulary, dtype=torch.long)
        return Followed(table_BV, torch.zeros(batch, dtype=torch.long))

    def prefill(
        self,
        state: Followed,
        tokens_BT: Tensor,
        lengths_B: Tensor,
        features: Mapping[str, Tensor],
        next_B: Tensor,
    ) -> None:
        for at in range(tokens_BT.shape[1]):
            inside_B = at < lengths_B
            last_B = at == lengths_B - 1
            follows_B = tokens_BT[:, min(at + 1, tokens_BT.shape[1] - 1)]
            self._note(state, tokens_BT[:, at], torch.where(last_B, next_B, follows_B), inside_B)
        state.last_B = next_B.clone()

    def propose(
        self, state: Followed, temperature: float = 0.0, generator: Any = None
    ) -> tuple[Tensor, None]:
        token_B, drafts = state.last_B, []
        for _ in range(self.num_drafts):
            token_B = state.table_BV.gather(1, token_B[:, None])[:, 0]
            drafts.append((token_B + self.module.shift.long()) % self.vocabulary)
        return torch.stack(drafts, 1), None

    def accept(
        self, state: Followed, tokens_BK: Tensor, features: Mapping[str, Tensor], counts_B: Tensor
    ) -> None:
        before_B = state.last_B
        for at in range(tokens_BK.shape[1]):
            new_B = at < counts_B
            self._note(state, before_B, tokens_BK[:, at], new_B)
            before_B = torch.where(new_B, tokens_BK[:, at], before_B)
        state.last_B = before_B

    def select(self, state: Followed, rows_B: Tensor) -> Followed:
        return Followed(state.table_BV[rows_B], state.last_B[rows_B])

    def _note(self, state: Followed, a_B: Tensor, b_B: Tensor, valid_B: Tensor) -> None:
        old_B = state.table_BV.gather(1, a_B[:, None])[:, 0]
        state.table_BV.scatter_(1, a_B[:, None], torch.where(valid_B, b_B, old_B)[:, None])


@pytest.fixture(scope="session")
def target_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def target(target_folder: Path) -> TargetModel:
    return TransformersModel(TransformersTarget(str(target_folder), device="cpu"))


@pytest.fixture
def drafter(target: TargetModel) -> FollowDrafter:
    return FollowDrafter(target.spec.vocab_size)


@pytest.fixture
def prompts() -> list[list[int]]:
    return PROMPTS


# ---------------------------------------------------------------- segments


class Tape(TorchDispatchMode):
    """Operations at fixed addresses: a replay reads and writes the memory of the recording.

    Recording fills outputs with nan, as a capture computes nothing.
    """

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[Callable[[], None]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func.overloadpacket.__name__ in ("_local_scalar_dense", "nonzero"):
            raise RuntimeError("operation not permitted when stream is capturing")
        given = {
            leaf.data_ptr() for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)
        }
        writes = func._schema.is_mutable
        kept = tree_map(lambda x: x.clone() if isinstance(x, Tensor) and writes else x, args)
        result = func(*args, **kwargs)
        made = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        fresh = [tensor for tensor in made if tensor.data_ptr() not in given and not func.is_view]

        def step() -> None:
            again = [x for x in tree_leaves(func(*args, **kwargs)) if isinstance(x, Tensor)]
            for place, value in zip(made, again, strict=True):
                if place.data_ptr() != value.data_ptr():
                    place.copy_(value)

        if "empty" not in func.overloadpacket.__name__:  # an allocation is no kernel
            self.steps.append(step)
        for tensor in fresh:
            if tensor.is_floating_point():
                tensor.fill_(float("nan"))
        if writes:  # nothing was written yet
            for argument, before in zip(args, kept, strict=True):
                if isinstance(argument, Tensor):
                    argument.copy_(before)
        return result

    def run(self) -> None:
        with torch.inference_mode():
            for step in self.steps:
                step()


class CpuSegments:
    """Does what CUDA's capture does, with operations for kernels; `ended` counts the segments."""

    def __init__(self, device: torch.device | None = None) -> None:
        self.tape: Tape | None = None
        self.ended = 0

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
        self.tape.__enter__()

    def end(self) -> Callable[[], None]:
        assert self.tape is not None, "no segment was begun"
        tape, self.tape = self.tape, None
        tape.__exit__(None, None, None)
        self.ended += 1
        return tape.run

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
