"""What every runner must do. See `draftcore_sdk` for how to use it.

The target is a tiny random Qwen3 on the CPU in fp32. A runner may pad, so its features are compared
with the eager runner's within rounding; what it decodes must be the eager runner's, token by token.

Shape letters: B batch, T tokens, K drafted tokens.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from draftcore.config import EvalConfig
from draftcore.contracts.capture import FeatureRequest
from draftcore.contracts.runner import PhaseName, Runner, RunnerContext
from draftcore.contracts.target import TargetModel
from draftcore.evaluation.decode import EagerRunner, right_padded, speculate
from draftcore.plugins.binding import bind
from draftcore.plugins.registry import load
from draftcore.target import TransformersModel, TransformersTarget
from draftcore_sdk.captures import ROUNDING, ROWS, capture_target
from draftcore_sdk.suite import Suite

REQUEST = FeatureRequest((1, 3), True, "float32")
LONGEST = 64  # tokens of a row, and positions that are read and decoded
GREEDY = EvalConfig(max_new_tokens=12)


class RepeatingDrafter:
    """Proposes the last token again and again; its state is that token of each row."""

    num_drafts, request = 3, REQUEST

    def allocate(self, batch: int, max_len: int) -> dict[str, Tensor]:
        return {"last_B": torch.zeros(batch, dtype=torch.long)}

    def prefill(
        self,
        state: dict[str, Tensor],
        tokens_BT: Tensor,
        lengths_B: Tensor,
        features: Mapping[str, Tensor],
        next_B: Tensor,
    ) -> None:
        state["last_B"] = next_B.clone()

    def propose(
        self, state: dict[str, Tensor], temperature: float = 0.0, generator: Any = None
    ) -> tuple[Tensor, None]:
        return state["last_B"][:, None].repeat(1, self.num_drafts), None

    def accept(
        self,
        state: dict[str, Tensor],
        tokens_BK: Tensor,
        features: Mapping[str, Tensor],
        counts_B: Tensor,
    ) -> None:
        state["last_B"] = tokens_BK.gather(1, counts_B[:, None] - 1)[:, 0]

    def select(self, state: dict[str, Tensor], rows_B: Tensor) -> dict[str, Tensor]:
        return {"last_B": state["last_B"][rows_B]}


class RunnerSuite(Suite):
    """The behaviour of a runner in both phases, opened through its plugin."""

    # ------------------------------------------------------------ fixtures

    @pytest.fixture
    def target(self, tmp_path_factory: pytest.TempPathFactory) -> TargetModel:
        folder = tmp_path_factory.getbasetemp() / "runner-suite"
        path = folder if folder.exists() else capture_target(folder)
        return TransformersModel(TransformersTarget(str(path), device="cpu"))

    def runner(self, phase: PhaseName) -> Runner:
        """Open the runner for a phase, as a run of batches of this suite's rows does."""
        registry = load(files=[self.loose] if self.loose else [])
        context = RunnerContext(
            phase=phase,
            rows=len(ROWS),
            longest=LONGEST,
            temperature=0.0,
            capture="hf",
            bind=functools.partial(bind, registry),
            offered=registry.offered,
        )
        runner: Runner = self.open("runner", context=context)
        return runner

    # ------------------------------------------------------------ before anything runs

    @pytest.mark.parametrize("phase", ["prefill", "decode"])
    def test_a_plain_target_is_accepted_and_the_plan_is_text(
        self, target: TargetModel, phase: PhaseName
    ) -> None:
        runner = self.runner(phase)
        runner.check(target.spec)
        for line in runner.plan(target.spec):
            assert [type(cell) for cell in line] == [str, str, str]
        assert list(runner.report()) == []  # nothing was run yet

    # ------------------------------------------------------------ prefill

    @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
    def test_features_are_the_eager_ones_in_the_stored_type_and_stay(
        self, target: TargetModel, dtype: str
    ) -> None:
        """Also when the next batch was run."""
        request = FeatureRequest(REQUEST.layers, True, dtype)
        tokens_BT, lengths_B = right_padded(ROWS, "cpu")
        own = target.features(tokens_BT, lengths_B, request)
        runner = self.runner("prefill").prefill(target)
        found = runner.features(tokens_BT, lengths_B, request)
        runner.features(tokens_BT.flip(0), lengths_B.flip(0), request)
        assert set(found) == set(request.names)
        rounding = ROUNDING if dtype == "float32" else 2**-7  # one unit in the last place
        for name, value_BTH in found.items():
            assert value_BTH.dtype == getattr(torch, dtype)
            for row, length in enumerate(lengths_B.tolist()):
                ours, theirs = value_BTH[row, :length].double(), own[name][row, :length].double()
                assert (ours - theirs).abs().max() <= rounding * theirs.abs().max(), name

    # ------------------------------------------------------------ decode

    @pytest.mark.parametrize("rows", [1, 3, len(ROWS)])
    def test_decoding_gives_the_tokens_and_rounds_of_eager_decoding(
        self, target: TargetModel, rows: int
    ) -> None:
        """Also in a second batch, for which the runner may keep what it has from the first."""
        prompts, drafter = ROWS[:rows], RepeatingDrafter()
        decoder = self.runner("decode").decode(target, drafter, nn.Module())
        decoder.reserve(rows, LONGEST)
        for batch in (prompts, prompts[::-1]):
            eager = speculate(EagerRunner(target, drafter), batch, GREEDY)
            assert speculate(decoder, batch, GREEDY) == eager
