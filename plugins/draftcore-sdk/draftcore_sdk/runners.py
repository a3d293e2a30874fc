"""What every runner must do. See `draftcore_sdk` for how to use it.

The target is a tiny random Qwen3 on the CPU in fp32. A runner may pad, so its features are compared
with the eager runner's within rounding; what it decodes must be the eager runner's, token by token.

Shape letters: B batch, T tokens, K drafted tokens.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from draftcore_eval.decode import EagerRunner, right_padded, speculate
from draftcore_eval.options import EvalOptions
from draftcore_hf.decoder import DecoderModel
from draftcore_hf.target import TransformersModel, TransformersTarget
from torch import Tensor, nn
from torch.nn import functional

from draftcore.contracts.algorithm import Proposal
from draftcore.contracts.capture import FeatureRequest
from draftcore.contracts.runner import PhaseName, Runner, RunnerContext
from draftcore.contracts.target import TargetModel
from draftcore.errors import UsageError
from draftcore_sdk.captures import ROWS, capture_target, require_near
from draftcore_sdk.internals import bind, load_plugins
from draftcore_sdk.suite import Suite

REQUEST = FeatureRequest((1, 3), True, "float32")
LONGEST = 64  # tokens of a row, and positions that are read and decoded
GREEDY = EvalOptions(max_new_tokens=12)
SAMPLED = 0.4  # a temperature at which another one shows, and greedy tokens are no surprise


State = dict[str, Tensor]


class RepeatingDrafter:
    """Proposes the last token again and again; its state is that token of each row."""

    num_drafts, request = 3, REQUEST

    def allocate(self, batch: int, max_len: int) -> State:
        return {"last_B": torch.zeros(batch, dtype=torch.long)}

    def prefill(self, state: State, *given: Any) -> None:
        state["last_B"] = given[-1].clone()

    def propose(self, state: State, temperature: float = 0.0, generator: Any = None) -> Proposal:
        return Proposal(state["last_B"][:, None].repeat(1, self.num_drafts))

    def accept(self, state: State, *given: Any) -> None:
        tokens_BK, _, counts_B = given
        state["last_B"] = tokens_BK.gather(1, counts_B[:, None] - 1)[:, 0]

    def select(self, state: State, rows_B: Tensor) -> State:
        return {name: value[rows_B] for name, value in state.items()}


class CountingDrafter(RepeatingDrafter):
    """Drafts the last token; the third time plus one where its weight and its count are odd."""

    def __init__(self, vocab_size: int) -> None:
        self.module, self.vocab_size = nn.Module(), vocab_size
        self.module.register_buffer("weight", torch.zeros(1, dtype=torch.long))

    def allocate(self, batch: int, max_len: int) -> State:
        return {**super().allocate(batch, max_len), "count_B": torch.zeros(batch, dtype=torch.long)}

    def prefill(self, state: State, *given: Any) -> None:
        super().prefill(state, *given)
        state["count_B"] = given[1].clone()

    def propose(self, state: State, temperature: float = 0.0, generator: Any = None) -> Proposal:
        drafts_BK = super().propose(state).tokens_BK
        drafts_BK[:, 2] += (state["count_B"] + self.module.get_buffer("weight")) % 2
        drafts_BK %= self.vocab_size
        probs_BKV = functional.one_hot(drafts_BK, self.vocab_size).float()
        return Proposal(drafts_BK, probs_BKV if temperature > 0 else None)

    def accept(self, state: State, *given: Any) -> None:
        super().accept(state, *given)
        state["count_B"] = state["count_B"] + given[-1]


class RunnerSuite(Suite):
    """The behaviour of a runner in both phases, opened through its plugin."""

    @pytest.fixture
    def target(self, tmp_path_factory: pytest.TempPathFactory) -> DecoderModel:
        folder = tmp_path_factory.getbasetemp() / "runner-suite"
        path = folder if folder.exists() else capture_target(folder, "qwen3")
        return TransformersModel(TransformersTarget(str(path), device="cpu"))

    def runner(self, phase: PhaseName, temperature: float = 0.0) -> Runner:
        """Open the runner for a phase, as a run of batches of this suite's rows does."""
        registry = load_plugins(files=[self.loose] if self.loose else [])
        context = RunnerContext(
            phase, len(ROWS), LONGEST, temperature, "hf",
            bind=functools.partial(bind, registry), offered=registry.offered,
        )  # fmt: skip
        runner: Runner = self.open("runner", context=context)
        return runner

    @pytest.mark.parametrize("phase", ["prefill", "decode"])
    def test_a_plain_target_is_accepted(self, target: TargetModel, phase: PhaseName) -> None:
        runner = self.runner(phase)
        runner.check(target.spec)
        assert list(runner.report()) == []  # nothing was run yet

    @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
    def test_features_are_the_eager_ones_in_the_stored_type_and_stay(
        self, target: TargetModel, dtype: str
    ) -> None:
        """Also when others were run: of other rows and lengths, and for another request."""
        wide = FeatureRequest(REQUEST.layers, True, dtype, topk=2, embeddings=True)
        narrow, opened = FeatureRequest((2,), False, dtype), self.runner("prefill")
        several = (ROWS, ROWS[::-1], ROWS[:1], ROWS[:3], ROWS)
        asked = [(rows, narrow if len(rows) == 3 else wide) for rows in several]
        batches = [(*right_padded(rows, "cpu"), request) for rows, request in asked]
        own = [target.features(*given) for given in batches]  # before it can touch the target
        runner = opened.prefill(target)
        found = [runner.features(*given) for given in batches]
        for given, rows, right, features in zip(batches, several, own, found, strict=True):
            assert torch.equal(given[0], right_padded(rows, "cpu")[0]), "it changed the tokens"
            self.require_features(features, right, rows)
        assert {type(line) for line in opened.report()} <= {str}, "a line of a report is text"

    def require_features(
        self, found: Mapping[str, Tensor], own: Mapping[str, Tensor], rows: Sequence[Sequence[int]]
    ) -> None:
        """Compare with the eager ones in what is no padding; near logits may be in either order."""
        assert set(found) == set(own)
        for name, value_BTH in own.items():
            forms = [(tuple(one[name].shape), one[name].dtype) for one in (found, own)]
            assert forms[0] == forms[1], f"{name} is {forms[0]}, the eager one {forms[1]}"
            for row, tokens in enumerate(rows if name != "topk_ids" else ()):
                ours_TH, theirs_TH = (one[row, : len(tokens)] for one in (found[name], value_BTH))
                others = enumerate(one[: len(tokens)] for one in value_BTH)
                named = {f"those of row {at}": value_TH for at, value_TH in others}
                unit = 0.0 if value_BTH.dtype == torch.float32 else 2**-7  # in the last place
                require_near(ours_TH, theirs_TH, named, unit)

    @pytest.mark.parametrize("rows", [1, 3, len(ROWS)])
    def test_decoding_gives_the_tokens_and_rounds_of_eager_decoding(
        self, target: TargetModel, rows: int
    ) -> None:
        """Also in later batches, for which the runner may keep what it has from the first.

        They may be shorter, and the draft is trained in between: its weights change in place.
        """
        prompts, drafter = ROWS[:rows], CountingDrafter(target.spec.vocab_size)
        opened = self.runner("decode")
        decoder = opened.decode(target, drafter, drafter.module)
        decoder.reserve(rows, LONGEST)
        for batch in (prompts, prompts[::-1], prompts[-1:], prompts):
            eager = speculate(EagerRunner(target, drafter), batch, GREEDY)
            for one, right in zip(speculate(decoder, batch, GREEDY), eager, strict=True):
                same = one.tokens == right.tokens
                assert same, f"other tokens than the eager ones after {one.prompt}"
                said = f"{one.accepted} were accepted in its rounds, {right.accepted} are"
                assert one == right, said
            drafter.module.get_buffer("weight").add_(1)
        assert {type(line) for line in opened.report()} <= {str}, "a line of a report is text"

    def test_plain_steps_are_the_targets_greedy_ones(self, target: TargetModel) -> None:
        """The speedup that an evaluation tells of is measured by them. The first ones may record them."""
        drafter = CountingDrafter(target.spec.vocab_size)
        decoder = self.runner("decode").decode(target, drafter, drafter.module)
        decoder.reserve(2, LONGEST)
        prompts, found = [ROWS[0], ROWS[4]], list[list[int]]()
        for _ in range(2):
            rows, found = decoder.start(prompts, LONGEST, 0.0, 0), []
            for step in range(4):
                found.append(rows.last_B.tolist())
                rows.plain(len(ROWS[4]) + step + 1)
        steps = [list(row) for row in zip(*found, strict=True)]
        assert steps == target.generate(prompts, 4), "these tokens are not greedy"

    def test_sampling_is_seeded_and_has_the_targets_distribution(
        self, target: DecoderModel
    ) -> None:
        """A token's log-probability has a known mean and variance, so their sums are normal."""
        runner, drafter = self.runner("decode", SAMPLED), CountingDrafter(target.spec.vocab_size)
        try:
            runner.check(target.spec)
        except UsageError as error:
            pytest.skip(f"it does not sample: {error}")
        decoder = runner.decode(target, drafter, drafter.module)
        decoder.reserve(len(ROWS), LONGEST)
        seeds = (0, 0, *range(1, 12))
        configs = [GREEDY.model_copy(update={"temperature": SAMPLED, "seed": s}) for s in seeds]
        first, again, *others = (speculate(decoder, ROWS, config) for config in configs)
        assert first == again, "one seed gives different tokens"
        assert first != others[0], "another seed gives the same tokens"
        surplus = variance = 0.0
        for one in [*first, *(one for some in others for one in some)]:
            tokens_1T = torch.tensor([[*one.prompt, *one.tokens]])
            logits_TV = target.model(input_ids=tokens_1T).logits[0, len(one.prompt) - 1 : -1]
            logp_TV = (logits_TV.double() / SAMPLED).log_softmax(-1)
            mean_T = (logp_TV.exp() * logp_TV).sum(-1)
            drawn_T = logp_TV.gather(1, torch.tensor(one.tokens)[:, None])[:, 0]
            surplus += float((drawn_T - mean_T).sum())
            variance += float((logp_TV.exp() * (logp_TV - mean_T[:, None]) ** 2).sum())
        sigmas = surplus / variance**0.5
        said = f"tokens are {sigmas:+.1f} sigmas likelier than at temperature {SAMPLED}"
        assert abs(sigmas) < 5, said
