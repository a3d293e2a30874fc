"""What every capture backend must do. See `draftcore_sdk` for how to use it.

The target is a tiny random Qwen3 on the CPU in fp32, whose reference is transformers' own forward
pass, row by row and without padding. A backend that reads its target elsewhere than from a folder,
such as a running server, overrides `target_folder` and serves what `capture_target` writes.

Other implementations add in another order than transformers does, so features are compared with
the reference within rounding; a backend is compared with itself bit by bit.

Shape letters: T tokens, H width, V vocabulary.
"""

import copy
import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from draftcore.contracts.capture import Capture, CaptureBatch, CapturedBatch, FeatureRequest
from draftcore.contracts.target import TargetSpec
from draftcore.errors import UsageError
from draftcore.target import TransformersTarget
from draftcore_sdk.suite import Suite
from draftcore_sdk.targets import tiny_target

OpenCapture = Callable[[FeatureRequest], Capture]
LAYERS, WIDTH = 4, 32
ROWS = ([5, 6, 7], list(range(40, 60)), [9, 9, 9, 9, 1], [11], list(range(90, 130)))
# fp32 rounding over a few layers is a few 1e-7 of the largest number; another layer's output, or
# the state before the final norm, differs by a tenth of it and more.
ROUNDING = 1e-4
REQUESTS = {
    "first layer": FeatureRequest((0,), False, "float32"),
    "last hidden": FeatureRequest((), True, "float32"),
    "both": FeatureRequest((1, 3), True, "float32"),
    "every layer": FeatureRequest(tuple(range(LAYERS)), True, "float32"),
    "bfloat16": FeatureRequest((0, 2), True, "bfloat16"),
    "float16": FeatureRequest((3,), True, "float16"),
}
ALL = REQUESTS["every layer"]


class CaptureSuite(Suite):
    """The behaviour of a capture backend, opened through its plugin."""

    # ------------------------------------------------------------ fixtures

    @pytest.fixture
    def target_folder(self, tmp_path_factory: pytest.TempPathFactory) -> Path:
        """The folder of the target, written once per session."""
        folder = tmp_path_factory.getbasetemp() / "capture-suite"
        return folder if folder.exists() else capture_target(folder)

    @pytest.fixture
    def target(self, target_folder: Path) -> TargetSpec:
        return TransformersTarget(str(target_folder), device="cpu")

    @pytest.fixture
    def open_capture(self, target: TargetSpec) -> Iterator[OpenCapture]:
        """Open the backend for a request, any number of times; all are closed at the end."""
        captures: list[Capture] = []

        def opener(request: FeatureRequest) -> Capture:
            captures.append(self.open("capture", target=target, request=request))
            return captures[-1]

        yield opener
        for capture in captures:
            capture.close()

    # ------------------------------------------------------------ what comes back

    @pytest.mark.parametrize("shape", REQUESTS)
    def test_features_are_those_asked_and_as_long_as_their_tokens(
        self, open_capture: OpenCapture, shape: str
    ) -> None:
        """Also where the batch is padded to its longest row, and where it is one row."""
        request, dtype = REQUESTS[shape], getattr(torch, REQUESTS[shape].dtype)
        capture = open_capture(request)
        for rows in ((0, 1, 2), (1, 0), (3,), (3, 4)):
            for features, row in zip(features_of(capture, batch(*rows)), rows, strict=True):
                assert set(features) == set(request.names)
                for value in features.values():
                    assert (value.shape, value.dtype) == ((len(ROWS[row]), WIDTH), dtype)

    def test_batches_and_rows_keep_their_order(
        self, open_capture: OpenCapture, target_folder: Path
    ) -> None:
        """Rows of one length: only their values tell them apart."""
        reference = Reference(target_folder)
        rows = [[20 + row, 30 + row, 40 + row] for row in range(5)]
        asked = [
            batch(members=[rows[3], rows[0]], index=7),
            batch(members=[rows[4]], index=2),
            batch(members=[rows[1], rows[2]], index=5),
        ]
        captured = list(open_capture(REQUESTS["first layer"]).features(asked))
        assert [one.batch for one in captured] == asked
        for one, ask in zip(captured, asked, strict=True):
            for features, tokens in zip(one.features, ask.token_ids, strict=True):
                require_near(features["hidden.0"], reference.features(tokens)["hidden.0"])

    # ------------------------------------------------------------ which tensors they are

    @pytest.mark.parametrize("name", ALL.names)
    def test_features_are_the_ones_of_their_name(
        self, open_capture: OpenCapture, target_folder: Path, name: str
    ) -> None:
        """`hidden.k` is the output of layer k, counted from 0; transformers counts the embedding.

        That of the last layer is the state before the final norm, `last_hidden` the one after it.
        """
        for features, tokens in zip(
            features_of(open_capture(ALL), batch(0, 1)), ROWS, strict=False
        ):
            require_near(features[name], Reference(target_folder).features(tokens)[name])

    @pytest.mark.parametrize("beyond", [LAYERS, -1])
    def test_a_layer_out_of_range_is_refused_with_the_range(
        self, open_capture: OpenCapture, beyond: int
    ) -> None:
        with pytest.raises(UsageError) as caught:
            open_capture(FeatureRequest((0, beyond), True, "float32"))
        numbers = re.findall(r"-?\d+", str(caught.value))
        assert {"0", str(LAYERS - 1), str(beyond)} <= set(numbers), caught.value

    # ------------------------------------------------------------ on what they depend

    def test_a_rows_features_do_not_depend_on_its_neighbours(
        self, open_capture: OpenCapture
    ) -> None:
        """Within rounding: a batch of another shape adds in another order."""
        capture = open_capture(ALL)
        together = features_of(capture, batch(0, 4, 2))
        for features, row in zip(together, (0, 4, 2), strict=True):
            (alone,) = features_of(capture, batch(row))
            for name in ALL.names:
                require_near(features[name], alone[name])

    def test_a_batch_has_the_same_bits_whatever_is_captured_before_and_with_it(
        self, open_capture: OpenCapture
    ) -> None:
        """What a run resumed after a crash captures again must be what it had."""
        asked, capture = batch(0, 1, 2), open_capture(ALL)
        first = features_of(open_capture(ALL), asked)
        for found in list(capture.features([batch(1, 4), asked, batch(3), asked]))[1::2]:
            require_same(found.features, first)
        require_same(features_of(capture, asked), first)

    def test_joined_requests_give_the_bits_of_each(self, open_capture: OpenCapture) -> None:
        """Algorithms that train side by side share one capture."""
        one = FeatureRequest((0, 2), False, "float32")
        other = FeatureRequest((2, 3), True, "float32")
        joined = features_of(open_capture(one.union(other)), batch(0, 1))
        for request in (one, other):
            parts = [{name: features[name] for name in request.names} for features in joined]
            require_same(parts, features_of(open_capture(request), batch(0, 1)))

    # ------------------------------------------------------------ what it does besides

    def test_capturing_leaves_the_targets_logits_unchanged(
        self, open_capture: OpenCapture, target: TargetSpec
    ) -> None:
        tokens = torch.tensor([ROWS[1]])
        before_TV = target.model.model(input_ids=tokens).logits
        capture = open_capture(REQUESTS["both"])
        list(capture.features([batch(0, 1), batch(2)]))
        assert torch.equal(target.model.model(input_ids=tokens).logits, before_TV)
        capture.close()
        assert torch.equal(target.model.model(input_ids=tokens).logits, before_TV)

    def test_batches_are_asked_for_as_features_are_taken(self, open_capture: OpenCapture) -> None:
        """A data set does not fit into memory: some look-ahead is welcome, all of it is not."""
        asked: list[int] = []

        def batches() -> Iterator[CaptureBatch]:
            for index in range(64):
                asked.append(index)
                yield batch(3, index=index)

        captured = iter(open_capture(REQUESTS["first layer"]).features(batches()))
        assert next(captured).batch.index == 0
        assert len(asked) < 64
        assert [one.batch.index for one in captured] == list(range(1, 64))

    def test_capturing_changes_nothing_that_training_reads(self, open_capture: OpenCapture) -> None:
        """A rank captures its batches between its steps."""
        capture = open_capture(ALL)
        features_of(capture, batch(0, 1, 2))
        before = of_the_process()
        features_of(capture, batch(0, 1, 2))
        assert of_the_process() == before, "the next step would draw or compute otherwise"

    def test_closing_twice_is_harmless(self, open_capture: OpenCapture) -> None:
        capture = open_capture(REQUESTS["both"])
        list(capture.features([batch(0)]))
        capture.close()
        capture.close()


# ---------------------------------------------------------------- pieces of the tests


def capture_target(folder: Path) -> Path:
    """Write the target of this suite into `folder`."""
    tiny_target(folder, hidden_size=WIDTH, num_hidden_layers=LAYERS)
    model = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        # A norm that does more than scale: another weight for each of the state's numbers.
        model.get_decoder().norm.weight.copy_(torch.linspace(0.5, 1.5, WIDTH))
    model.save_pretrained(folder)
    return folder


def batch(
    *numbers: int, members: Sequence[Sequence[int]] = (), rows: Sequence[int] = (), index: int = 0
) -> CaptureBatch:
    """Make a batch of these rows of ROWS, or of any tokens."""
    members = members or [ROWS[number] for number in numbers]
    rows = tuple(rows or numbers or range(len(members)))
    return CaptureBatch(index, rows, tuple(f"sample-{row}" for row in rows), tuple(members))


def of_the_process() -> dict[str, Any]:
    """What training reads that belongs to no thread: random states, and how numbers are computed."""
    return {
        "torch's random state": torch.get_rng_state().tolist(),
        "Python's random state": random.getstate(),
        "numpy's random state": str(np.random.get_state()),
        "default dtype": torch.get_default_dtype(),
        "threads": torch.get_num_threads(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "float32 products": torch.get_float32_matmul_precision(),
    }


def features_of(capture: Capture, asked: CaptureBatch) -> Sequence[Mapping[str, Tensor]]:
    """Capture one batch and return its rows' features."""
    (captured,) = capture.features([asked])
    assert isinstance(captured, CapturedBatch)
    assert captured.batch == asked
    return captured.features


class Reference:
    """The target in transformers' own words: one row at a time, unpadded, in fp32."""

    def __init__(self, folder: Path) -> None:
        model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self.decoder = model.get_decoder()
        self.without_norm = copy.deepcopy(self.decoder)
        self.without_norm.norm = nn.Identity()

    @torch.inference_mode()
    def features(self, tokens: Sequence[int]) -> dict[str, Tensor]:
        """All features [T, H] of a row, by name."""
        given_1T = torch.tensor([list(tokens)])
        output = self.decoder(input_ids=given_1T, output_hidden_states=True)
        before_norm_1TH = self.without_norm(input_ids=given_1T).last_hidden_state
        # transformers begins with the embedding, and norms the last.
        layers = [*output.hidden_states[1:-1], before_norm_1TH]
        found = {f"hidden.{k}": hidden_1TH[0] for k, hidden_1TH in enumerate(layers)}
        return {**found, "last_hidden": output.last_hidden_state[0]}


def require_near(found_TH: Tensor, expected_TH: Tensor) -> None:
    """Compare within fp32 rounding, relative to the largest number there."""
    assert found_TH.shape == expected_TH.shape
    scale = float(expected_TH.abs().max())
    gap = float((found_TH.double() - expected_TH.double()).abs().max())
    assert gap <= ROUNDING * scale, f"differs by {gap:.3g} where the largest number is {scale:.3g}"


def require_same(
    found: Sequence[Mapping[str, Tensor]], expected: Sequence[Mapping[str, Tensor]]
) -> None:
    """Compare names and bits, row by row."""
    for one, other in zip(found, expected, strict=True):
        assert one.keys() == other.keys()
        for name, value in other.items():
            assert torch.equal(one[name], value), f"{name} has other bits"
