"""Wrong capture backends: one that runs the target in this process, and what each does otherwise."""

from draftcore_sdk.captures import CaptureSuite

from mutants import Mutants, one_file, wrong

RIGHT = """
import itertools
import queue
import threading
from contextlib import suppress
from dataclasses import replace

import torch

from draftcore.contracts.capture import BadRows, CapturedBatch
from draftcore.errors import UsageError
from draftcore_hf.capture import LocalCapture

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

class Knowing(Changing):
    # Knows the target whose weights `change` uses.
    def __init__(self, target, request):
        super().__init__(target, replace(request, last_hidden=True))
        self.target, self.names = target, request.names

class Capture(LocalCapture):
    pass

== Offer("capture", "{name}", frozenset({"topk", "embeddings"}))
== capture(name, target, request): Capture(target, request)
"""

WRONG = """
== takes_last_hidden_before_the_norm: test_features_are_the_ones_of_their_name[last_hidden]
Capture(EveryLayer).change(f):
    return {n: f["hidden.3" if n == "last_hidden" else n] for n in self.names}
== stores_fp32_always: test_features_are_those_asked_and_as_long_as_their_tokens[bfloat16]
Capture(Changing).change(f): return {name: value.float() for name, value in f.items()}
== cuts_long_rows: test_features_are_those_asked_and_as_long_as_their_tokens[both]
Capture(Changing).change(f):
    return {name: value[:-1] if len(value) > 30 else value for name, value in f.items()}
== swaps_rows: test_batches_and_rows_keep_their_order
Capture.features(batches):
    for one in super().features(batches):
        yield replace(one, features=one.features[::-1])
== sorts_batches: test_batches_and_rows_keep_their_order
Capture.features(batches): return super().features(sorted(batches, key=lambda batch: batch.index))
== cuts_rows_at_512: test_features_are_those_asked_and_as_long_as_their_tokens[every layer]
Capture(Changing).change(f): return {name: value[:512] for name, value in f.items()}
== pads_rows_beyond_512: test_features_are_the_ones_of_their_name[hidden.1]
Capture(Changing).change(f):
    zeros = lambda v: torch.cat([v[:512], torch.zeros_like(v[512:])])
    return {name: zeros(value) for name, value in f.items()}
== trains_the_target: test_the_target_runs_in_eval_mode_without_gradients_and_is_left_so
Capture.features(batches):
    self.model.model.train()
    return super().features(batches)
== follows_gradients: test_the_target_runs_in_eval_mode_without_gradients_and_is_left_so
Capture.features(batches):
    run, decoder = self.runner.features, self.model
    for batch in batches:
        tokens = torch.tensor(batch.token_ids[:1])
        decoder.decoder(input_ids=tokens)
        yield from super().features([batch])
== gives_zeros_for_errors: test_an_error_of_the_target_is_one_that_may_be_tried_again
Capture.features(batches):
    for batch in batches:
        try:
            yield from super().features([batch])
        except LookupError:
            width, names = 32, self.request.names
            rows = [{n: torch.zeros(len(t), width) for n in names} for t in batch.token_ids]
            yield CapturedBatch(batch, tuple(rows))
== calls_errors_bad_rows: test_an_error_of_the_target_is_one_that_may_be_tried_again
Capture.features(batches):
    for batch in batches:
        try:
            yield from super().features([batch])
        except RuntimeError as error:
            raise BadRows(dict.fromkeys(range(len(batch.rows)), str(error))) from error
== ends_where_the_target_fails: test_an_error_of_the_target_is_one_that_may_be_tried_again
Capture.features(batches):
    with suppress(RuntimeError):
        yield from super().features(batches)
== ends_where_the_batches_fail: test_batches_are_asked_for_as_features_are_taken
Capture.features(batches):
    def all_that_come():
        with suppress(LookupError):
            yield from batches
    return super().features(all_that_come())
== checks_nothing_when_it_opens: test_a_target_that_it_would_misread_is_refused_when_it_is_opened
Capture.__init__(target, request):
    target.require_layers(request)
    self.model, self.request, self.images = target.load_model(), request, None
    self.runner = target.prefill_with(self.model)
== sets_the_default_dtype: test_capturing_changes_nothing_that_training_reads
Capture.__init__(target, request):
    super().__init__(target, request)
    torch.set_default_dtype(torch.float64)
== leaves_a_hook: test_capturing_leaves_the_targets_logits_unchanged
Capture.__init__(target, request):
    super().__init__(target, request)
    louder = lambda module, inputs, output: output * 1.01
    target.load_model().model.lm_head.register_forward_hook(louder)
== mixes_neighbours: test_a_rows_features_do_not_depend_on_its_neighbours
Capture.features(batches):
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
== depends_on_the_request: test_joined_requests_give_the_bits_of_each
Capture(Changing).change(f): return {name: value * (1 + 1e-6 * len(f)) for name, value in f.items()}
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
Capture.features(batches): return iter(list(super().features(list(batches))))
== needs_a_batch: test_batches_are_asked_for_as_features_are_taken
Capture.features(batches):
    yield from super().features([next(batches := iter(batches))])
    yield from super().features(batches)
== looks_ahead_in_a_thread: test_closing_is_harmless_twice_and_to_another_capture: a thread waits
Capture.features(batches):
    room, end = queue.Queue(2), object()
    found = itertools.chain(super().features(batches), [end])
    threading.Thread(target=lambda: [room.put(one, timeout=40) for one in found]).start()
    yield from iter(room.get, end)
== leaves_its_hooks: test_closing_is_harmless_twice_and_to_another_capture: closed captures leave
Capture.__init__(target, request):
    super().__init__(target, request)
    target.load_model().model.lm_head.register_forward_hook(lambda *_: None)
== closes_once: test_closing_is_harmless_twice_and_to_another_capture
class Capture(LocalCapture):
    closed = False

    def close(self):
        assert not self.closed
        self.closed = True
== draws_a_number: test_capturing_changes_nothing_that_training_reads
Capture(Changing).change(f):
    torch.rand(1)
    return f
== overflows_half: test_a_stored_type_holds_the_numbers_of_float32[float16]
class Capture(Changing):
    # Scales down for fp16 and forgets to scale up again.
    def change(self, f):
        return {n: v / 8 if v.dtype == torch.float16 else v for n, v in f.items()}
== hides_what_is_no_number: test_a_stored_type_holds_the_numbers_of_float32[numbers beyond float16]: nan
Capture(Changing).change(f): return {name: value.nan_to_num() for name, value in f.items()}
== clamps_to_half: test_a_stored_type_holds_the_numbers_of_float32[numbers beyond float16]: the target has
Capture(Changing).change(f): return {name: value.clamp(-65504, 65504) for name, value in f.items()}
== chooses_the_largest_of_rounded_ones: test_a_stored_type_holds_the_numbers_of_float32[bfloat16]: others
class Capture(Changing):
    def change(self, f):  # the last of equal ones first
        order = f["topk_logits"].flip(-1).sort(stable=True, descending=True)[1]
        return f | {"topk_ids": f["topk_ids"].flip(-1).gather(-1, order)}
== yields_inside_inference_mode: test_capturing_changes_nothing_that_training_reads
Capture.features(batches):
    with torch.inference_mode():
        yield from super().features(batches)
== keeps_what_it_gave: test_capturing_again_and_again_keeps_nothing
Capture.features(batches):
    self.given = getattr(self, "given", [])
    for one in super().features(batches):
        self.given.append([{n: v.clone() for n, v in f.items()} for f in one.features])
        yield one
== closes_the_target_for_all: test_closing_is_harmless_twice_and_to_another_capture
OPEN = []
Capture.__init__(target, request):
    super().__init__(target, request)
    OPEN.append(self)
Capture.close():
    for one in OPEN:
        one.runner = None
    OPEN.clear()
== attends_to_what_follows: test_no_token_sees_what_follows
Capture(Changing).change(f):
    seeing = lambda v: v + 0.01 * v[-1:] if v.is_floating_point() else v
    return {n: seeing(v) for n, v in f.items()}
== gives_rows_of_the_embedding_table: test_features_are_the_ones_of_their_name[embeddings]
Capture(Knowing).features(batches):
    table = self.target.embedding()
    for one in super().features(batches):
        pairs = zip(one.features, one.batch.token_ids)
        rows = [{**f, "embeddings": table[torch.tensor(tokens)]} for f, tokens in pairs]
        yield replace(one, features=tuple(rows))
== leaves_logits_uncapped: test_features_are_the_ones_of_their_name[topk_logits]
Capture(Knowing).change(f):
    logits = f["last_hidden"] @ self.target.head().T
    f["topk_logits"], f["topk_ids"] = logits.topk(f["topk_ids"].shape[1])
    return f
== sees_beyond_the_window: test_features_are_the_ones_of_their_name[hidden.0]
Capture.__init__(target, request):
    super().__init__(target, request)
    self.model.model.config.sliding_window = 1024
== reads_ids_of_16_bits: test_positions_are_a_rows_own_and_no_token_id_is_too_large
Capture.features(batches):
    for batch in batches:
        cut = tuple([token % 65536 for token in tokens] for tokens in batch.token_ids)
        for one in super().features([replace(batch, token_ids=cut)]):
            yield replace(one, batch=batch)
== has_the_last_of_equal_ones_first: test_positions_are_a_rows_own_and_no_token_id_is_too_large: lower id
class Capture(Changing):
    def change(self, f):
        order = f["topk_logits"].flip(-1).sort(stable=True, descending=True)[1]
        return f | {"topk_ids": f["topk_ids"].flip(-1).gather(-1, order)}
== stores_ids_of_16_bits: test_positions_are_a_rows_own_and_no_token_id_is_too_large: of 16 bits
Capture(Changing).change(f): return f | {"topk_ids": f["topk_ids"] % 65536}
== pads_on_the_left: test_positions_are_a_rows_own_and_no_token_id_is_too_large
Capture.features(batches):
    for batch in batches:
        width = max(map(len, batch.token_ids))
        pad = [[0] * (width - len(tokens)) for tokens in batch.token_ids]
        mask = [[*zeros, *[1] * (width - len(zeros))] for zeros in pad]
        given = [[*zeros, *tokens] for zeros, tokens in zip(pad, batch.token_ids)]
        given = {"input_ids": torch.tensor(given), "attention_mask": torch.tensor(mask)}
        found = self.model.decoder(**given, output_hidden_states=True).hidden_states
        named = {"embeddings": found[0], "hidden.0": found[1], "last_hidden": found[-1]}
        cut = lambda at, zeros: {n: named[n][at, len(zeros) :] for n in self.request.names}
        yield CapturedBatch(batch, tuple(cut(*one) for one in enumerate(pad)))
== gives_log_probabilities: test_features_are_the_ones_of_their_name[topk_logits]
Capture(Changing).change(f):
    if "topk_logits" in f:
        f["topk_logits"] = f["topk_logits"].log_softmax(-1)
    return f
== has_a_k_of_its_own: test_joined_requests_give_the_bits_of_each
Capture.__init__(target, request):
    super().__init__(target, replace(request, topk=5 if request.topk else 0))
"""

MUTANTS = Mutants(CaptureSuite, one_file(RIGHT), wrong(WRONG))
