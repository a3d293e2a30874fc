"""What every algorithm must do. See `draftcore_sdk` for how to use it.

A subclass sets `plugin`, and options where the default ones are too large to be quick. The tests
run on the CPU in fp32, on a tiny random target and its own answers (`workbench`); a loose one-file
plugin also says where it lies, so that the command line can load it.

Capabilities switch tests on (`compile`, `disagg`, `layout:NAME`, `served:NAME`) and off:
`split_dependent` for a loss that is a mean over its micro-batch, `stop_gradient` for one whose
weights depend on the draft and are held constant in the gradient. What a drafter makes of what it is
told is in `drafting`, what a loss may read in `causality`, and that the two agree in `taught`. Sets of
options that an offer names as `examples` are tried beside those of the subclass, by the quick tests.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import math
import os
from collections.abc import Callable, Mapping
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from draftcore_eval.decode import speculate
from draftcore_eval.proposals import depth_of
from draftcore_graphs.decode import DecodeGraphRunner
from draftcore_graphs.recording import RecordingBackend
from draftcore_graphs.resolve import Phase
from draftcore_nn.served import Host, Round, ServedDraft, Suspect, UnservableError, gaps, leads
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors

from draftcore.contracts.algorithm import Draft, DraftBatch, Sample, SampleId, StepContext
from draftcore.contracts.target import TargetSpec
from draftcore.errors import DraftcoreError, UsageError
from draftcore_sdk.causality import Causality, learning
from draftcore_sdk.check import variants
from draftcore_sdk.drafting import LENGTHS, Drafting, Told
from draftcore_sdk.exports import ROPES
from draftcore_sdk.handing_over import HandingOver
from draftcore_sdk.internals import build_optimizer, trained_tensors, type_error
from draftcore_sdk.memory import of_the_process, watched_bytes
from draftcore_sdk.plain import open_target
from draftcore_sdk.project import Project
from draftcore_sdk.suite import Suite, bound, hash_as_elsewhere, offer_of, once, slow
from draftcore_sdk.taught import Taught
from draftcore_sdk.workbench import (
    ANSWER,
    GREEDY,
    LAYERS,
    RATE,
    SEED,
    STEPS,
    STOP_AT,
    Bench,
    Example,
    Measured,
    as_ratio,
    contents,
    global_seed,
    require_same_bits,
    require_same_output,
    snapshot,
    summed,
    trainable,
)

RESUMED = 17  # a step that is no multiple of what is done every so many
# What a draft may take over from the config of a target, and an export forget.
CONFIGS: list[dict[str, Any]] = [
    {"rope_parameters": ROPES[name]} for name in ("llama3", "yarn", "partial")
]
CONFIGS[1] |= {"head_dim": 16}
CONFIGS[2] |= {"rms_norm_eps": 0.1}
LONGER = 70_000  # tokens of a text that no collate may cut
SMALL = 1  # the number of the first example, behind the suite's own options
PICKLES = (b"PK", b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")


class Training(Suite):
    """What an algorithm asks for, builds, computes and learns."""

    # What `tiny_target` is told of the target beside the usual, as for an algorithm of some families.
    shape: ClassVar[Mapping[str, Any]] = {}

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Run tests with the options of the suite, and with each of the offer's examples.

        What is slow, or marked `once`, with the first example alone: that is small, as defaults are
        not. So is all of `check-plugin --quick`.
        """
        name = metafunc.function.__name__
        tests = [vars(owner)[name] for owner in type(self).__mro__ if name in vars(owner)]
        alone = any(hasattr(test, mark) for test in tests for mark in ("once", "slow"))
        examples = offer_of(self.plugin, "algorithm", self.name).examples
        if "bench" in metafunc.fixturenames and examples:
            named = [", ".join(f"{name}={x}" for name, x in one.items()) for one in examples]
            cases = [*enumerate(["own options", *named])]
            numbers, ids = zip(*(cases[SMALL : SMALL + 1] if alone else cases), strict=True)
            metafunc.parametrize("bench", numbers, ids=ids, indirect=True)

    @pytest.fixture(scope="class")
    @classmethod
    def benches(cls, tmp_path_factory: Any) -> list[Bench]:
        """One with the options of the suite, and one for each example of the offer."""
        loose, found = [cls.loose] if cls.loose else [], list[Bench]()
        kind = f"-of-{cls.__name__}" if cls.shape else ""
        folder = tmp_path_factory.getbasetemp() / f"algorithm-suite{kind}"
        example = Example.of(folder, json.dumps(cls.shape))
        for more in ({}, *offer_of(cls.plugin, "algorithm", cls.name).examples):
            data = {**more, **cls.options}
            own = bound(cls.plugin, "algorithm", cls.name, data)
            runs = tmp_path_factory.mktemp("runs")
            made = own.hook, own.offer, own.options, example, runs, data, loose
            found.append(Bench(*made, plugin=cls.plugin))
        return found

    @pytest.fixture
    def bench(self, benches: list[Bench], request: pytest.FixtureRequest) -> Bench:
        return benches[getattr(request, "param", 0)]

    # ------------------------------------------------------------ feature_request

    def test_the_request_names_what_the_target_has(self, bench: Bench) -> None:
        request = bench.request()
        assert request.names, "an algorithm that needs no feature of the target has no use for one"
        there = [layer for layer in request.layers if type(layer) is int and 0 <= layer < LAYERS]
        said = f"layers {request.layers} are asked for, of 0 to {LAYERS - 1}"
        assert len(set(there)) == len(request.layers), said
        dtype = getattr(torch, request.dtype, None)
        floating = isinstance(dtype, torch.dtype) and dtype.is_floating_point
        assert floating, f"features are asked for in {request.dtype!r}, which is no type for them"

    def test_the_request_is_the_same_without_weights(self, bench: Bench, tmp_path: Path) -> None:
        """It is asked for before weights are read, perhaps where they are not."""
        for file in Path(bench.example.spec.path).iterdir():
            if file.suffix != ".safetensors":
                (tmp_path / file.name).write_bytes(file.read_bytes())
        assert bench.request(open_target(str(tmp_path), device="cpu")) == bench.request()

    # ------------------------------------------------------------ build_draft

    def test_a_fresh_draft_is_fp32_on_the_cpu(self, bench: Bench) -> None:
        module = bench.draft.module
        half = bench.build(open_target(bench.example.spec.path, device="cpu", dtype="bfloat16"))
        for name, parameter in [*trainable(bench.draft).items(), *trainable(half).items()]:
            assert parameter.dtype == torch.float32, f"{name} is in {parameter.dtype}"
            assert parameter.isfinite().all(), f"{name} is not finite"
        places = {tensor.device.type for tensor in [*module.parameters(), *module.buffers()]}
        assert places == {"cpu"}, f"its tensors are on {places}"

    def test_the_same_seed_builds_the_same_bits(self, bench: Bench) -> None:
        before, first = copy.deepcopy(bench.options), snapshot(bench.build())
        assert bench.options == before, f"build_draft changes its options: {before}"
        require_same_bits(snapshot(bench.build()), first)

    def test_frozen_names_tensors_that_are_not_trained(self, bench: Bench) -> None:
        draft, parameters = bench.draft, dict(bench.draft.module.named_parameters())
        known = {*parameters, *dict(draft.module.named_buffers())}
        assert draft.frozen <= known, f"frozen names no tensor: {sorted(draft.frozen - known)}"
        both = draft.frozen & trainable(draft).keys()
        assert not both, f"frozen, but trainable: {both}"

    def test_parameter_groups_hold_every_trainable_parameter_once(self, bench: Bench) -> None:
        names = {id(p): name for name, p in trainable(bench.draft).items()}
        grouped = [id(p) for group in bench.draft.parameter_groups for p in group["params"]]
        lacking = sorted(names[i] for i in names.keys() - set(grouped))
        assert not lacking, f"in no group: {lacking}"
        assert set(grouped) <= names.keys(), "a group holds a foreign parameter"
        assert len(grouped) == len(names), "a parameter is in two groups"
        rates = [group["lr"] for group in bench.draft.parameter_groups if "lr" in group]
        assert all(rate > 0 for rate in rates), f"the peak rates of groups are {rates}"

    def test_the_recommended_settings_can_train(self, bench: Bench) -> None:
        recommended = bench.draft.defaults
        assert 0 < recommended.lr <= 1, recommended
        assert recommended.clip > 0, recommended
        assert 0 <= recommended.warmup_ratio < 1, f"warmup is a share of the run: {recommended}"

    def test_wrap_units_name_submodules(self, bench: Bench) -> None:
        units = bench.draft.wrap_units
        known = {name for name, _ in bench.draft.module.named_modules()} - {""}
        assert known.issuperset(units), f"no such submodules: {sorted({*units} - known)}"
        assert len(set(units)) == len(units), f"a unit is there twice: {units}"
        early = [u for n, u in enumerate(units) if any(x.startswith(f"{u}.") for x in units[n:])]
        assert not early, f"units stand innermost first, and these before what they hold: {early}"

    def test_config_is_json_data(self, bench: Bench) -> None:
        """It is written into checkpoints, and read back as what it was."""
        config = bench.draft.config
        assert json.loads(json.dumps(dict(config), allow_nan=False)) == listed(config)

    # ------------------------------------------------------------ collate

    def test_collate_takes_one_sample_and_several(self, bench: Bench) -> None:
        for samples in (bench.varied[:1], bench.varied):
            batch, lengths = bench.collate(samples), [len(s.token_ids_T) for s in samples]
            ids = tuple(sample.id for sample in samples)
            assert batch.ids == ids, f"its ids are not the samples', in their order: {batch.ids}"
            masks = (batch.loss_mask_BT, batch.attention_mask_BT)
            forms = [(list(one.shape), one.dtype) for one in (batch.token_ids_BT, *masks)]
            shape = [len(samples), batch.token_ids_BT.shape[1]]
            right = [(shape, dtype) for dtype in (torch.int64, torch.bool, torch.bool)]
            assert forms == right, f"token ids and the masks are {forms}, and should be {right}"
            counts = batch.attention_mask_BT.sum(1).tolist()
            assert counts == lengths, f"rows attend to {counts} tokens, and have {lengths}"
            first = torch.arange(shape[1]) < torch.tensor(lengths)[:, None]
            assert torch.equal(masks[1], first), "rows are padded on the right: tokens stand first"
            assert not (masks[0] & ~masks[1]).any(), "what is to be learned lies in the padding"
            odd = sorted(batch.features.keys() - samples[0].features.keys())
            assert not odd, f"features that no sample has: {odd}"
        at, one = torch.arange(LONGER) % 7, bench.varied[3]
        features = {name: value[at] for name, value in one.features.items()}
        batch = bench.collate([Sample(SampleId("long", 1), one.token_ids_T[at], at >= 0, features)])
        length = int(batch.attention_mask_BT.sum())
        said = f"of a text of {LONGER} tokens a batch has"
        assert length == LONGER, f"{said} {length}: the rest is never learned, and nobody is told"
        assert batch.loss_mask_BT[0, -999:].any(), f"{said} the end, but not for learning"

    def test_collate_runs_where_its_samples_lie(self, bench: Bench) -> None:
        """What it makes beside them is made there; a device of tensors without numbers shows it."""
        try:
            batch = bench.collate([sample.to("meta") for sample in bench.varied])
            tensors = contents(batch.__dict__).items()
            others = [name for name, tensor in tensors if tensor.device.type != "meta"]
            assert not others, f"made elsewhere than where the samples lie: {', '.join(others)}"
        except DraftcoreError as error:
            said = str(error)
            assert "expected device meta" not in said, f"a tensor lies elsewhere: {said}"
            if not ("meta tensor" in said or "NotImplementedError" in said):
                raise
            pytest.skip(f"it reads numbers, and there are none: {said}")

    # ------------------------------------------------------------ forward_loss: what it returns

    def test_loss_and_metrics_are_ratios_of_finite_scalars(self, bench: Bench) -> None:
        output = bench.output(bench.draft, bench.batch)
        only = bench.output(bench.draft, bench.batch, 1, total=1)  # the first step, and the last
        for numerator, denominator, _ in [*output.terms, *only.terms]:
            for name, part in {"numerator": numerator, "denominator": denominator}.items():
                assert part.shape == (), f"a {name} has the shape {list(part.shape)}: return sums"
                assert bool(part.isfinite()), f"a {name} is {part}"
            assert numerator.requires_grad, "the numerator carries no gradient"
            assert not denominator.requires_grad, "the denominator must be detached"
            assert denominator > 0, f"a denominator is {denominator}"
        for name, (above, below) in output.counts.items():
            shapes = [list(above.shape), list(below.shape)]
            assert shapes == [[], []], f"the metric {name} has the shapes {shapes}: return sums"
            attached = above.requires_grad or below.requires_grad
            assert not attached, f"the metric {name} must be detached"

    def test_the_same_inputs_give_the_same_bits(self, bench: Bench) -> None:
        """Choices come from the context's seed and the samples' ids: a resumed run repeats them.

        And from nothing that `collate` left behind: batches are collated ahead. Nor from `hash()` of a
        text, which is another one in each process.
        """
        batch = bench.batch
        with global_seed(1):
            first = bench.measure(batch)
        bench.collate(bench.varied[1:2])
        with global_seed(2), pytest.MonkeyPatch.context() as patch:
            second = bench.measure(batch)
            hash_as_elsewhere(f"{self.plugin} {bench.offer.implementation}", patch)
            third = bench.loss(bench.draft, batch)
        require_same_output(second.output, first.output, "called twice, it gives")
        require_same_bits(second.gradients, first.gradients)
        require_same_output(third, first.output, "with hash() as in another process, it gives")

    def test_what_is_drawn_depends_on_the_runs_seed_and_on_the_epoch(self, bench: Bench) -> None:
        """Other ids of samples, in another epoch, show whether something is drawn for them."""

        def loss(seed: int, epoch: int = 1, prefix: str = "") -> float:
            ids = [SampleId(prefix + sample.id.feature_id, epoch) for sample in bench.varied]
            samples = map(lambda s, of: dataclasses.replace(s, id=of), bench.varied, ids)
            told: Any = {"context": StepContext(STEPS // 2, STEPS, seed, epoch=epoch)}
            told |= {"draft": bench.draft, "batch": bench.collate([*samples])}
            output = bench.hook.forward_loss(**told, options=bench.options)
            return float(as_ratio(output).numerator.detach())

        plain = loss(SEED)
        if loss(SEED, 2, "another-") == plain:
            pytest.skip("nothing is drawn: the loss is the same for samples of other ids")
        for what, drawn in {
            "`context.seed`": [loss(seed) for seed in (1, 2, 3)],
            "the epoch": [loss(SEED, epoch) for epoch in (2, 3, 4)],
        }.items():
            assert {*drawn} != {plain}, f"{what} does not count: what is drawn is always the same"

    def test_collate_leaves_its_samples_and_the_loss_its_batch_alone(self, bench: Bench) -> None:
        samples = dataclasses.replace(bench).varied  # made anew: the others were collated before
        before, given = [contents(sample.__dict__) for sample in samples], [*samples]
        batch = bench.hook.collate(samples=given, options=bench.options)
        same = [sample.id for sample in given] == [sample.id for sample in samples]
        assert same, "it changes its list of samples"
        collated = contents(batch.__dict__)
        bench.measure(batch)
        require_same_bits(contents(batch.__dict__), collated)
        assert not any(value.requires_grad for value in batch.features.values())
        for sample, old in zip(samples, before, strict=True):
            require_same_bits(contents(sample.__dict__), old)

    def test_the_loss_leaves_the_draft_as_it_is(self, bench: Bench) -> None:
        """Ranks and micro-batches would not agree on what it changes; `gradients_ready` is for that."""
        draft = bench.build()
        before = snapshot(draft)
        for training in (True, False):
            draft.module.train(training)
            bench.loss(draft, bench.batch)
            require_same_bits(snapshot(draft), before)
            assert draft.module.training is training, "the loss puts the draft into another mode"

    @torch.no_grad()
    def test_every_feature_that_is_asked_for_counts(self, bench: Bench) -> None:
        """What is captured, stored and moved for nothing is the dearest part of a run."""
        names, plain = bench.request().names, bench.loss(bench.draft, bench.batch).numerator
        for name in [name for name in names if name != "topk_ids"]:
            told = ("topk_logits", "topk_ids") if name == "topk_logits" else (name,)
            rolled = [{n: sample.features[n].roll(1, 0) for n in told} for sample in bench.varied]
            others = [
                dataclasses.replace(sample, features={**sample.features, **changed})
                for sample, changed in zip(bench.varied, rolled, strict=True)
            ]
            same = torch.equal(bench.loss(bench.draft, bench.collate(others)).numerator, plain)
            assert not same, f"{name} is asked for, and the loss is the same without"

    def test_an_all_masked_batch_adds_nothing(self, bench: Bench) -> None:
        samples = [dataclasses.replace(s, loss_mask_T=s.loss_mask_T & False) for s in bench.varied]
        batch = bench.collate(samples)
        measured, counts = bench.measure(batch), bench.whole.output.counts
        assert measured.output.counts.keys() == counts.keys(), "it has other metrics"
        attached = bench.loss(bench.draft, batch).numerator.requires_grad
        assert attached, "without a gradient, the other ranks would wait for one"
        above, below = float(measured.output.numerator), float(measured.output.denominator)
        assert above == 0, f"the numerator is {above:.6g}, not 0: what the loss mask hides counts"
        assert math.isfinite(below), f"the denominator is {below}"
        for name, gradient in measured.gradients.items():
            assert not gradient.any(), f"gradient of {name} is nan or not 0"

    def test_nothing_to_learn_calls_all_units_and_reaches_all_weights(self, bench: Bench) -> None:
        """Ranks of a sharded draft would wait for each other, in each unit and for each gradient."""
        units, some = reached(bench, bench.batch)
        uncalled = sorted({*bench.draft.wrap_units} - {*units})
        assert not uncalled, f"the loss does not call these of wrap_units: {', '.join(uncalled)}"
        one = learning(bench.texts[1], 1, range(1))
        samples = [dataclasses.replace(s, loss_mask_T=s.loss_mask_T & False) for s in bench.varied]
        cases = {"nothing is to be learned": samples, "all rows are of one token": [one]}
        for where, samples in cases.items():
            others, none = reached(bench, bench.collate(samples))
            said = f"where {where}, the loss"
            assert others == units, f"{said} calls the units {others}, and else {units}"
            assert none >= some, f"{said} carries no gradient to {', '.join(sorted(some - none))}"

    @slow
    def test_the_loss_makes_its_tensors_where_its_batch_lies(self, bench: Bench) -> None:
        """What is made without a device lies on the CPU, and here nothing else, of a forward at least."""
        draft, batch = bench.build(), bench.batch
        inner = draft.module.forward

        def forward(*given: Any, **named: Any) -> Any:
            with Elsewhere():
                return inner(*given, **named)

        for where in (Elsewhere(), nullcontext()):
            try:
                with where:
                    bench.loss(draft, batch)
                return
            except (DraftcoreError, RuntimeError) as error:
                said = str(error)
                moved = "NotImplementedError" in said or "item() cannot be called on meta" in said
                assert moved, f"a tensor is made without `device=`, and meets the batch: {said}"
            vars(draft.module)["forward"] = forward
        pytest.skip(f"it makes tensors on the host, and reads or moves them: {said}")

    # ------------------------------------------------------------ forward_loss: gradients

    def test_gradients_reach_every_trainable_parameter(self, bench: Bench) -> None:
        """At some step of a run: a schedule, or weights that begin at 0, may hold a part back."""
        draft = bench.shaken(0.1)
        weights = trainable(draft)
        untouched = [*weights]
        for step in (1, STEPS // 2, STEPS):
            if untouched:
                bench.loss(draft, bench.batch, step).numerator.backward()  # type: ignore[no-untyped-call]
            grads = {name: weights[name].grad for name in untouched}
            untouched = [name for name, grad in grads.items() if grad is None or not grad.any()]
        assert not untouched, f"no gradient reaches {untouched}"

    @once
    def test_step_after_step_keeps_nothing(self, bench: Bench) -> None:
        draft, held = bench.build(), list[int]()
        with watched_bytes(torch.device("cpu")) as bytes_held:
            for step in range(5):
                anew = enumerate(dataclasses.replace(bench).varied)
                new = [dataclasses.replace(s, id=SampleId(f"{step}.{n}", 1)) for n, s in anew]
                torch.autograd.backward(bench.loss(draft, bench.collate(new)).numerator)
                draft.module.zero_grad()
                held.append(bytes_held())
        said = f"after each step they hold {held} bytes"
        assert held[-1] <= held[1], f"`collate`, the draft or the loss keeps tensors: {said}"

    def test_gradients_reach_none_of_the_targets_tensors(self, bench: Bench) -> None:
        watched = open_target(bench.example.spec.path, device="cpu")
        handed = [watched.embedding(), watched.head()]
        vars(watched).update(embedding=lambda: handed[0], head=lambda: handed[1])
        draft, before = bench.build(watched), [tensor.clone() for tensor in handed]
        bench.loss(draft, bench.batch).numerator.backward()  # type: ignore[no-untyped-call]
        lent = {tensor.untyped_storage().data_ptr() for tensor in handed}
        for name, tensor in [*draft.module.named_parameters(), *draft.module.named_buffers()]:
            if name in draft.frozen or tensor.untyped_storage().data_ptr() in lent:
                assert tensor.grad is None, f"a gradient reaches {name}, which is the target's"
        for name in trained_tensors(draft).keys() - trainable(draft).keys():
            tensor = draft.module.state_dict()[name]
            its = not any(torch.equal(tensor, one) for one in handed)
            assert its, f"{name} is the target's and in every checkpoint: name it in Draft.frozen"
        with torch.no_grad():
            for parameter in (p for group in draft.parameter_groups for p in group["params"]):
                parameter -= RATE if parameter.grad is None else RATE * parameter.grad
        for tensor, old in zip(handed, before, strict=True):
            assert torch.equal(tensor, old), "training changes a tensor of the target"

    def test_the_gradient_is_the_slope_of_the_loss(self, bench: Bench) -> None:
        """Compare with central differences in fp64, in two random directions."""
        bench.require_absent("stop_gradient", "its gradient is not the loss's slope")
        require_slope(bench)

    @once
    def test_the_gradient_is_the_slope_with_each_choice_of_an_option(self, bench: Bench) -> None:
        """But for those of which the offer says `stop_gradient:NAME`."""
        for name, value in variants(bench.offer):
            with suppress(UsageError):  # what does not go together, or is refused
                chosen = bench.chosen(**{name: value})
                if not chosen.says("stop_gradient"):
                    require_slope(chosen, f"with {name}={value!r} ")

    # ------------------------------------------------------------ forward_loss: batches

    def test_padding_and_order_in_a_batch_do_not_change_the_loss(self, bench: Bench) -> None:
        batch = bench.batch
        more = dataclasses.replace(
            batch,
            token_ids_BT=functional.pad(batch.token_ids_BT, (0, 5), value=7),
            loss_mask_BT=functional.pad(batch.loss_mask_BT, (0, 5)),
            attention_mask_BT=functional.pad(batch.attention_mask_BT, (0, 5)),
            features={
                n: functional.pad(x, (0, 0, 0, 5), value=3) for n, x in batch.features.items()
            },
        )
        turned = bench.collate(bench.varied[::-1])
        require_close(bench.measure(more), bench.whole, "with 5 more places of padding", PADDED)
        require_close(bench.measure(turned), bench.whole, "with the rows in reverse order", PLACED)

    @pytest.mark.parametrize("cut", [2, 4])
    def test_any_split_into_micro_batches_gives_one_update(self, bench: Bench, cut: int) -> None:
        """The last of the samples is far longer than others: a neighbour's length does not count."""
        bench.require_absent("split_dependent", "its loss is a mean over the micro-batch")
        parts = [bench.collate(part) for part in (bench.varied[:cut], bench.varied[cut:])]
        said = f"of {cut} and {len(bench.varied) - cut} samples, summed up,"
        require_close(bench.measure(*parts), bench.whole, said, MEANT)
        held = [bench.output(bench.draft, batch, training=False) for batch in (*parts, bench.batch)]
        apart, whole = (Measured(as_ratio(summed(part)), {}) for part in (held[:2], held[2:]))
        require_close(apart, whole, f"held out, {said}", MEANT)

    @once
    @torch.no_grad()
    def test_thousands_of_tokens_add_up_row_by_row(self, bench: Bench) -> None:
        """Half precision counts to 2,048 or 256; what stands out of a batch counts like the rest."""
        bench.require_absent("split_dependent", "its loss is a mean over the micro-batch")
        draft, texts = bench.shaken(0.3), [bench.text([n % 3] * (15 + n)) for n in range(9)]
        rows = [dataclasses.replace(t, loss_mask_T=t.loss_mask_T | True) for t in texts]
        outputs = [bench.output(draft, bench.collate([row])) for row in rows]
        both = bench.output(draft, bench.collate(rows)), summed(outputs)
        together, apart = (Measured(as_ratio(output), {}) for output in both)
        require_close(together, apart, f"of {len(rows)} long rows together", MEANT)

    # ------------------------------------------------------------ optimizer and schedule

    def test_the_optimizer_moves_every_weight_as_the_schedule_says(self, bench: Bench) -> None:
        """Downhill, not at all at a rate of 0, and to the same bits where it is resumed on the way.

        A checkpoint has what an optimizer keeps in its `state` and its groups; nothing else is kept.
        What a run says of its rate, decay and betas counts.
        """
        factors, again, long = (factors_of(bench, total) for total in (STEPS, STEPS, 100 * STEPS))
        long += factors_of(bench, STEPS, 0.0) + factors_of(bench, 1)
        assert factors == again, f"the schedule counts its calls: {factors}, then {again}"
        told = [1.0 if factor is None else factor for factor in factors]
        known = [factor for factor in [*factors, *long] if factor is not None] or [1.0]
        said = f"factors of the peak rate are from {min(known):.6g} to {max(known):.6g}"
        assert min(known) >= 0 < max(known) < math.inf, said
        assert 0.3 < max(known) < 3, f"{said}: return a share of it, and no rate itself"
        parts, own = bench.draft.parameter_groups, bench.hook.optimizer
        fixed = [name for name in TUNING if all(name in part for part in parts)]
        assert not fixed, f"train.{fixed[0]} is ignored: every parameter group has one of its own"
        if {factors[0], own(draft=bench.build(), options=bench.options, **TUNING)} == {None}:
            pytest.skip("it has neither of its own")
        require_settings(bench)
        runs, losses = [begin(bench)], list[float]()
        draft, optimizer = runs[0]
        peaks, before = [g["lr"] or RATE for g in optimizer.param_groups], snapshot(draft)
        for number, factor in enumerate((0.0, *told)):
            if number == RESUMED:
                runs.append(begin(bench, copy.deepcopy(trained_tensors(draft))))
                groups = runs[1][1].param_groups, optimizer.param_groups
                for group, was in zip(*groups, strict=True):
                    group |= {name: value for name, value in was.items() if name != "params"}
                    for weight, old in zip(group["params"], was["params"], strict=True):
                        runs[1][1].state[weight] |= copy.deepcopy(optimizer.state.get(old, {}))
            for draft, optimizer in reversed(runs):
                for group, peak in zip(optimizer.param_groups, peaks, strict=True):
                    group["lr"] = peak * factor
                output = bench.loss(draft, bench.batch)
                torch.autograd.backward(output.numerator / output.denominator)
                losses.append(float(output.numerator.detach() / output.denominator))
                optimizer.step()
                optimizer.zero_grad()
            if not number:
                require_same_bits(snapshot(draft), before, "at a rate of 0, ")
        still = [name for name, w in trainable(draft).items() if torch.equal(w, before[name])]
        assert not still, f"in {STEPS} steps these did not move: {still}"
        said = f"in {STEPS} steps the loss goes from {losses[0]:.6g} to {losses[-1]:.6g}"
        assert losses[-1] < losses[0], said
        said = f"resumed after step {RESUMED}, with what a checkpoint has of the optimizer, "
        require_same_bits(snapshot(runs[1][0]), snapshot(draft), said)

    # ------------------------------------------------------------ capability `compile`

    @slow
    def test_compile_gives_one_graph_for_all_batches_and_the_same_loss(self, bench: Bench) -> None:
        """As `train.compile` does: what depends on a batch's values stays outside of the forward."""
        bench.require("compile")
        graphs = list[Any]()

        def backend(graph: Any, _: Any) -> Any:
            graphs.append(graph)
            return graph.forward

        draft = bench.build()
        draft.module.compile(dynamic=True, fullgraph=True, backend=backend)
        for samples in (bench.texts, bench.varied[1:], bench.varied[2:], bench.learned):
            batch = bench.collate(samples)
            with torch._dynamo.config.patch(specialize_float=True):
                found, wanted = bench.measure(batch, draft=draft), bench.measure(batch)
            assert_close(found.output.numerator, wanted.output.numerator, "compiled: it")
            for name, gradient in found.gradients.items():
                off = float((gradient - wanted.gradients[name]).norm()) / norm_of(wanted)
                assert off <= 1e-5, f"compiled: the gradient of {name} is off by {off:.2g} of all"
        assert 0 < len(graphs) <= 2, f"{len(graphs)} graphs were compiled for batches of 4 shapes"

    # ------------------------------------------------------------ learning

    @slow
    def test_the_loss_falls(self, bench: Bench) -> None:
        """By a quarter within thirty steps on three short answers."""
        losses = bench.trained.losses
        assert all(map(math.isfinite, losses))
        first, last = losses[0], losses[:STEPS][-1]
        assert last < 0.75 * first, f"from {first:.3f} to {last:.3f}"

    @once
    def test_a_step_in_bf16_is_that_of_fp32_but_for_rounding(self, bench: Bench) -> None:
        """As `train.precision: bf16` computes: products under autocast, weights and sums in fp32."""
        draft, batch = bench.shaken(0.1), bench.batch  # what has learned has no loss to speak of
        plain = bench.measure(batch, draft=draft)
        features = {
            n: x.bfloat16() if x.is_floating_point() else x for n, x in batch.features.items()
        }
        bench.loss(draft, batch := dataclasses.replace(batch, features=features))
        with torch.autocast("cpu", torch.bfloat16):
            mixed = bench.measure(batch, draft=draft)
        dtype = mixed.output.numerator.dtype
        assert dtype == torch.float32, f"the loss is summed up in {dtype}: sum in float32"
        ours, theirs = (float(m.output.numerator / m.output.denominator) for m in (mixed, plain))
        said = f"in bf16 the loss is {ours:.6g}, in fp32 {theirs:.6g}: keep norms and sums in fp32"
        assert math.isclose(ours, theirs, rel_tol=HALF_LOSS), said
        for name, gradient in plain.gradients.items():
            gap = float((mixed.gradients[name] - gradient).norm() / gradient.norm().clamp_min(1e-9))
            assert gap <= HALF_GRADIENT, f"in bf16 the gradient of {name} is off by {gap:.0%} of it"

    @slow
    def test_metrics_are_in_their_range(self, bench: Bench) -> None:
        """Of a draft that has learned, on what it has learned, and of a fresh one."""
        losses = bench.trained.losses
        for draft, samples in ((bench.draft, bench.varied), (bench.trained.draft, bench.learned)):
            for name, sums in bench.output(draft, bench.collate(samples)).counts.items():
                above, below = map(float, sums)
                said = f"the metric {name} is {above:.6g} of {below:.6g}"
                assert math.isfinite(above), said
                assert 0 <= below < math.inf, said
                if "accuracy" in name or "rate" in name:
                    assert 0 <= above <= below * (1 + 1e-6), f"{said}, which is not in 0 to 1"
                known = draft is not bench.draft and losses[-1] < 0.01 * losses[0]
                if "accuracy" in name:
                    said += " of a draft that knows all" * known
                    assert above >= 0.8 * below * known, said
                    assert above % 1 == below % 1 == 0, f"{said}, and these are no counts"

    @slow
    def test_metrics_add_up_over_micro_batches(self, bench: Bench) -> None:
        """Of a draft that has learned: one that knows nothing is right about nothing, however split."""
        bench.require_absent("split_dependent", "its loss is a mean over the micro-batch")
        wrong = bench.varied[0].token_ids_T.flip(0)
        samples = [dataclasses.replace(bench.varied[0], token_ids_T=wrong), *bench.varied[1:]]
        parts = [bench.collate(part) for part in (samples[:2], samples[2:], samples)]
        outputs = [bench.output(bench.trained.draft, part) for part in parts]
        apart, whole = (summed(some).counts for some in (outputs[:2], outputs[2:]))
        for name in whole:
            ours, theirs = (float(counts[name][0] / counts[name][1]) for counts in (apart, whole))
            said = f"of 2 and 3 samples, summed up, {name} is {ours:.6g}, not {theirs:.6g}"
            same = ours != ours != theirs or math.isclose(ours, theirs, rel_tol=1e-3, abs_tol=1e-4)
            assert same, f"return sums as metrics, no means of a micro-batch\n{said}"

    def test_the_drafter_reads_what_training_captured(self, bench: Bench) -> None:
        asked, captured = bench.drafter(bench.noisy).request, bench.request()
        known = {*asked.names, asked.dtype} <= {*captured.names, captured.dtype}
        assert known, f"it asks for {asked}, and training for {captured}"

    def test_a_draft_is_its_saved_state(self, bench: Bench) -> None:
        """A fresh draft with the tensors of a checkpoint computes the same loss."""
        again = bench.build(seed=SEED + 1)
        again.module.eval()
        again.module.load_state_dict(trained_tensors(bench.noisy), strict=False)
        ours, theirs = (bench.loss(draft, bench.batch) for draft in (again, bench.noisy))
        require_same_output(ours, theirs, "from its checkpoint and without, the draft has")


class AlgorithmSuite(HandingOver, Taught, Drafting, Causality, Training):
    """The behaviour of an algorithm, opened through its plugin, from the basic to the compound."""

    # ------------------------------------------------------------ decoding and its graphs

    @slow
    def test_rounds_that_are_recorded_as_graphs_decode_the_same(self, bench: Bench) -> None:
        """Three rows padded to four; what waits for the device is refused."""
        draft, prompts = bench.trained.draft, bench.example.prompts
        model, drafter = bench.example.spec.load_model(), bench.drafter(draft)
        if hasattr(drafter, "depth"):
            pytest.skip("rounds of trees are not recorded")
        longest = max(map(len, prompts)) + ANSWER + drafter.num_drafts + 1
        phase = Phase("decode", "recording", rows=(len(prompts) + 1,), lengths=(longest,))
        runner = DecodeGraphRunner(model, drafter, draft.module, phase, RecordingBackend())
        runner.reserve(len(prompts), longest)
        recorded, plain = speculate(runner, prompts, GREEDY), bench.decode(draft, prompts)
        assert [row.tokens for row in recorded] == [row.tokens for row in plain]

    def test_a_drafter_follows_weights_that_are_updated_in_place(self, bench: Bench) -> None:
        """Evaluation during training keeps its drafter, and the graphs that read these weights."""
        draft = bench.build(seed=SEED + 1)
        kept, others = bench.drafter(draft), trained_tensors(bench.noisy)
        with torch.no_grad():
            draft.module.load_state_dict(others, strict=False)
        now, anew = (Told(one, bench.texts, LENGTHS) for one in (kept, bench.drafter(draft)))
        now.drafts().require(anew.drafts(), "it drafts with the weights that it was made with")

    @once
    def test_building_the_loss_and_decoding_leave_the_process_as_it_is(self, bench: Bench) -> None:
        """Random states, threads, types: the run and its other plugins go on with them."""
        calls: dict[str, Callable[[], Any]] = {
            "build_draft": bench.build,
            "the loss": lambda: bench.measure(bench.batch),
            "decoding": lambda: bench.decode(bench.noisy, bench.example.prompts),
        }
        for what, call in calls.items():
            before = of_the_process() | self.began
            call()
            changed = [name for name, value in of_the_process().items() if value != before[name]]
            assert not changed, f"{what} changes of the whole process: {', '.join(changed)}"

    # ------------------------------------------------------------ export

    def test_an_export_reads_back_as_the_draft_and_changes_nothing_in_it(
        self, bench: Bench, tmp_path: Path
    ) -> None:
        """In bits, in its loss and in its drafts."""
        draft, batch = bench.noisy, bench.batch
        before, drafts = snapshot(draft), Told(bench.drafter(draft), bench.texts, LENGTHS).drafts()
        for layout in bench.claimed("layout"):
            bench.export(bench.draft, tmp_path / "another" / layout, layout)
            folder = bench.export(draft, tmp_path / layout, layout)
            exported = sorted(os.listdir(folder))
            require_same_bits(snapshot(draft), before)
            assert not draft.module.training, "exporting leaves the draft in another mode"
            again, other = bench.read(folder), bench.read(folder)
            assert again.module is not other.module, "what is read twice is one draft"
            again.module.eval()
            require_same_bits(snapshot(again), before, "read back, ")
            assert again.frozen == draft.frozen, f"{set(again.frozen)} are frozen when read back"
            ours, theirs = bench.loss(again, batch), bench.loss(draft, batch)
            require_same_output(ours, theirs, "read back and before, it has")
            read_back = Told(bench.drafter(again), bench.texts, LENGTHS).drafts()
            read_back.require(drafts, "an export that was read back drafts otherwise")
            assert again.config == draft.config, f"its config is {again.config} when read back"
            for name, parameter in draft.module.named_parameters():
                can = again.module.get_parameter(name).requires_grad
                assert can == parameter.requires_grad, f"{name}: trainable is {can} when read back"
            beside = {*os.listdir(folder.parent)} - {"another", *bench.claimed("layout")}
            assert not beside, f"it writes beside its folder: {beside}"
            written = sorted(os.listdir(folder))
            assert written == exported, f"importing leaves {written}, exporting {exported}"
            files = [file for file in folder.rglob("*") if file.is_file()]
            pickled = [file.name for file in files if file.read_bytes()[:2] in PICKLES]
            assert not pickled, f"a pickle may run code where it is read: {', '.join(pickled)}"

    @once
    def test_an_export_says_what_made_its_draft(self, bench: Bench, tmp_path: Path) -> None:
        """Options and the target's config: who reads it has others, servers none. Or it is refused."""
        layouts, has = bench.claimed("layout"), bench.offer.capabilities
        servers = [word.removeprefix("served:") for word in has if word.startswith("served:")]
        cases = [{n: v} for n, v in variants(bench.offer) if getattr(bench.options, n) != v]
        cases += [{"layers": [9, 2, 5]}] * hasattr(bench.options, "layers")
        for number, changed in enumerate([*cases, {}, *CONFIGS]):
            config = {} if number <= len(cases) else changed
            of = f"{'a target of ' * bool(config)}{changed or bench.data}"
            said = f"an export says not enough, or the drafter does otherwise than it, with {of}"
            target, draft = bench.example.spec, None
            target = saying(target, tmp_path / f"target {number}", config) if config else target
            try:
                made = bench if config else bench.chosen(**changed)
                reader = bench if changed else dataclasses.replace(bench, data={}).chosen()
                draft = made.shaken(0.1, target=target)
                theirs = Told(bench.drafter(draft), made.texts, LENGTHS).drafts()
                for server in servers:
                    folder = made.export(draft, tmp_path / f"{number}" / server, "serving")
                    with suppress(UnservableError):
                        require_served(made, draft, folder, server, Host.of(target), said)
                for layout in layouts:
                    folder = made.export(draft, tmp_path / f"{number}" / layout, layout)
                    again = Told(bench.drafter(reader.read(folder, target)), made.texts, LENGTHS)
                    again.drafts().require(theirs, said)
                    if not changed:  # and the reader has the default options
                        require_same_config(reader, folder, tmp_path / "again" / layout, layout)
            except DraftcoreError as error:  # what does not go together, or is refused
                if config and draft and not isinstance(error, UnservableError):
                    pytest.fail(f"{said}\n{error}")

    @once
    def test_an_export_without_a_tensor_is_refused(self, bench: Bench, tmp_path: Path) -> None:
        """Or read as the same draft; one that is random in part looks like a bad one."""
        draft = bench.noisy
        for layout in bench.claimed("layout"):
            folder = bench.export(draft, tmp_path / layout, layout)
            for file in folder.glob("*.safetensors"):
                tensors = load_file(file)
                for name in tensors:
                    others = {other: value for other, value in tensors.items() if other != name}
                    save_file(others, file, metadata={"format": "pt"})
                    with suppress(DraftcoreError):
                        again = bench.read(folder)
                        said = f"{name} is not there, and nothing is said: "
                        require_same_bits(snapshot(again), snapshot(draft), said)
                save_file(tensors, file, metadata={"format": "pt"})

    @once
    def test_a_warm_start_begins_with_what_was_exported(self, bench: Bench, tmp_path: Path) -> None:
        """By the option `warm_start`, where there is one: the folder of an export."""
        if not hasattr(bench.options, "warm_start"):
            pytest.skip("it has no option `warm_start`")
        for layout in bench.claimed("layout"):
            folder = bench.export(bench.noisy, tmp_path / layout, layout)
            begun = bench.chosen(warm_start=str(folder)).build()
            require_same_bits(snapshot(begun), snapshot(bench.noisy), "with `warm_start`, ")

    def test_an_unknown_layout_is_refused(self, bench: Bench, tmp_path: Path) -> None:
        assert bench.claimed("layout")
        with pytest.raises(UsageError, match="no-such-layout"):
            bench.export(bench.noisy, tmp_path / "export", "no-such-layout")
        assert not any((tmp_path / "export").iterdir())

    def test_servers_draft_what_the_drafter_does(self, bench: Bench, tmp_path: Path) -> None:
        """An export, read anew by a server's conventions, gives the drafter's layers and drafts.

        Drafts are drawn, so that their distributions can be compared: our own algorithms differ by
        3e-5 nats (2026-11). Greedy drafts are the most probable ones, or within as much of them.
        """
        for server in bench.claimed("served"):
            folder = bench.export(bench.noisy, tmp_path / server, "serving")
            require_served(bench, bench.noisy, folder, server, Host.of(bench.example.spec))

    def test_an_unknown_server_is_refused(self, bench: Bench, tmp_path: Path) -> None:
        assert bench.claimed("served")
        folder = bench.export(bench.noisy, tmp_path / "export", "serving")
        with pytest.raises(UsageError, match="no-such-server"):
            bench.served(folder, "no-such-server")

    # ------------------------------------------------------------ the command line

    @slow
    def test_runs_decode_losslessly_and_resume_to_the_same_bits(self, bench: Bench) -> None:
        """Offline, whole and evaluated on the way the one; the other colocated, in two processes, and

        stopped by Ctrl-C.
        """
        whole = Project(bench, "whole", f"file:{bench.folder / 'features'}")
        stopped = Project(bench, "stopped")
        with stopped.begin("train", **{STOP_AT: "1"}) as stopping:
            whole.cli("train", "train.eval_every=2")
            assert list(whole.losses()) == [1, 2, 3, 4]
            said, _ = stopping.communicate()
        assert stopping.returncode == 130, said
        assert "interrupted: step " in said
        stopped.cli("train")
        losses, expected = stopped.losses(), whole.losses()
        for step, cause in {
            1: "what is of the process counts: earlier runs, hash(), the order of a set",
            2: "what a checkpoint does not hold counts: it is stopped and resumed after step 1",
            3: "an evaluation changes the draft or a random state: it is after step 2",
            4: "what a checkpoint does not hold counts, or an evaluation changes something",
        }.items():
            both = f"{losses[step]} stopped and resumed, {expected[step]} whole"
            assert losses[step] == expected[step], f"the loss of step {step} is {both}\n{cause}"
        assert json.loads(whole.cli("eval", "--json"))["lossless"] is True


# ---------------------------------------------------------------- pieces of the tests

# Two orders of summation in fp32: our own algorithms differ by 2.4e-7 in the loss and by 2e-7 of the
# gradient's norm (2026-12). What is wrong in kind differs by 1e-3 and more.
LOSS_TOLERANCE, GRADIENT_TOLERANCE = 5e-6, 1e-5

# bf16 keeps 8 bits. Our own algorithms differ by 6e-4 in the loss and by 0.02 of a gradient (2026-11).
HALF_LOSS, HALF_GRADIENT = 0.01, 0.1

# What a run may say of its optimizer, and otherwise.
TUNING: Mapping[str, Any] = {"lr": RATE, "weight_decay": 0.0, "betas": (0.9, 0.99)}
OTHERWISE = {"lr": 2 * RATE, "weight_decay": 0.5, "betas": (0.5, 0.6)}

ROUNDED = "numbers are rounded to float32 on the way, as by `.float()`: promote them instead"
DETACHED = (
    "what depends on the parameters is detached, or a backward is wrong\non purpose: offer "
    "`stop_gradient`, or for a wrapper say it in `capabilities` of its WrapperSuite"
)
PADDED = "what is padded counts: weigh by the masks"
PLACED = "what a row adds depends on its place in the batch"
MEANT = (
    "a mean over the micro-batch? Return sums: the trainer divides once. If the published loss is "
    "such a mean, offer `split_dependent`.\nOtherwise what a sample adds depends on its neighbours"
)


def assert_close(found: Tensor, expected: Tensor, said: str, cause: str = "") -> None:
    """Compare values that differ in the order of summation at most."""
    ours, theirs = float(found.detach()), float(expected.detach())
    if math.isclose(ours, theirs, rel_tol=LOSS_TOLERANCE, abs_tol=1e-7) or ours != ours != theirs:
        return
    times = f", {ours / theirs:.9g} times as much" if theirs else ""
    pytest.fail(f"{said} is {ours:.9g}, not {theirs:.9g}{times}\n{cause}".strip())


def require_close(found: Measured, expected: Measured, said: str, cause: str) -> None:
    """The same loss, metrics and gradient, up to the order of summation."""
    ours, theirs = found.output, expected.output
    assert_close(ours.numerator, theirs.numerator, f"{said} the numerator", cause)
    assert_close(ours.denominator, theirs.denominator, f"{said} the denominator", cause)
    assert ours.counts.keys() == theirs.counts.keys()
    for name, (above, below) in theirs.counts.items():
        ratio = ours.counts[name][0] / ours.counts[name][1]
        assert_close(ratio, above / below, f"{said} the metric {name}", cause)
    norm = norm_of(expected)
    for name, gradient in expected.gradients.items():
        gap = float((found.gradients[name] - gradient).norm())
        close = gap <= GRADIENT_TOLERANCE * norm
        assert close, f"{said} the gradient of {name} differs by {gap:.3g} of {norm:.3g}\n{cause}"


def norm_of(measured: Measured) -> float:
    return math.sqrt(sum(float(g.square().sum()) for g in measured.gradients.values()))


def factors_of(bench: Bench, total: int, warmup: float = 0.1) -> list[float | None]:
    """Return what the schedule says of some steps of a run of so many."""
    run: Any = {"total_steps": total, "warmup_ratio": warmup, "options": bench.options}
    steps = range(1, total + 1, max(1, total // STEPS))
    return [bench.hook.schedule(step=n, **run) for n in steps]


def begin(bench: Bench, weights: Any = (), **otherwise: Any) -> tuple[Draft, Any]:
    """Make a draft, with these weights, and its optimizer as a run does."""
    draft, run = bench.build(), {**TUNING, **otherwise}
    draft.module.load_state_dict(dict(weights), strict=False)
    own, rate = bench.hook.optimizer(draft=draft, options=bench.options, **run), run.pop("lr")
    groups = [{"lr": rate, **group} for group in draft.parameter_groups]
    return draft, own or build_optimizer(groups, **run)


def require_settings(bench: Bench) -> None:
    """Require that weights move otherwise, by the same gradients, where a run says so."""

    def moved(**otherwise: Any) -> tuple[Tensor, Any]:
        draft, optimizer = begin(bench, **otherwise)
        generator, weights = torch.Generator().manual_seed(SEED), [*trainable(draft).values()]
        for _ in range(2):
            for weight in weights:
                weight.grad = torch.randn(weight.shape, generator=generator)
            optimizer.step()
        return torch.cat([w.detach().flatten() for w in weights]), optimizer.param_groups

    plain_N, groups = moved()
    for name, value in OTHERWISE.items():
        with suppress(UsageError):  # it has none, and says so
            has = name != "betas" or any("betas" in group for group in groups)
            counts = not torch.equal(moved(**{name: value})[0], plain_N)
            said = f"train.{name} is ignored: weights move alike with {TUNING[name]} and {value}"
            assert counts or not has, said


def require_slope(bench: Bench, said: str = "") -> None:
    """Require that a gradient says how fast the loss rises, in fp64; skip where there is none of fp64."""
    draft, batch = bench.build(), bench.collate(bench.varied[1:3])
    draft.module.double()
    exact = {name: value.double() for name, value in batch.features.items()}
    batch = dataclasses.replace(batch, features=exact)
    try:
        measured = bench.measure(batch, draft=draft)
    except (DraftcoreError, RuntimeError) as error:
        pytest.skip(f"the draft does not compute in fp64: {error}")
    if measured.output.numerator.dtype != torch.float64:
        pytest.skip("the draft computes its loss in fp32 whatever its weights are")
    generator = torch.Generator().manual_seed(SEED)
    for _ in range(2):
        direction = {
            name: torch.randn(gradient.shape, generator=generator, dtype=gradient.dtype)
            for name, gradient in measured.gradients.items()
        }
        slope = sum(float((measured.gradients[n] * d).sum()) for n, d in direction.items())
        rise = rise_of(bench, draft, batch, direction, 1e-6)
        # A random direction's slope is about as large as the norm. Our own algorithms differ
        # by 2e-8 of it.
        off = abs(rise - slope)
        if off > 1e-6 * norm_of(measured):
            coarse = rise_of(bench, draft, batch, direction, 1e-4)
            rounded = abs(coarse - slope) < 0.1 * off  # over a longer way that counts less
            said += f"the loss rises by {rise:.6g}, the gradient says {slope:.6g}"
            pytest.fail(f"{said}\n{ROUNDED if rounded else DETACHED}")


def rise_of(
    bench: Bench, draft: Draft, batch: DraftBatch, direction: Mapping[str, Tensor], by: float
) -> float:
    """Return how fast the loss rises where a draft's weights move by so much, and stay where they are."""
    values = list[float]()
    for move in (by, -2 * by, by):
        for name, parameter in draft.module.named_parameters():
            if name in direction:
                parameter.data.add_(direction[name], alpha=move)
        values.append(float(bench.loss(draft, batch).numerator.detach()))
    return (values[0] - values[1]) / (2 * by)


def reached(bench: Bench, batch: DraftBatch) -> tuple[list[str], set[str]]:
    """Return the units that a loss calls, in their order, and what it carries a gradient to."""
    draft, called = bench.draft, list[str]()
    trained = trainable(draft)
    hooks = [
        draft.module.get_submodule(unit).register_forward_pre_hook(
            lambda module, given, unit=unit: called.append(unit)
        )
        for unit in draft.wrap_units
    ]
    numerator = bench.loss(draft, batch).numerator
    found = torch.autograd.grad(numerator, list(trained.values()), allow_unused=True)
    for hook in hooks:
        hook.remove()
    return called, {name for name, g in zip(trained, found, strict=True) if g is not None}


class Elsewhere(TorchFunctionMode):
    """Puts what is made without a device on one without numbers, but for scalars, which go anywhere."""

    MAKERS = _device_constructors()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs := kwargs or {}))
        free = func in self.MAKERS and not {"device", "generator"} & kwargs.keys()
        free &= not (args and isinstance(args[0], Tensor))  # as of `as_tensor`
        return made.to("meta") if free and made.ndim else made


def listed(value: Any) -> Any:
    """Write tuples as lists, as JSON does, and mappings as dicts."""
    if isinstance(value, Mapping):
        return {key: listed(item) for key, item in value.items()}
    return [listed(item) for item in value] if isinstance(value, list | tuple) else value


def saying(spec: TargetSpec, folder: Path, fields: Mapping[str, Any]) -> TargetSpec:
    """Return the target with another config, as of a folder of its own."""
    folder.mkdir()
    for file in Path(spec.path).iterdir():
        os.link(file, folder / file.name)
    config = json.loads((folder / "config.json").read_text())
    part = config.get("text_config", config)
    for name, value in fields.items():
        part[name] = {**(part.get(name) or {}), **value} if isinstance(value, dict) else value
    (folder / "config.json").unlink()
    (folder / "config.json").write_text(json.dumps(config))
    other = open_target(str(folder), device="cpu")
    other.logit_scale, other.logit_softcap = spec.logit_scale, spec.logit_softcap
    return other


def require_same_config(reader: Bench, folder: Path, again: Path, layout: str) -> None:
    """Require that a draft, read by other options and exported again, is said to be the same one."""
    reader.export(reader.read(folder), again, layout)
    for file in folder.glob("config.json"):
        wrote, writes = (json.loads(one.read_text()) for one in (file, again / file.name))
        odd = {name: value for name, value in writes.items() if value != wrote.get(name)}
        said = "exporting writes options, not what the draft was made with: of one that was read,"
        assert writes == wrote, f"{said}\nby the default options, {odd} where it had said otherwise"


def require_served(
    bench: Bench, draft: Draft, folder: Path, server: str, host: Host, cause: str = ""
) -> None:
    """Require of an export, as a server reads it, what the drafter drafts."""
    served, said = bench.served(folder, server), f"{cause}\n{server}".strip()
    drafter = bench.drafter(draft)
    told = Told(drafter, bench.learned, [*map(len, bench.example.prompts)])
    greedy, drawn = told.propose(), told.propose(1.0)
    layers, own, most = served.captured(host), drafter.request.layers, served.most
    many = most is None or (type(most) is int and most >= depth_of(drafter))
    assert many, f"`most` is None or the drafter's {depth_of(drafter)} at least, not {most!r}"
    assert layers == own, f"{said} would capture the layers {layers}, the drafter {own}"
    assert drawn.probs_BKV is not None
    require_members(served, host, folder, draft, drawn.probs_BKV)
    for row, drawn_K in enumerate(drawn.tokens_BK):
        prompt, features = bench.example.prompts[row], bench.example.features[row]
        read = {name: value[: len(prompt)] for name, value in features.items()}
        hidden = tuple(read[f"hidden.{layer}"] for layer in layers)
        first = bench.example.answers[row][0]
        at = Round(host, torch.tensor(prompt), first, hidden, read["last_hidden"])
        gap = float(gaps(served, at, drawn_K, drawn.probs_BKV[row]).max())
        assert gap < 1e-3, f"{said}, prompt {row}: {gap:.2g} nats apart"
        lead = float(leads(served, at, greedy.tokens_BK[row]).max())
        assert lead < 1e-3, f"{said}, prompt {row}: another draft leads by {lead:.2g}"


def require_members(served: ServedDraft, host: Host, folder: Path, draft: Draft, q: Tensor) -> None:
    """Ask a reading what `verify` asks it, beside its logits; and the file what servers take it for."""
    facts = served.facts
    known = {"vocab_size": host.vocab_size, "hidden_size": host.hidden_size}
    for name, value in {**known, "num_target_layers": host.num_layers}.items():
        assert facts.get(name) in (None, value), f"facts: {name} is {facts[name]}, not {value}"
    exported = {n: t for f in folder.glob("*.safetensors") for n, t in load_file(f).items()}
    if "d2t" in exported:
        ids_U, can_U = exported["d2t"], (q[0, 0] > 0).nonzero()[:, 0]
        ids_U = (ids_U + torch.arange(len(ids_U))).sort().values
        said = "d2t holds what servers read otherwise: write target id - place, they add the place"
        assert torch.equal(ids_U, can_U), said
    missing = set(served.ignored) - exported.keys()
    assert not missing, f"it ignores what is not in the export: {', '.join(sorted(missing))}"
    for suspect in served.suspects(host, draft.config):
        assert isinstance(suspect, Suspect), f"suspects() gives a {type(suspect).__name__}"
        mistake = type_error(suspect.draft, ServedDraft, f"the draft of {suspect.cause!r}")
        assert not mistake, mistake
