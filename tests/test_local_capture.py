"""Capture `hf`: what was asked comes back, in order, whole, and as transformers would give it."""

from pathlib import Path

import pytest
import torch

from draftcore.errors import DraftcoreError, UsageError
from draftcore.local_capture import LocalCapture
from draftcore.records import CaptureGroup, CaptureInput, FeatureRequest
from draftcore.target import TargetSpec

ROWS = [[5, 6, 7], list(range(40, 60)), [9, 9, 9, 9, 1]]


def group(*rows: int) -> CaptureInput:
    tokens = tuple(ROWS[row] for row in rows)
    ids = tuple(f"sample-{row}" for row in rows)
    return CaptureInput(CaptureGroup(0, rows, ids, max(map(len, tokens))), tokens)


@pytest.fixture
def target(target_folder: Path) -> TargetSpec:
    return TargetSpec(str(target_folder), device="cpu")


def test_features_come_in_order_with_the_names_widths_and_dtype_asked(target):
    request = FeatureRequest((0, 3), True, "bfloat16")
    captured = list(LocalCapture(target, request).features([group(2, 0), group(1)]))
    lengths = [[len(f["hidden.3"]) for f in one.features] for one in captured]
    assert lengths == [[5, 3], [20]]
    for one in captured:
        for features in one.features:
            assert tuple(features) == request.names
            assert {value.dtype for value in features.values()} == {torch.bfloat16}
            assert {value.shape[1] for value in features.values()} == {48}


def test_a_padded_row_equals_the_row_alone(target):
    request = FeatureRequest((1, 4), True, "float32")
    capture = LocalCapture(target, request)
    (together,), (alone,) = capture.features([group(0, 1, 2)]), capture.features([group(0)])
    for name in request.names:  # fp32 sums in another order
        torch.testing.assert_close(together.features[0][name], alone.features[0][name])


def test_the_same_group_gives_the_same_bits(target):
    capture = LocalCapture(target, FeatureRequest((2,), True, "float32"))
    first, again = capture.features([group(0, 1, 2), group(0, 1, 2)])
    for one, other in zip(first.features, again.features, strict=True):
        assert all(torch.equal(one[name], other[name]) for name in one)


def test_capturing_leaves_the_targets_logits_as_they_were(target):
    tokens_BT = torch.tensor([ROWS[1]])
    before = target.model.model(input_ids=tokens_BT).logits
    list(LocalCapture(target, FeatureRequest((0, 5), True, "float32")).features([group(1)]))
    assert torch.equal(target.model.model(input_ids=tokens_BT).logits, before)


def test_a_layer_that_is_not_there_is_refused_with_the_range(target):
    with pytest.raises(UsageError, match=r"layers \[6\].*\n?.*0\.\.5"):
        LocalCapture(target, FeatureRequest((1, 6), True, "float32"))


def test_a_feature_that_overflows_its_dtype_names_the_row(target_folder):
    target = TargetSpec(str(target_folder), device="cpu")
    with torch.no_grad():
        target.model.decoder.norm.weight.mul_(1e6)
    capture = LocalCapture(target, FeatureRequest((), True, "float16"))
    with pytest.raises(DraftcoreError, match="dataset row 1") as error:
        list(capture.features([group(1)]))
    assert "sample-1" in str(error.value)
    assert "capture.dtype" in str(error.value)
