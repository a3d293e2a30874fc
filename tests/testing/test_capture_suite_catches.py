"""The capture suite catches backends that are wrong, each by the test that names the fault."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.testing.conftest import RunSuites

PLUGIN = """
from draftcore import hookimpl
from draftcore.offers import Offer

@hookimpl
def describe():
    return [Offer("capture", "mine", frozenset({"overlap"}))]

@hookimpl
def capture(name, target, request):
    import torch
    from dataclasses import replace
    from pytest import MonkeyPatch
    from draftcore import local_capture
    from draftcore.local_capture import LocalCapture
    from draftcore.records import CapturedGroup, FeatureRequest

    class Capture(LocalCapture):
        pass

    features = Capture.features
    def changed(change):
        # Let `change` make other features of each member's.
        def taken(self, groups):
            for one in features(self, groups):
                yield replace(one, features=tuple(change(dict(f)) for f in one.features))
        Capture.features = taken

{wrong}
    return Capture(target, request)
"""

SUITE = """
from draftcore.testing.captures import CaptureSuite

class TestSuite(CaptureSuite):
    plugin = "{module}"
"""

TRANSFORMERS_LAYERS = """
    early = {f"hidden.{k}": f"hidden.{max(k - 1, 0)}" for k in request.layers}
    every = FeatureRequest(tuple(range(target.num_layers)), True, request.dtype)
    def one_early(self, groups):
        for one in features(LocalCapture(target, every), groups):
            rows = [{n: f[early.get(n, n)] for n in request.names} for f in one.features]
            yield CapturedGroup(one.group, tuple(rows))
    Capture.features = one_early
"""

LAST_LAYER_NORMED = """
    last = f"hidden.{target.num_layers - 1}"
    norm = target.model.decoder.norm
    changed(lambda f: {n: norm(v.float()).to(v.dtype) if n == last else v for n, v in f.items()})
"""

LAST_HIDDEN_BEFORE_NORM = """
    wide = FeatureRequest((*request.layers, target.num_layers - 1), True, request.dtype)
    def unnormed(self, groups):
        for one in features(LocalCapture(target, wide), groups):
            rows = [{n: f["hidden.3"] if n == "last_hidden" else f[n] for n in request.names}
                    for f in one.features]
            yield CapturedGroup(one.group, tuple(rows))
    Capture.features = unnormed
"""

FP32_ALWAYS = """
    changed(lambda f: {name: value.float() for name, value in f.items()})
"""

SHORT_ROWS = """
    changed(lambda f: {name: value[:-1] if len(value) > 30 else value for name, value in f.items()})
"""

PADDED_ROWS = """
    rows = Capture._rows
    def padded(self, group):
        long = group.group.padded_length
        for f in rows(self, group):
            yield {n: torch.nn.functional.pad(v, (0, 0, 0, long - len(v))) for n, v in f.items()}
    Capture._rows = padded
"""

SWAPPED_MEMBERS = """
    def swapped(self, groups):
        for one in features(self, groups):
            yield replace(one, features=one.features[::-1])
    Capture.features = swapped
"""

SORTED_GROUPS = """
    def ordered(self, groups):
        yield from features(self, sorted(groups, key=lambda group: group.group.index))
    Capture.features = ordered
"""

UNASKED = """
    changed(lambda f: {**f, "embedding": next(iter(f.values())).clone()})
"""

LEAVES_A_HOOK = """
    target.model.model.lm_head.register_forward_hook(lambda module, inputs, output: output * 1.01)
"""

MIXES_NEIGHBOURS = """
    def centred(self, groups):
        for one in features(self, groups):
            means = {n: torch.cat([f[n] for f in one.features]).mean(0) for n in request.names}
            yield replace(one, features=tuple({n: v - means[n] for n, v in f.items()}
                                              for f in one.features))
    Capture.features = centred
"""

REMEMBERS_GROUPS = """
    seen = []
    def drifting(f):
        seen.append(f)
        return {name: value * (1 + 1e-6 * len(seen)) for name, value in f.items()}
    changed(drifting)
"""

RANDOM = """
    def noisy(f):
        return {n: v * (1 + 1e-6 * torch.rand(())) for n, v in f.items()}
    changed(noisy)
"""

PACKS_GROUPS = """
    def packed(self, groups):
        groups = list(groups)
        for one in features(self, groups):
            yield replace(one, features=tuple({n: v * (1 + 1e-6 * len(groups)) for n, v in f.items()}
                                              for f in one.features))
    Capture.features = packed
"""

SCALES_BY_REQUEST = """
    changed(lambda f: {name: value * (1 + 1e-6 * len(f)) for name, value in f.items()})
"""

NO_RANGE = """
    from draftcore.errors import UsageError
    try:
        return Capture(target, request)
    except UsageError:
        raise UsageError("no such layer") from None
"""

WRAPS_AROUND = """
    inside = tuple(layer % target.num_layers for layer in request.layers)
    return Capture(target, replace(request, layers=inside))
"""

ALL_AT_ONCE = """
    Capture.features = lambda self, groups: iter(list(features(self, list(groups))))
"""

CLOSES_ONCE = """
    closed = []
    def close(self):
        assert not closed
        closed.append(True)
    Capture.close = close
"""

DRAWS = """
    def drawing(f):
        torch.rand(1)
        return f
    changed(drawing)
"""

ANSWERS_NONE = """
    return None
"""

ASKED = "test_names_widths_and_dtypes_are_those_asked_and_nothing_else"
CAUGHT = {
    "counts_the_embedding": (
        TRANSFORMERS_LAYERS,
        "test_hidden_k_is_the_output_of_layer_k_counted_from_0[1]",
    ),
    "norms_the_last_layer": (
        LAST_LAYER_NORMED,
        "test_the_last_layers_output_is_the_state_before_the_final_norm",
    ),
    "takes_last_hidden_before_the_norm": (
        LAST_HIDDEN_BEFORE_NORM,
        "test_last_hidden_is_the_state_after_the_final_norm",
    ),
    "stores_fp32_always": (FP32_ALWAYS, f"{ASKED}[bfloat16]"),
    "adds_a_tensor": (UNASKED, f"{ASKED}[both]"),
    "cuts_long_rows": (SHORT_ROWS, "test_every_row_is_as_long_as_its_tokens[0-members3]"),
    "keeps_the_padding": (PADDED_ROWS, "test_every_row_is_as_long_as_its_tokens[9-members2]"),
    "swaps_members": (SWAPPED_MEMBERS, "test_groups_and_members_keep_their_order"),
    "sorts_groups": (SORTED_GROUPS, "test_groups_and_members_keep_their_order"),
    "leaves_a_hook": (LEAVES_A_HOOK, "test_capturing_leaves_the_targets_logits_unchanged"),
    "mixes_neighbours": (
        MIXES_NEIGHBOURS,
        "test_a_members_features_do_not_depend_on_its_neighbours",
    ),
    "remembers_groups": (
        REMEMBERS_GROUPS,
        "test_a_groups_features_do_not_depend_on_the_groups_before_it",
    ),
    "is_random": (RANDOM, "test_a_group_captured_again_repeats_bit_for_bit"),
    "packs_groups": (PACKS_GROUPS, "test_two_groups_at_once_equal_one_by_one"),
    "depends_on_the_request": (SCALES_BY_REQUEST, "test_joined_requests_give_the_bits_of_each"),
    "does_not_say_the_range": (
        NO_RANGE,
        "test_a_layer_out_of_range_is_refused_with_the_range[4]",
    ),
    "counts_layers_from_the_end": (
        WRAPS_AROUND,
        "test_a_layer_out_of_range_is_refused_with_the_range[-1]",
    ),
    "captures_all_at_once": (ALL_AT_ONCE, "test_groups_are_asked_for_as_features_are_taken"),
    "closes_once": (CLOSES_ONCE, "test_closing_twice_is_harmless"),
    "draws_a_number": (DRAWS, "test_capturing_beside_training_is_seen_by_neither"),
    "answers_none": (ANSWERS_NONE, "test_closing_twice_is_harmless"),
    "is_right": ("", ""),
}


@pytest.fixture(scope="module")
def failures(wrong_folder: Path, run_suites: RunSuites) -> dict[str, set[str]]:
    for name, (wrong, _) in CAUGHT.items():
        (wrong_folder / f"{name}.py").write_text(PLUGIN.replace("{wrong}", wrong))
    return run_suites(
        {name: (SUITE.replace("{module}", name), test) for name, (_, test) in CAUGHT.items()}
    )


@pytest.mark.parametrize("name", [name for name, (wrong, _) in CAUGHT.items() if wrong])
def test_a_wrong_backend_is_caught_by_name(name: str, failures: dict[str, set[str]]) -> None:
    assert CAUGHT[name][1] in failures[name]


def test_the_right_backend_passes(failures: dict[str, set[str]]) -> None:
    assert failures["is_right"] == set()
