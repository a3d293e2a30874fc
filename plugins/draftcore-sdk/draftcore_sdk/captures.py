"""What every capture backend must do. See `draftcore_sdk` for how to use it.

The target is a tiny random Gemma 2 on the CPU in fp32, which scales its embeddings, caps its logits and
has a sliding window in every other layer. Its reference is transformers' own forward pass, row by row
and without padding. A backend that reads its target elsewhere than from a folder, such as a running
server, overrides `target_folder` and serves what `capture_target` writes, of a family that it can serve.

Other implementations add in another order than transformers does, so features are compared with
the reference within rounding; a backend is compared with itself bit by bit. A backend that claims
`topk` or `embeddings` is tested for those as well.

Shape letters: T tokens, H width, K logits, V vocabulary.
"""

import copy
import functools
import itertools
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
from draftcore_hf.decoder import decoder_model
from draftcore_hf.target import TransformersTarget
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from draftcore.contracts.capture import (
    BadRows,
    Capture,
    CaptureBatch,
    CapturedBatch,
    FeatureRequest,
)
from draftcore.contracts.offers import SAME_FEATURES
from draftcore.contracts.target import TargetSpec
from draftcore.errors import UsageError
from draftcore_sdk.memory import CYCLES, differing, of_the_process, watched_bytes
from draftcore_sdk.suite import Suite, bound, opened
from draftcore_sdk.targets import tiny_target

OpenCapture = Callable[..., Capture]
Open = OpenCapture
LAYERS, WIDTH, POSITIONS = 4, 32, 1024
# What pads a batch, and what ends an answer, may stand within a row: 0, 257 and 258 do in the fifth.
ODD = [*range(90, 100), 0, 257, *range(101, 110), 258, *range(111, 130)]
ROWS = ([5, 6, 7], list(range(40, 60)), [9, 9, 9, 9, 1], [11], ODD)
# The last is longer than a buffer or limit of 512.
ALL_ROWS = (*ROWS, [at * 7 % 250 for at in range(600)])
# fp32 rounding over a few layers is a few 1e-7 of the largest number; another layer's output, or
# the state before the final norm, differs by a tenth of it and more.
ROUNDING = 1e-4
REQUESTS = {
    "first layer": FeatureRequest((0,), False, "float32"),
    "last hidden": FeatureRequest((), True, "float32"), "both": FeatureRequest((1, 3), True, "float32"),
    "every layer": FeatureRequest(tuple(range(LAYERS)), True, "float32"),
    "bfloat16": FeatureRequest((0, 2), True, "bfloat16"), "float16": FeatureRequest((3,), True, "float16"),
    "topk": FeatureRequest((), False, "float16", topk=5),
    "embeddings": FeatureRequest((1,), False, "bfloat16", embeddings=True),
}  # fmt: skip
ALL = REQUESTS["every layer"]
WIDEST = replace(ALL, topk=5, embeddings=True)
ELSEWHERE = "the target does not run in this process"
LEARNED: Any = {"n_embd": 16, "n_head": 2, "n_layer": 2, "n_positions": 64, "vocab_size": 70_000}
FOLDER = "capture-suite"
# How far a number may be off in a type, relative to itself, where it was rounded once.
HALVES = {"bfloat16": 2**-8, "float16": 2**-11}
HUGE = "numbers beyond float16"


class CaptureSuite(Suite):
    """The behaviour of a capture backend, opened through its plugin."""

    @pytest.fixture
    def target_folder(self, tmp_path_factory: pytest.TempPathFactory) -> Path:
        """The folder of the target, written once per session."""
        folder = tmp_path_factory.getbasetemp() / FOLDER
        return folder if folder.exists() else capture_target(folder)

    @pytest.fixture
    def target(self, target_folder: Path) -> TargetSpec:
        return TransformersTarget(str(target_folder), device="cpu")

    @pytest.fixture
    def open_capture(self, target: TargetSpec) -> Iterator[Open]:
        """Open the backend for a request, any number of times; all are closed at the end."""
        captures: list[Capture] = []

        def opener(request: FeatureRequest, target: TargetSpec = target, **options: Any) -> Capture:
            asked = {name for name in ("topk", "embeddings") if getattr(request, name)}
            if lacking := asked - set(self.said("capture", "")):
                pytest.skip(f"the capture does not claim {' and '.join(sorted(lacking))}")
            options, given = {**self.options, **options}, {"target": target, "request": request}
            captures.append(opened(self.plugin, "capture", self.name, options, **given))
            return captures[-1]

        yield opener
        for capture in captures:
            capture.close()

    @pytest.fixture
    def watch(self, target: TargetSpec) -> Iterator["Watch"]:
        with suppress(UsageError):  # devices share it
            watch = Watch(decoder_model(target.load_model(), "this test"))
            yield watch
            watch.hook.remove()
            return
        pytest.skip(ELSEWHERE)

    @property
    def everything(self) -> FeatureRequest:
        """All that the backend says it gives."""
        said = self.said("capture", "")
        return replace(ALL, topk=5 * ("topk" in said), embeddings="embeddings" in said)

    @pytest.mark.parametrize("shape", REQUESTS)
    def test_features_are_those_asked_and_as_long_as_their_tokens(
        self, open_capture: Open, shape: str
    ) -> None:
        """Also where the batch is padded to its longest row, and where it is one row."""
        request, forms = REQUESTS[shape], REQUESTS[shape].feature_specs(WIDTH)
        capture = open_capture(request)
        for rows in ((1, 3, 0), (1, 0), (3,), (3, 4), (3, 5)):
            for features, row in zip(features_of(capture, batch(*rows)), rows, strict=True):
                assert set(features) == set(request.names)
                for name, value in features.items():
                    size, dtype = forms[name]
                    form = (tuple(value.shape), str(value.dtype).removeprefix("torch."))
                    right = (len(ALL_ROWS[row]), size), dtype
                    others = {len(ALL_ROWS[r]) for r in rows} - {len(ALL_ROWS[row])}
                    moved = "\nit is as long as another row of the batch" * (form[0][0] in others)
                    assert form == right, f"{name} is {form}, which should be {right}{moved}"
                    assert not value.requires_grad, "features are data: capture without gradients"

    def test_capturing_leaves_the_targets_logits_unchanged(
        self, open_capture: Open, target: TargetSpec
    ) -> None:
        tokens = torch.tensor([ROWS[1]])
        model = decoder_model(target.load_model(), "this test").model
        before_TV = model(input_ids=tokens).logits
        capture = open_capture(REQUESTS["both"])
        list(capture.features([batch(0, 1), batch(2)]))
        assert torch.equal(model(input_ids=tokens).logits, before_TV)
        capture.close()
        assert torch.equal(model(input_ids=tokens).logits, before_TV)

    @pytest.mark.parametrize("name", WIDEST.names)
    def test_features_are_the_ones_of_their_name(
        self, open_capture: Open, target_folder: Path, name: str
    ) -> None:
        """`hidden.k` is the output of layer k, counted from 0; transformers counts the embedding.

        That of the last layer is the state before the final norm, `last_hidden` the one after it.
        """
        reference, rows = reference_of(target_folder), (0, 1, 3, 4, 5)
        capture = open_capture(self.everything if name in self.everything.names else WIDEST)
        for row in rows:
            (features,), tokens = features_of(capture, batch(row)), ALL_ROWS[row]
            states, logits_TV = reference.features(tokens), reference.logits(tokens)
            if "topk" in name:
                head_VH = reference.model.get_output_embeddings().weight.detach()
                head_TV = states["last_hidden"] @ head_VH.T
                require_largest(features, logits_TV, head_TV)
            else:
                states["embeddings"] = reference.embeddings(tokens)
                norm, named = reference.decoder.norm, list(states.items())
                table_VH = reference.model.get_input_embeddings().weight.detach()
                states["rows of the embedding table"] = table_VH[list(tokens)]
                normed = {f"the final norm of {what}": norm(value) for what, value in named}
                require_near(features[name], states[name], {**states, **normed})

    def test_batches_and_rows_keep_their_order(
        self, open_capture: Open, target_folder: Path
    ) -> None:
        """Rows of one length: only their values tell them apart. So too where a row cannot be captured."""
        rows = [[20 + row, 30 + row, 40 + row] for row in range(40)]
        parts = {7: [rows[3], rows[0]], 2: [rows[4]], 5: rows[5:]}
        asked = [batch(members=some, index=index) for index, some in parts.items()]
        captured = list(open_capture(REQUESTS["first layer"]).features(asked))
        assert [one.batch for one in captured] == asked
        state_of = functools.partial(reference_of(target_folder).state, "hidden.0")
        states = {f"those of {row}": state_of(row) for row in rows}
        for one, ask in zip(captured, asked, strict=True):
            for features, tokens in zip(one.features, ask.token_ids, strict=True):
                require_near(features["hidden.0"], states[f"those of {tokens}"], states)
        too_long = batch(members=[rows[0], [at % 250 for at in range(POSITIONS + 1)]], rows=(1, 0))
        bad = {1}
        try:
            features_of(open_capture(REQUESTS["first layer"]), too_long)
        except BadRows as error:
            bad = {*error.reasons}
        assert bad == {1}, f"BadRows has {bad}: the second row of the batch is too long, which is 1"

    def test_positions_are_a_rows_own_and_no_token_id_is_too_large(
        self, open_capture: Open, target: TargetSpec, target_folder: Path, tmp_path: Path
    ) -> None:
        """Of another target, of learned positions and many tokens, each two of one logit, if not refused."""
        if target_folder.name != FOLDER or not isinstance(target, TransformersTarget):
            pytest.skip("the suite chooses no other target")
        rows = ([65_541, 69_999, 3, 4], [9, 8], [5, 65_540, 7])
        file = tiny_target(tmp_path, "gpt2", **LEARNED) / "model.safetensors"
        tensors = load_file(file)
        tensors["lm_head.weight"][1::2] = tensors["lm_head.weight"][::2]
        save_file(tensors, file, {"format": "pt"})
        other = TransformersTarget(str(tmp_path), device="cpu")
        asked = replace(self.everything, layers=(0,))
        try:
            capture = open_capture(asked, other)
        except UsageError as error:
            pytest.skip(str(error))
        reference = Reference(tmp_path)
        for features, row in zip(features_of(capture, batch(members=rows)), rows, strict=True):
            if asked.topk:
                require_largest(features, *[reference.logits(row)] * 2)
            for name in replace(asked, topk=0).names:
                said = [row, [token % 65_536 for token in row]]
                right_TH, cut_TH = (reference.state(name, tokens) for tokens in said)
                require_near(features[name], right_TH, {"those of ids of 16 bits": cut_TH})

    @pytest.mark.parametrize("dtype", [*HALVES, HUGE])
    def test_a_stored_type_holds_the_numbers_of_float32(
        self, open_capture: Open, target_folder: Path, dtype: str, request: pytest.FixtureRequest
    ) -> None:
        """Rounded to it, once. What it does not hold stays inf, and nan stays nan: they end a run."""
        if dtype == HUGE:
            watch, reference = request.getfixturevalue("watch"), Reference(target_folder)
            captures = [open_capture(replace(ALL, dtype=each)) for each in (*HALVES, "float32")]
            with torch.no_grad():
                for model in (watch.model, reference.decoder, reference.without_norm):
                    model.get_input_embeddings().weight.mul_(1e5)[ROWS[0][-1]] = torch.nan
            for capture, row in itertools.product(captures, (1, 0)):
                watch.runs, found = [], dict[str, Tensor]()
                with suppress(Exception):  # an error hides nothing
                    found |= features_of(capture, batch(row))[0]
                watch.require_runs_here()
                require_kept(found, reference.features(ROWS[row]))
            return
        requests = replace(self.everything, dtype=dtype), self.everything
        pairs = (features_of(open_capture(request), batch(0, 1)) for request in requests)
        for found, right in zip(*pairs, strict=True):
            for name in self.everything.names:
                if name != "topk_ids":
                    require_near(found[name].float(), right[name], rounded=HALVES[dtype])
                elif not torch.equal(found[name], right[name]):
                    pytest.fail(f"{name} are others in {dtype}: choose them, then round the logits")

    @pytest.mark.parametrize("beyond", [LAYERS, -1])
    def test_a_layer_out_of_range_is_refused_with_the_range(
        self, open_capture: Open, beyond: int
    ) -> None:
        with pytest.raises(UsageError) as caught:
            open_capture(FeatureRequest((0, beyond), True, "float32"))
        numbers = re.findall(r"-?\d+", str(caught.value))
        assert {"0", str(LAYERS - 1), str(beyond)} <= set(numbers), caught.value

    def test_a_rows_features_do_not_depend_on_its_neighbours(self, open_capture: Open) -> None:
        """Within rounding: a batch of another shape adds in another order."""
        capture = open_capture(self.everything)
        together = features_of(capture, batch(0, 4, 2))
        for features, row in zip(together, (0, 4, 2), strict=True):
            (alone,) = features_of(capture, batch(row))
            for name in self.everything.names:
                if name != "topk_ids":
                    require_near(features[name], alone[name])

    def test_no_token_sees_what_follows(self, open_capture: Open) -> None:
        (whole,) = features_of(capture := open_capture(ALL), batch(1))
        (begun,) = features_of(capture, batch(members=[ROWS[1][:9]]))
        for name in ALL.names:
            require_near(whole[name][:9], begun[name])

    def test_a_batch_has_the_same_bits_whatever_is_captured_before_and_with_it(
        self, open_capture: Open
    ) -> None:
        """What a run resumed after a crash captures again must be what it had.

        Also with an option that is said to change no bit: those that are off are put on.
        """
        asked, capture = batch(0, 1, 2), open_capture(self.everything)
        first = features_of(open_capture(self.everything), asked)
        for found in list(capture.features([batch(1, 4), asked, batch(3), asked]))[1::2]:
            require_same(found.features, first)
        require_same(features_of(capture, asked), first)
        for name, value in switches(bound(self.plugin, "capture", self.name, self.options).options):
            other = features_of(open_capture(self.everything, **{name: not value}), asked)
            require_same(other, first, f"{name}={not value}, which says SAME_FEATURES: ")

    def test_joined_requests_give_the_bits_of_each(self, open_capture: Open) -> None:
        """Algorithms that train side by side share one capture."""
        other = replace(self.everything, layers=(2, 3), embeddings=False)
        one = replace(self.everything, layers=(2, 0), last_hidden=False, topk=other.topk // 2)
        joined = features_of(open_capture(one.union(other)), batch(0, 1))
        for request in (one, other):
            parts = [request.select(features) for features in joined]
            require_same(parts, features_of(open_capture(request), batch(0, 1)))

    @torch.enable_grad()
    def test_the_target_runs_in_eval_mode_without_gradients_and_is_left_so(
        self, open_capture: Open, watch: "Watch"
    ) -> None:
        """Gradients would hold what every layer computed, for as long as the features are held."""
        modes = [part.training for part in watch.model.modules()]
        features_of(open_capture(ALL), batch(0, 1))
        watch.require_runs_here()
        gradients, training = map(any, zip(*watch.runs, strict=True))
        assert not gradients, "the target ran with gradients on"
        assert not training, "the target ran in training mode"
        after = [part.training for part in watch.model.modules()]
        assert after == modes, "the target was left in another mode than it came in"

    def test_an_error_of_the_target_is_one_that_may_be_tried_again(
        self, open_capture: Open, watch: "Watch"
    ) -> None:
        """Features in its place would be trained on, and rows that are called bad would be left out."""
        for error in (LookupError("on purpose"), RuntimeError("CUDA error: on purpose")):
            watch.fails, raised = None, None
            capture = open_capture(ALL)
            watch.runs, watch.fails = [], error  # a test of itself may have run the target here
            try:
                came = len(list(capture.features([batch(0, 1)])))
            except Exception as found:
                raised = found
            else:
                watch.require_runs_here()
                pytest.fail(f"the target raised {error!r}, and features of {came} batches came")
            final = isinstance(raised, BadRows | UsageError)
            assert not final, f"{error!r} of the target became {raised!r}, which is not tried again"

    def test_a_target_that_it_would_misread_is_refused_when_it_is_opened(
        self, open_capture: Open, watch: "Watch"
    ) -> None:
        """Here the last hidden state times the head is not what the model predicts."""
        head = watch.model.get_output_embeddings()
        head.register_forward_hook(lambda module, given, logits: logits * 2)
        try:
            capture = open_capture(ALL)
        except UsageError:
            return
        watch.runs = []
        features_of(capture, batch(0))
        watch.require_runs_here()
        pytest.fail("it was opened: the target's `load_model().check()` says what is wrong")

    def test_batches_are_asked_for_as_features_are_taken(self, open_capture: Open) -> None:
        """A data set does not fit into memory: some look-ahead is welcome, all of it is not.

        Batches that end by an error are not all that there were.
        """
        asked: list[int] = []

        def batches() -> Iterator[CaptureBatch]:
            for index in range(64):
                asked.append(index)
                yield batch(3, index=index)

        capture = open_capture(REQUESTS["first layer"])
        captured = iter(capture.features(batches()))
        assert next(captured).batch.index == 0
        assert len(asked) < 64, "all 64 batches were taken before the features of one came"
        assert [one.batch.index for one in captured] == list(range(1, 64))
        assert list(capture.features(())) == [], "there were no batches"

        def broken() -> Iterator[CaptureBatch]:
            yield batch(3)
            raise LookupError("the data cannot be read")

        with suppress(Exception):
            list(capture.features(broken()))
            pytest.fail("an error ended the batches, and features end as if all had come")

    @torch.enable_grad()
    def test_capturing_changes_nothing_that_training_reads(self, open_capture: Open) -> None:
        """A rank captures its batches between its steps."""
        before = of_the_process() | self.began  # also what another test's capture set
        for _ in open_capture(ALL).features([batch(0, 1, 2), batch(3)]):
            now = of_the_process()
            changed = [name for name, value in before.items() if now[name] != value]
            assert not changed, f"the next step would draw or compute otherwise: {changed}"

    def test_capturing_again_and_again_keeps_nothing(self, open_capture: Open) -> None:
        capture, held = open_capture(ALL), list[int]()
        with watched_bytes(torch.device("cpu")) as bytes_held:
            for _ in range(CYCLES):
                features_of(capture, batch(0, 1))
                held.append(bytes_held())
        assert held[-1] <= held[2], f"bytes held after each batch: {held}"

    def test_closing_is_harmless_twice_and_to_another_capture(
        self, open_capture: Open, target: TargetSpec
    ) -> None:
        """An evaluation during training opens one of its own. What was not taken is waited for by none."""
        first = open_capture(REQUESTS["both"])
        features_of(first, batch(0))  # transformers leaves hooks of its own, once
        first.close()
        hooks = hooks_of(target)
        capture, other = (open_capture(REQUESTS["both"]) for _ in range(2))
        before = features_of(other, batch(0))
        features_of(capture, batch(0))
        threads = set(threading.enumerate())
        taken = iter(capture.features(batch(0, index=index) for index in range(9)))
        next(taken)
        del taken  # the run ends here
        begun = {one for one in threading.enumerate() if not one.daemon} - threads
        capture.close()
        for thread in begun:
            thread.join(20)
            told = "a thread waits for its batches to be taken: no process ends before it does"
            assert not thread.is_alive(), told
        capture.close()
        require_same(features_of(other, batch(0)), before)
        other.close()
        assert hooks_of(target) == hooks, f"closed captures leave hooks: {hooks_of(target)}"


def hooks_of(target: TargetSpec) -> list[str]:
    """Name each hook on a module of a target that runs in this process."""
    with suppress(UsageError):  # devices share it
        modules = decoder_model(target.load_model(), "this test").model.named_modules()
        kinds = ((name, kind, own) for name, one in modules for kind, own in vars(one).items())
        return [f"{kind} of {n}" for n, kind, own in kinds if kind.endswith("_hooks") for _ in own]
    return []


def capture_target(folder: Path, family: str = "gemma2", **shape: Any) -> Path:
    """Write the target of this suite into `folder`.

    An engine that has no kernels for it asks for another family, such as `qwen3`, or another `shape`.
    """
    shape = {"hidden_size": WIDTH, "num_hidden_layers": LAYERS, **shape}
    tiny_target(folder, family, **shape, max_position_embeddings=POSITIONS)
    model = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        # A norm that does more than scale: another weight for each of the state's numbers.
        model.get_decoder().norm.weight.copy_(torch.linspace(0.5, 1.5, WIDTH))
    model.save_pretrained(folder)
    return folder


def batch(
    *numbers: int, members: Sequence[Sequence[int]] = (), rows: Sequence[int] = (), index: int = 0
) -> CaptureBatch:
    """Make a batch of these rows of ALL_ROWS, or of any tokens."""
    members = [list(row) for row in members or [ALL_ROWS[number] for number in numbers]]
    rows = tuple(rows or numbers or range(len(members)))
    return CaptureBatch(index, rows, tuple(f"sample-{row}" for row in rows), tuple(members))


class Watch:
    """Notes how the target's first layer runs, where that is in this process, and may let it fail."""

    def __init__(self, decoder: Any) -> None:
        self.model = decoder.model
        self.fails: Exception | None = None
        self.runs: list[tuple[bool, bool]] = []
        self.hook = decoder.layers[0].register_forward_pre_hook(self)

    def __call__(self, layer: nn.Module, given: Any) -> None:
        self.runs.append((torch.is_grad_enabled(), layer.training))
        if self.fails:
            raise self.fails

    def require_runs_here(self) -> None:
        if not self.runs:
            pytest.skip(ELSEWHERE)


def features_of(capture: Capture, asked: CaptureBatch) -> Sequence[Mapping[str, Tensor]]:
    """Capture one batch and return its rows' features."""
    given = copy.deepcopy(asked)
    (captured,) = capture.features([given])
    assert isinstance(captured, CapturedBatch)
    assert (captured.batch, given) == (asked, asked), "it changed the batch"
    return captured.features


class Reference:
    """The target in transformers' own words: one row at a time, unpadded, in fp32."""

    def __init__(self, folder: Path) -> None:
        self.model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self.decoder = self.model.get_decoder()
        self.without_norm = copy.deepcopy(self.decoder)
        self.without_norm.norm = nn.Identity()

    @torch.inference_mode()
    def features(self, tokens: Sequence[int]) -> dict[str, Tensor]:
        """All hidden states [T, H] of a row, by name."""
        given_1T = torch.tensor([list(tokens)])
        output = self.decoder(input_ids=given_1T, output_hidden_states=True)
        before_norm_1TH = self.without_norm(input_ids=given_1T).last_hidden_state
        # transformers begins with the embedding, and norms the last.
        layers = [*output.hidden_states[1:-1], before_norm_1TH]
        found = {f"hidden.{k}": hidden_1TH[0] for k, hidden_1TH in enumerate(layers)}
        return {**found, "last_hidden": output.last_hidden_state[0]}

    @torch.inference_mode()
    def logits(self, tokens: Sequence[int]) -> Tensor:
        return self.model(input_ids=torch.tensor([list(tokens)])).logits[0]  # type: ignore[no-any-return]

    @torch.inference_mode()
    def embeddings(self, tokens: Sequence[int]) -> Tensor:
        """What the first layer is given [T, H]."""
        given_1T = torch.tensor([list(tokens)])
        output = self.decoder(input_ids=given_1T, output_hidden_states=True)
        return output.hidden_states[0][0]  # type: ignore[no-any-return]

    def state(self, name: str, tokens: Sequence[int]) -> Tensor:
        return self.embeddings(tokens) if name == "embeddings" else self.features(tokens)[name]


reference_of = functools.cache(Reference)


def require_near(
    found_TH: Tensor, expected_TH: Tensor, others: Mapping[str, Tensor] = MappingProxyType({}),
    rounded: float = 0.0,
) -> None:  # fmt: skip
    """Compare within fp32 rounding, relative to the largest number there, and `rounded` of each.

    What differs is compared with `others` as well, so that the test says what it found instead.
    """
    assert found_TH.shape == expected_TH.shape
    found_TH, expected_TH = found_TH.cpu().double(), expected_TH.double()

    def far(right_TH: Tensor) -> Tensor:
        bound_TH = ROUNDING * right_TH.abs().max() + rounded * right_TH.abs()
        return ~((found_TH - right_TH).abs() <= bound_TH)

    wrong_TH = far(expected_TH)
    if bool(wrong_TH.any()):
        moved = {"those of the token before": 1, "those of the token after": -1}
        guesses = {why: expected_TH.roll(by, 0) for why, by in moved.items()} | dict(others)
        same = [
            why
            for why, right_TH in guesses.items()
            if len(right_TH) == len(found_TH) > 2 and not far(right_TH)[1:-1].any()
        ]
        at = wrong_TH.nonzero()[0].tolist()
        instead = f"; they are {' and '.join(same)}" if same else ""
        pytest.fail(
            f"{int(wrong_TH.sum())} of {wrong_TH.numel()} values differ, first at {at}: "
            f"{float(found_TH[*at]):.6g}, right is {float(expected_TH[*at]):.6g}{instead}"
        )


def require_kept(found: Mapping[str, Tensor], right: Mapping[str, Tensor]) -> None:
    """Require at the last token what a type makes of the target's numbers, inf and nan among them."""
    for name, value_TH in found.items():
        ours, theirs = value_TH[-1], right[name][-1].to(value_TH.dtype)
        odd = ~torch.isclose(ours, theirs, rtol=0.02, atol=0.1, equal_nan=True)
        told = [f"{float(one[odd][0]):g}" for one in (ours, theirs) if odd.any()]
        assert not told, f"{name} is {told[0]} where the target has {told[1]}: that is trained on"


def require_largest(found: Mapping[str, Tensor], logits_TV: Tensor, head_TV: Tensor) -> None:
    """Compare with the target's largest logits; near neighbours may be in either order, equal ones not."""
    found_TK, ids_TK = found["topk_logits"], found["topk_ids"].long()
    K, V = found_TK.shape[1], logits_TV.shape[1]
    right_TK, right_ids_TK = (x[:, :K] for x in logits_TV.sort(descending=True, stable=True))
    assert bool((found_TK.diff(dim=1) <= 0).all()), "the logits are not in descending order"
    logprobs = {"log-probabilities": logits_TV.log_softmax(-1).topk(K).values}
    logprobs["log-probabilities of the K alone"] = right_TK.log_softmax(-1)
    logprobs["the last hidden state times the head, neither scaled nor capped"] = head_TV.topk(K)[0]
    require_near(found_TK, right_TK, logprobs)
    off = {f"of ids {by:+d}": (right_ids_TK + by) % V for by in (1, -1)}
    off["of ids of 16 bits"] = right_ids_TK % 65_536
    others = {why: logits_TV.gather(1, odd_TK) for why, odd_TK in off.items()}
    of_ids_TK = logits_TV.gather(1, ids_TK % V)
    require_near(of_ids_TK, right_TK, others)
    assert all(len(set(row)) == K for row in ids_TK.tolist()), "an id is there twice"
    tied_TK = (of_ids_TK == right_TK) & (ids_TK != right_ids_TK)
    assert not tied_TK.any(), "of equal logits that of the lower id does not come first"


def switches(options: Any) -> Iterator[tuple[str, bool]]:
    """Yield the options that are off by default, and are said to change no bit of a feature."""
    for name, field in type(options).model_fields.items() if options else ():
        extra: Any = field.json_schema_extra or {}
        if field.default is False and SAME_FEATURES.items() <= extra.items():
            yield name, getattr(options, name)


def require_same(
    found: Sequence[Mapping[str, Tensor]], expected: Sequence[Mapping[str, Tensor]], where: str = ""
) -> None:
    """Compare names and bits, row by row."""
    for one, other in zip(found, expected, strict=True):
        assert one.keys() == other.keys()
        for name, value in other.items():
            assert torch.equal(one[name], value), f"{where}{name}: {differing(one[name], value)}"
