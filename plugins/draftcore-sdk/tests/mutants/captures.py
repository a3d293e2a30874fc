"""Wrong capture backends: one that runs the target in this process, and what each does otherwise."""

from draftcore_sdk.captures import CaptureSuite

from mutants import Mutants, wrong

RIGHT = """
from dataclasses import replace

import torch

from draftcore import hookimpl
from draftcore.errors import UsageError
from draftcore.features.hf import LocalCapture
from draftcore.contracts.offers import Offer

class Changing(LocalCapture):
    # Yields what `change` makes of each row's features.
    def features(self, batches):
        for one in super().features(batches):
            yield replace(one, features=tuple(self.change(dict(f)) for f in one.features))

class EveryLayer(Changing):
    # Captures them all, so that `change` may give others than the `names` that are asked for.
    def __init__(self, target, request):
        layers = tuple(range(target.num_layers))
        super().__init__(target, replace(request, layers=layers, last_hidden=True))
        self.names = request.names

class Capture(LocalCapture):
    pass

@hookimpl
def describe():
    return [Offer("capture", "mine")]

@hookimpl
def capture(name, target, request):
    return Capture(target, request)
"""

WRONG = """
== counts_the_embedding: test_features_are_the_ones_of_their_name[hidden.1]
class Capture(EveryLayer):
    def change(self, f):
        early = {f"hidden.{k}": f"hidden.{max(k - 1, 0)}" for k in self.request.layers}
        return {name: f[early.get(name, name)] for name in self.names}
== norms_the_last_layer: test_features_are_the_ones_of_their_name[hidden.3]
class Capture(Changing):
    def change(self, f):
        last, norm = "hidden.3", self.model.decoder.norm
        return {n: norm(v.float()).to(v.dtype) if n == last else v for n, v in f.items()}
== takes_last_hidden_before_the_norm: test_features_are_the_ones_of_their_name[last_hidden]
class Capture(EveryLayer):
    def change(self, f):
        return {n: f["hidden.3" if n == "last_hidden" else n] for n in self.names}
== stores_fp32_always: test_features_are_those_asked_and_as_long_as_their_tokens[bfloat16]
class Capture(Changing):
    def change(self, f):
        return {name: value.float() for name, value in f.items()}
== adds_a_tensor: test_features_are_those_asked_and_as_long_as_their_tokens[both]
class Capture(Changing):
    def change(self, f):
        return {**f, "embedding": next(iter(f.values())).clone()}
== cuts_long_rows: test_features_are_those_asked_and_as_long_as_their_tokens[both]
class Capture(Changing):
    def change(self, f):
        return {name: value[:-1] if len(value) > 30 else value for name, value in f.items()}
== keeps_the_padding: test_features_are_those_asked_and_as_long_as_their_tokens[both]
class Capture(LocalCapture):
    def features(self, batches):
        for one in super().features(batches):
            long = one.batch.padded_length
            padded = lambda v: torch.nn.functional.pad(v, (0, 0, 0, long - len(v)))
            rows = tuple({n: padded(v) for n, v in f.items()} for f in one.features)
            yield replace(one, features=rows)
== swaps_rows: test_batches_and_rows_keep_their_order
class Capture(LocalCapture):
    def features(self, batches):
        for one in super().features(batches):
            yield replace(one, features=one.features[::-1])
== sorts_batches: test_batches_and_rows_keep_their_order
class Capture(LocalCapture):
    def features(self, batches):
        return super().features(sorted(batches, key=lambda batch: batch.index))
== leaves_a_hook: test_capturing_leaves_the_targets_logits_unchanged
class Capture(LocalCapture):
    def __init__(self, target, request):
        super().__init__(target, request)
        louder = lambda module, inputs, output: output * 1.01
        target.model.model.lm_head.register_forward_hook(louder)
== mixes_neighbours: test_a_rows_features_do_not_depend_on_its_neighbours
class Capture(LocalCapture):
    def features(self, batches):
        for one in super().features(batches):
            joined = {n: torch.cat([f[n] for f in one.features]) for n in one.features[0]}
            centred = lambda f: {n: v - joined[n].mean(0) for n, v in f.items()}
            yield replace(one, features=tuple(map(centred, one.features)))
== remembers_batches: test_a_batch_has_the_same_bits_whatever_is_captured_before_and_with_it
class Capture(Changing):
    seen = 0

    def change(self, f):
        self.seen += 1
        return {name: value * (1 + 1e-6 * self.seen) for name, value in f.items()}
== is_random: test_a_batch_has_the_same_bits_whatever_is_captured_before_and_with_it
class Capture(Changing):
    def change(self, f):
        return {name: value * (1 + 1e-6 * torch.rand(())) for name, value in f.items()}
== packs_batches: test_a_batch_has_the_same_bits_whatever_is_captured_before_and_with_it
class Capture(Changing):
    def features(self, batches):
        batches = list(batches)
        self.packed = len(batches)
        return super().features(batches)

    def change(self, f):
        return {name: value * (1 + 1e-6 * self.packed) for name, value in f.items()}
== depends_on_the_request: test_joined_requests_give_the_bits_of_each
class Capture(Changing):
    def change(self, f):
        return {name: value * (1 + 1e-6 * len(f)) for name, value in f.items()}
== does_not_say_the_range: test_a_layer_out_of_range_is_refused_with_the_range[4]
@hookimpl
def capture(name, target, request):
    try:
        return Capture(target, request)
    except UsageError:
        raise UsageError("no such layer") from None
== counts_layers_from_the_end: test_a_layer_out_of_range_is_refused_with_the_range[-1]
@hookimpl
def capture(name, target, request):
    inside = tuple(layer % target.num_layers for layer in request.layers)
    return Capture(target, replace(request, layers=inside))
== captures_all_at_once: test_batches_are_asked_for_as_features_are_taken
class Capture(LocalCapture):
    def features(self, batches):
        return iter(list(super().features(list(batches))))
== closes_once: test_closing_twice_is_harmless
class Capture(LocalCapture):
    closed = False

    def close(self):
        assert not self.closed
        self.closed = True
== draws_a_number: test_capturing_changes_nothing_that_training_reads
class Capture(Changing):
    def change(self, f):
        torch.rand(1)
        return f
== answers_none: test_closing_twice_is_harmless
@hookimpl
def capture(name, target, request):
    return None
"""

MUTANTS = Mutants(CaptureSuite, {"{name}.py": RIGHT}, wrong(WRONG))
