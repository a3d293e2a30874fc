"""What every algorithm must do. See `draftcore.testing` for how to use it.

A subclass sets `plugin`, and options where the default ones are too large to be quick. The tests
run on the CPU in fp32, on a tiny random target and its own answers (`workbench`); a loose one-file
plugin also says where it lies, so that the command line can load it.

Capabilities switch tests on (`compile`, `disagg`, `layout:NAME`, `served:NAME`) and off:
`split_dependent` for a loss that is a mean over its micro-batch, `stop_gradient` for one whose
weights depend on the draft and are held constant in the gradient.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from draftcore.disagg import HandedOver, RowError, first_draft_input, wire_row
from draftcore.errors import UsageError
from draftcore.evaluation.decode import evaluate_prompts
from draftcore.graphs.states import fault
from draftcore.records import Draft, DraftBatch, StepOutput
from draftcore.served import Host, gaps, leads
from draftcore.target import TargetSpec
from draftcore.testing import Suite, hooks_of, offer_of, options_of
from draftcore.testing.prefilled import (
    SHAPE,
    Log,
    arrivals,
    last_tokens,
    request,
    take_over,
)
from draftcore.testing.workbench import (
    GREEDY,
    LAYERS,
    SEED,
    STEPS,
    STOP_AT,
    Bench,
    Decoding,
    Measured,
    Project,
    Trained,
    WatchedTarget,
    evaluating,
    global_seed,
    knows_by_heart,
    masked,
    padded,
    shared_world,
    snapshot,
)
from draftcore.training.checkpoint import trained_tensors

SPLIT = "its loss is a mean over the micro-batch"


class AlgorithmSuite(Suite):
    """The behaviour of an algorithm, opened through its plugin."""

    # ------------------------------------------------------------ fixtures

    @pytest.fixture(scope="class")
    @classmethod
    def bench(cls, request: pytest.FixtureRequest, tmp_path_factory: Any) -> Bench:
        offer = offer_of(cls.plugin, "algorithm", cls.name)
        options, world = (
            options_of(offer, cls.options),
            shared_world(request.config, tmp_path_factory),
        )
        cli = () if cls.loose is None else ("--plugin", str(cls.loose))
        return Bench(hooks_of(cls.plugin), offer, options, world, cli, cls.options)

    @pytest.fixture(scope="class")
    @classmethod
    def draft(cls, bench: Bench) -> Draft:
        """A fresh draft; no test changes it."""
        return bench.build()

    @pytest.fixture
    def batch(self, bench: Bench) -> DraftBatch:
        return bench.collate(bench.varied)

    @pytest.fixture(scope="class")
    @classmethod
    def whole(cls, bench: Bench, draft: Draft) -> Measured:
        """The loss of that batch in one piece, with its gradient."""
        return bench.measure(draft, [bench.collate(bench.varied)])

    @pytest.fixture(scope="class")
    @classmethod
    def trained(cls, bench: Bench) -> Trained:
        """A draft after `STEPS` steps on the target's answers; no test changes it."""
        draft = bench.build()
        return Trained(draft, bench.train(draft))

    @pytest.fixture(scope="class")
    @classmethod
    def project(cls, bench: Bench, tmp_path_factory: Any) -> Project:
        """A run trained offline through the command line; no test changes it."""
        folder = tmp_path_factory.mktemp("offline") / "project"
        project = Project(folder, bench, f"file:{folder / 'features'}")
        project.cli("train")
        return project

    # ------------------------------------------------------------ options

    def test_options_refuse_unknown_keys(self, bench: Bench) -> None:
        with pytest.raises(UsageError):
            options_of(bench.offer, {**self.options, "no_such_option": 1})

    # ------------------------------------------------------------ feature_request

    def test_the_request_names_what_the_target_has(self, bench: Bench) -> None:
        request = bench.request()
        assert request.names, "an algorithm that needs no feature of the target has no use for one"
        assert all(type(layer) is int and 0 <= layer < LAYERS for layer in request.layers)
        assert len(set(request.layers)) == len(request.layers)
        dtype = getattr(torch, request.dtype, None)
        assert isinstance(dtype, torch.dtype), request.dtype
        assert dtype.is_floating_point, request.dtype

    def test_the_request_is_the_same_when_asked_again(self, bench: Bench) -> None:
        assert bench.request() == bench.request(TargetSpec(bench.world.spec.path, device="cpu"))

    def test_the_request_needs_no_weights(self, bench: Bench, tmp_path: Path) -> None:
        """It is asked for before weights are read, perhaps where they are not."""
        for file in Path(bench.world.spec.path).iterdir():
            if file.suffix != ".safetensors":
                (tmp_path / file.name).write_bytes(file.read_bytes())
        assert bench.request(TargetSpec(str(tmp_path), device="cpu")) == bench.request()

    # ------------------------------------------------------------ build_draft

    def test_a_fresh_draft_is_fp32_on_the_cpu(self, draft: Draft) -> None:
        module = draft.module
        trainable = {n: p for n, p in module.named_parameters() if p.requires_grad}
        assert trainable
        assert {p.dtype for p in trainable.values()} == {torch.float32}
        tensors = [*module.parameters(), *module.buffers()]
        assert {tensor.device.type for tensor in tensors} == {"cpu"}
        for name, parameter in trainable.items():
            assert parameter.isfinite().all(), name

    def test_the_same_seed_builds_the_same_bits(self, bench: Bench) -> None:
        require_same_bits(snapshot(bench.build()), snapshot(bench.build()))

    def test_frozen_names_tensors_that_are_not_trained(self, draft: Draft) -> None:
        parameters = dict(draft.module.named_parameters())
        known = {*parameters, *dict(draft.module.named_buffers())}
        assert draft.frozen <= known, f"frozen names no tensor: {sorted(draft.frozen - known)}"
        trainable = {name for name, p in parameters.items() if p.requires_grad}
        assert not draft.frozen & trainable, f"frozen, but trainable: {draft.frozen & trainable}"

    def test_parameter_groups_hold_every_trainable_parameter_once(self, draft: Draft) -> None:
        trainable = {id(p): n for n, p in draft.module.named_parameters() if p.requires_grad}
        grouped = [p for group in draft.parameter_groups for p in group["params"]]
        lacking = trainable.keys() - {id(p) for p in grouped}
        assert not lacking, f"in no group: {sorted(trainable[i] for i in lacking)}"
        assert {id(p) for p in grouped} <= trainable.keys(), "a group holds a foreign parameter"
        assert len(grouped) == len(trainable), "a parameter is in two groups"

    def test_wrap_units_name_submodules(self, draft: Draft) -> None:
        for name in draft.wrap_units:
            assert isinstance(draft.module.get_submodule(name), nn.Module)
        assert len(set(draft.wrap_units)) == len(draft.wrap_units)

    def test_config_is_json_data(self, draft: Draft) -> None:
        """It is written into checkpoints, and read back as what it was."""
        config = draft.config
        text = json.dumps(dict(config), allow_nan=False)
        assert json.loads(text) == listed(config)

    def test_a_draft_is_its_saved_state(self, bench: Bench, trained: Trained) -> None:
        """A fresh draft with the tensors of a checkpoint computes the same loss."""
        saved = trained_tensors(trained.draft)
        again = bench.build(seed=SEED + 1)
        again.module.load_state_dict(saved, strict=False)
        batch = bench.collate(bench.varied)
        require_same_output(bench.loss(again, batch), bench.loss(trained.draft, batch))

    # ------------------------------------------------------------ collate

    def test_collate_takes_one_sample_and_several(self, bench: Bench) -> None:
        for samples in (bench.varied[:1], bench.varied):
            batch, lengths = bench.collate(samples), [len(s.token_ids_T) for s in samples]
            assert batch.ids == tuple(sample.id for sample in samples)
            assert len(batch.token_ids_BT) == len(samples)
            assert batch.loss_mask_BT.shape == batch.token_ids_BT.shape
            assert batch.attention_mask_BT.shape == batch.token_ids_BT.shape
            assert batch.loss_mask_BT.dtype == batch.attention_mask_BT.dtype == torch.bool
            assert batch.attention_mask_BT.sum(1).tolist() == lengths
            assert not (batch.loss_mask_BT & ~batch.attention_mask_BT).any()
            assert set(batch.features) <= set(samples[0].features)

    def test_collate_leaves_its_samples_alone(self, bench: Bench, draft: Draft) -> None:
        samples = bench.varied
        before = [contents(sample.__dict__) for sample in samples]
        batch = bench.collate(samples)
        bench.loss(draft, batch)
        for sample, old in zip(samples, before, strict=True):
            require_same_bits(contents(sample.__dict__), old)

    # ------------------------------------------------------------ forward_loss: what it returns

    def test_the_loss_is_a_ratio_of_finite_scalars(
        self, bench: Bench, draft: Draft, batch: DraftBatch
    ) -> None:
        output = bench.loss(draft, batch)
        for part in (output.numerator, output.denominator):
            assert part.shape == ()
            assert bool(part.isfinite())
        assert output.numerator.requires_grad
        assert not output.denominator.requires_grad, "the denominator must be detached"
        assert output.denominator > 0

    def test_the_same_inputs_give_the_same_bits(
        self, bench: Bench, draft: Draft, batch: DraftBatch
    ) -> None:
        first, second = bench.measure(draft, [batch]), bench.measure(draft, [batch])
        assert torch.equal(first.numerator, second.numerator)
        assert torch.equal(first.denominator, second.denominator)
        require_same_bits(second.gradients, first.gradients)

    def test_random_choices_ignore_the_global_generators(
        self, bench: Bench, draft: Draft, batch: DraftBatch
    ) -> None:
        """They come from the context's seed and the samples' ids, so a resumed run repeats them."""
        with global_seed(1):
            first = bench.loss(draft, batch)
        with global_seed(2):
            require_same_output(bench.loss(draft, batch), first)

    def test_the_loss_leaves_its_batch_alone(
        self, bench: Bench, draft: Draft, batch: DraftBatch
    ) -> None:
        before = contents(batch.__dict__)
        bench.measure(draft, [batch])
        require_same_bits(contents(batch.__dict__), before)
        assert not any(value.requires_grad for value in batch.features.values())

    def test_an_all_masked_batch_adds_nothing(self, bench: Bench, draft: Draft) -> None:
        measured = bench.measure(draft, [bench.collate(list(map(masked, bench.varied)))])
        assert float(measured.numerator) == 0
        assert bool(measured.denominator.isfinite())
        for name, gradient in measured.gradients.items():
            assert not gradient.any(), f"gradient of {name} is nan or not 0"

    def test_metrics_are_detached_pairs_of_scalars(
        self, bench: Bench, draft: Draft, batch: DraftBatch
    ) -> None:
        for name, pair in bench.loss(draft, batch).counts.items():
            assert len(pair) == 2, name
            for part in pair:
                assert part.shape == (), name
                assert not part.requires_grad, name

    # ------------------------------------------------------------ forward_loss: gradients

    def test_gradients_reach_every_trainable_parameter(
        self, bench: Bench, draft: Draft, batch: DraftBatch
    ) -> None:
        """At some step of a run: a schedule may hold a part back for a while."""
        draft.module.zero_grad(set_to_none=True)
        for step in (0, STEPS // 2, STEPS - 1):
            bench.loss(draft, batch, step).numerator.backward()  # type: ignore[no-untyped-call]
        untouched = [
            name
            for name, p in draft.module.named_parameters()
            if p.requires_grad and (p.grad is None or not p.grad.any())
        ]
        assert not untouched, f"no gradient reaches {untouched}"

    def test_gradients_reach_none_of_the_targets_tensors(
        self, bench: Bench, batch: DraftBatch
    ) -> None:
        watched = WatchedTarget(bench.world.spec.path)
        draft = bench.build(watched)
        before = [tensor.clone() for tensor in watched.handed]
        bench.loss(draft, batch).numerator.backward()  # type: ignore[no-untyped-call]
        lent = {tensor.untyped_storage().data_ptr() for tensor in watched.handed}
        for name, tensor in [*draft.module.named_parameters(), *draft.module.named_buffers()]:
            if name in draft.frozen or tensor.untyped_storage().data_ptr() in lent:
                assert tensor.grad is None, f"a gradient reaches {name}, which is the target's"
        bench.train(draft, steps=2)
        for tensor, old in zip(watched.handed, before, strict=True):
            assert torch.equal(tensor, old), "training changes a tensor of the target"

    def test_the_gradient_is_the_slope_of_the_loss(self, bench: Bench) -> None:
        """Compare with central differences in fp64, in three random directions."""
        bench.require_absent("stop_gradient", "its gradient is not the loss's slope")
        draft = bench.build()
        draft.module.double()
        batch = bench.collate(bench.varied[1:3])
        exact = {name: value.double() for name, value in batch.features.items()}
        batch = dataclasses.replace(batch, features=exact)
        try:
            measured = bench.measure(draft, [batch])
        except RuntimeError as error:
            pytest.skip(f"the draft does not compute in fp64: {error}")
        if measured.numerator.dtype != torch.float64:
            pytest.skip("the draft computes its loss in fp32 whatever its weights are")
        norm = math.sqrt(sum(float(g.square().sum()) for g in measured.gradients.values()))
        generator = torch.Generator().manual_seed(SEED)
        for _ in range(3):
            direction = {
                name: torch.randn(gradient.shape, generator=generator, dtype=gradient.dtype)
                for name, gradient in measured.gradients.items()
            }
            slope = sum(float((measured.gradients[n] * d).sum()) for n, d in direction.items())
            rise = bench.rise(draft, batch, direction)
            # A random direction's slope is about as large as the norm. Our own algorithms differ
            # by 2e-8 of it.
            assert abs(rise - slope) <= 1e-6 * norm, f"the loss rises by {rise}, not {slope}"

    # ------------------------------------------------------------ forward_loss: batches

    def test_padding_does_not_change_the_loss(
        self, bench: Bench, draft: Draft, batch: DraftBatch, whole: Measured
    ) -> None:
        require_close(bench.measure(draft, [padded(batch, 5)]), whole)

    def test_a_long_neighbour_does_not_change_a_samples_loss(
        self, bench: Bench, draft: Draft
    ) -> None:
        bench.require_absent("split_dependent", SPLIT)
        short, long = bench.varied[1], bench.long
        together = bench.measure(draft, [bench.collate([short, long])])
        require_close(
            together, bench.measure(draft, [bench.collate([one]) for one in (short, long)])
        )

    def test_order_in_a_batch_does_not_matter(
        self, bench: Bench, draft: Draft, whole: Measured
    ) -> None:
        require_close(bench.measure(draft, [bench.collate(bench.varied[::-1])]), whole)

    @pytest.mark.parametrize("cut", [1, 2, 3])
    def test_any_split_into_micro_batches_gives_one_update(
        self, bench: Bench, draft: Draft, whole: Measured, cut: int
    ) -> None:
        bench.require_absent("split_dependent", SPLIT)
        parts = [bench.collate(part) for part in (bench.varied[:cut], bench.varied[cut:])]
        require_close(bench.measure(draft, parts), whole)

    def test_a_batch_twice_over_has_the_same_loss(
        self, bench: Bench, draft: Draft, batch: DraftBatch
    ) -> None:
        """A numerator that was divided already would be divided again."""
        once = bench.loss(draft, batch)
        twice = bench.loss(draft, bench.collate(bench.varied * 2))
        assert_close(twice.numerator / twice.denominator, once.numerator / once.denominator)

    # ------------------------------------------------------------ capabilities

    def test_compile_gives_one_graph_and_the_same_loss(
        self, bench: Bench, draft: Draft, batch: DraftBatch
    ) -> None:
        bench.require("compile")
        compiled = torch.compile(
            lambda batch: bench.loss(draft, batch), fullgraph=True, backend="eager"
        )
        assert_close(compiled(batch).numerator, bench.loss(draft, batch).numerator)

    def test_disagg_answers_an_empty_batch_with_an_empty_input(self, bench: Bench) -> None:
        bench.require("disagg")
        log = Log()
        found = take_over(bench, [], log)
        matrices = (found.hidden_BH, found.topk_p_BK, found.topk_index_BK)
        assert [len(tensor) for tensor in (*matrices, found.last_tokens_B)] == [0, 0, 0, 0]
        assert log.calls == []

    def test_disagg_gives_every_request_its_own_input(self, bench: Bench) -> None:
        """A request's neighbours change nothing of it, and it goes on from its own last token."""
        bench.require("disagg")
        together = take_over(bench, ["a", "b", "c"])
        for place, rid in enumerate(("a", "b", "c")):
            alone = take_over(bench, [rid])
            for name, tensor in vars(alone).items():
                assert torch.equal(vars(together)[name][place : place + 1], tensor), name
            assert torch.equal(alone.last_tokens_B, last_tokens([HandedOver(rid, {})]))

    def test_disagg_needs_the_width_of_the_draft_not_of_the_target(self, bench: Bench) -> None:
        bench.require("disagg")
        for width in (SHAPE.hidden_size, bench.world.spec.text_config.hidden_size):
            wire_row(bench, dataclasses.replace(SHAPE, hidden_size=width))

    def test_disagg_refuses_more_proposals_than_the_wire_carries(self, bench: Bench) -> None:
        """Cut off in silence, the last layers' proposals would be those of another request."""
        bench.require("disagg")
        if "topk_p" not in {field.name for field in wire_row(bench, SHAPE)}:
            pytest.skip("the algorithm starts from no proposals")
        with pytest.raises(UsageError, match="topk_"):
            wire_row(bench, dataclasses.replace(SHAPE, topk=4, layers=5))

    def test_disagg_names_the_request_and_the_field_that_is_missing(self, bench: Bench) -> None:
        """Of the row that was agreed upon: prefill and decode side ask for it apart."""
        bench.require("disagg")
        row = wire_row(bench, SHAPE)
        for field in row:
            full, log = [request(rid, row) for rid in ("a", "b", "c")], Log()
            full[1] = HandedOver("b", {**full[1].row, field.name: None})
            tokens_B = last_tokens(full)
            with pytest.raises(RowError, match=f"'b': {field.name} was not sent"):
                first_draft_input(bench, arrivals(full), tokens_B, log, SHAPE, lambda found: found)
            assert log.calls == [], "something was relayed of a batch that failed"
        assert wire_row(bench, SHAPE) == row

    def test_disagg_leaves_what_it_is_given_alone(self, bench: Bench) -> None:
        bench.require("disagg")
        row = wire_row(bench, SHAPE)
        requests = [request(rid, row) for rid in ("a", "b")]
        batch, tokens_B = arrivals(requests), last_tokens(requests)
        first_draft_input(bench, batch, tokens_B, Log(), SHAPE, lambda found: found)
        assert torch.equal(tokens_B, last_tokens(requests)), "the last tokens were altered"
        untouched = arrivals(requests)
        assert torch.equal(batch.seq_lens_B, untouched.seq_lens_B), "the lengths were altered"
        for one in requests:
            require_same_bits(given(one), given(request(one.rid, row)))

    def test_disagg_publishes_then_stashes_and_only_with_overlap(self, bench: Bench) -> None:
        """By the core, after the answer was checked: a hook that writes itself does it too early."""
        bench.require("disagg")
        log = Log()
        found = take_over(bench, ["a", "b"], log)
        assert log.calls == [("publish", [3, 5], [10, 11]), ("stash", [3, 5], found)]
        log = Log()
        take_over(bench, ["a", "b"], log, overlap=False)
        assert log.calls == []

    # ------------------------------------------------------------ learning

    def test_the_loss_falls(self, trained: Trained) -> None:
        """By a quarter within thirty steps on three short answers."""
        assert all(map(math.isfinite, trained.losses))
        first, last = trained.losses[0], trained.losses[:STEPS][-1]
        assert last < 0.75 * first, f"from {first:.3f} to {last:.3f}"

    # ------------------------------------------------------------ decoding

    def test_the_drafter_reads_what_training_captured(self, bench: Bench, draft: Draft) -> None:
        asked, captured = bench.drafter(draft).request, bench.request()
        assert set(asked.names) <= set(captured.names)
        assert asked.dtype == captured.dtype

    def test_decoding_is_lossless(self, bench: Bench, trained: Trained) -> None:
        """Also where proposals are mostly wrong: the prompts are learned ones and others."""
        model, prompts = bench.world.spec.model, bench.world.prompts
        with evaluating(trained.draft):
            drafter = bench.drafter(trained.draft)
            cut = [prompt[: -2 - row] for row, prompt in enumerate(prompts)]
            report = evaluate_prompts(model, drafter, [*prompts, *cut], GREEDY)
        assert report.lossless

    def test_the_drafter_computes_what_training_taught(
        self, bench: Bench, trained: Trained
    ) -> None:
        """A draft that fits its answers in training is right about them in decoding.

        Measured on three algorithms by default options (2026-12): untrained 0.00. Answers known by
        heart 1.00; with layers exchanged 0.51 and 0.82, features late by a position 0.02 and 0.93,
        positions off by three 0.00 and 0.80, a norm left out 0.51 and 0.22. Known in part 0.84 and
        0.91; with these mistakes 0.00, 0.13, 0.36 and 0.00. The norm before the head is no mistake
        that greedy drafts show.
        """
        least = 0.97 if knows_by_heart(trained.losses) else 0.5
        share = bench.agreement(trained.draft)
        assert share >= least, f"{share:.2f} of the drafts are right, expected {least}"

    def test_proposals_have_the_shapes_they_must(self, bench: Bench, trained: Trained) -> None:
        with evaluating(trained.draft):
            decoding = Decoding(bench, trained.draft, bench.world.prompts)
            tokens_BK, probs = decoding.propose()
            rows, drafts = len(bench.world.prompts), decoding.drafter.num_drafts
            assert drafts >= 1
            assert tokens_BK.shape == (rows, drafts)
            assert tokens_BK.dtype == torch.int64
            assert ((tokens_BK >= 0) & (tokens_BK < bench.world.spec.vocab_size)).all()
            assert probs is None, "greedy proposals have no probabilities"

    def test_sampled_drafts_come_with_their_probabilities(
        self, bench: Bench, trained: Trained
    ) -> None:
        with evaluating(trained.draft):
            decoding = Decoding(bench, trained.draft, bench.world.prompts)
            tokens_BK, probs_BKV = decoding.propose(temperature=0.8)
        assert probs_BKV is not None, "sampled proposals need the probabilities they came from"
        assert probs_BKV.shape == (*tokens_BK.shape, bench.world.spec.vocab_size)
        assert (probs_BKV >= 0).all()
        # Rejection sampling is exact for what sums to one; a softmax in fp32 is off by 1e-6.
        assert_close(probs_BKV.sum(-1), torch.ones(tokens_BK.shape))
        assert (probs_BKV.gather(-1, tokens_BK[..., None]) > 0).all()

    def test_sampled_drafts_follow_the_probabilities_they_come_with(
        self, bench: Bench, draft: Draft
    ) -> None:
        """The mean probability of what was drawn is that of the distribution, within 5 sigma."""
        excess, variance = 0.0, 0.0
        with evaluating(draft):
            decoding = Decoding(bench, draft, bench.world.prompts * 4)
            for seed in range(8):
                tokens_BK, probs_BKV = decoding.propose(temperature=0.3, seed=seed)
                assert probs_BKV is not None
                q = probs_BKV.double()
                drawn_BK = q.gather(-1, tokens_BK[..., None])[..., 0]
                mean_BK = q.square().sum(-1)
                excess += float((drawn_BK - mean_BK).sum())
                variance += float((q.pow(3).sum(-1) - mean_BK.square()).sum())
        assert abs(excess) < 5 * math.sqrt(variance), f"{excess / math.sqrt(variance):.1f} sigma"

    def test_proposing_changes_nothing_that_counts(self, bench: Bench, trained: Trained) -> None:
        with evaluating(trained.draft):
            once, often = (Decoding(bench, trained.draft, bench.world.prompts) for _ in range(2))
            for _ in range(2):
                first, _ = often.propose()
                often.propose(temperature=1.0)
                assert torch.equal(often.propose()[0], first)
                assert torch.equal(once.round(most=2)[0], often.round(most=2)[0])

    def test_the_drafter_leaves_what_it_is_given_alone(
        self, bench: Bench, trained: Trained
    ) -> None:
        """Tokens and counts are the verifier's, features the target's."""
        with evaluating(trained.draft):
            decoding = Decoding(bench, trained.draft, bench.world.prompts)
            decoding.round(most=2), decoding.round(most=2)
        assert not decoding.altered, f"the drafter alters {', '.join(sorted(decoding.altered))}"

    def test_a_batch_decodes_as_its_rows_alone(self, bench: Bench, trained: Trained) -> None:
        """Rows end at different rounds, so this goes through `select` as well."""
        prompts = bench.world.prompts
        together = bench.decode(trained.draft, prompts)
        for prompt, one in zip(prompts, together, strict=True):
            (alone,) = bench.decode(trained.draft, [prompt])
            assert (alone.tokens, alone.accepted) == (one.tokens, one.accepted)

    def test_selected_rows_go_on_as_before(self, bench: Bench, trained: Trained) -> None:
        rows_B = torch.tensor([2, 0])
        with evaluating(trained.draft):
            whole, part = (Decoding(bench, trained.draft, bench.world.prompts) for _ in range(2))
            whole.round(most=2), part.round(most=2)
            part.select(rows_B)
            for _ in range(2):
                assert torch.equal(part.round(most=2)[0], whole.round(most=2)[0][rows_B])

    # ------------------------------------------------------------ drafter: through graphs

    def test_a_state_is_tensors_with_the_batch_first(self, bench: Bench, trained: Trained) -> None:
        """Graphs narrow a state to its first rows, and would freeze anything else in it."""
        why = fault(bench.drafter(trained.draft).allocate(3, 16), 3)
        assert why is None, why

    def test_rounds_that_are_recorded_as_graphs_decode_the_same(
        self, bench: Bench, trained: Trained
    ) -> None:
        """Three rows padded to four; what waits for the device is refused."""
        eager = bench.decode(trained.draft, bench.world.prompts)
        recorded = bench.decode_recorded(trained.draft, bench.world.prompts)
        assert [one.tokens for one in recorded] == [one.tokens for one in eager]

    def test_a_drafter_follows_weights_that_are_updated_in_place(
        self, bench: Bench, trained: Trained
    ) -> None:
        """Evaluation during training keeps its drafter, and the graphs that read these weights."""
        draft, prompts = bench.build(seed=SEED + 1), bench.world.prompts
        kept = bench.drafter(draft)
        with torch.no_grad():
            draft.module.load_state_dict(trained_tensors(trained.draft), strict=False)
        assert bench.decode(draft, prompts, kept) == bench.decode(draft, prompts)

    # ------------------------------------------------------------ export

    def test_an_export_reads_back_to_the_same_bits(
        self, bench: Bench, trained: Trained, tmp_path: Path
    ) -> None:
        for layout in bench.layouts:
            again = bench.imported(bench.export(trained.draft, tmp_path / layout, layout))
            require_same_bits(snapshot(again), snapshot(trained.draft))

    def test_an_export_computes_the_same_loss_and_drafts(
        self, bench: Bench, trained: Trained, tmp_path: Path
    ) -> None:
        batch = bench.collate(bench.varied)
        for layout in bench.layouts:
            again = bench.imported(bench.export(trained.draft, tmp_path / layout, layout))
            require_same_output(bench.loss(again, batch), bench.loss(trained.draft, batch))
            prompts = bench.world.prompts
            assert bench.decode(again, prompts) == bench.decode(trained.draft, prompts)

    def test_exporting_changes_nothing_in_the_draft(
        self, bench: Bench, trained: Trained, tmp_path: Path
    ) -> None:
        for layout in bench.layouts:
            before, training = snapshot(trained.draft), trained.draft.module.training
            bench.export(trained.draft, tmp_path / layout, layout)
            require_same_bits(snapshot(trained.draft), before)
            assert trained.draft.module.training == training

    def test_an_unknown_layout_is_refused(
        self, bench: Bench, trained: Trained, tmp_path: Path
    ) -> None:
        if bench.layouts:
            with pytest.raises(UsageError, match="no-such-layout"):
                bench.export(trained.draft, tmp_path / "export", "no-such-layout")
            assert not any((tmp_path / "export").iterdir())

    def test_servers_draft_what_the_drafter_does(
        self, bench: Bench, trained: Trained, tmp_path: Path
    ) -> None:
        """An export, read anew by a server's conventions, gives the drafter's layers and drafts.

        Drafts are drawn, so that their distributions can be compared: our own algorithms differ by
        3e-5 nats (2026-11). Greedy drafts are the most probable ones, or within as much of them.
        """
        for server in bench.servers:
            folder = bench.export(trained.draft, tmp_path / server, "serving")
            served = bench.hook.read_export(folder=folder, server=server)
            host = Host.of(bench.world.spec)
            with evaluating(trained.draft):
                decoding = Decoding(bench, trained.draft, bench.world.prompts)
                greedy_BK, _ = decoding.propose()
                drawn_BK, probs_BKV = decoding.propose(temperature=1.0)
            assert served.captured(host) == decoding.drafter.request.layers
            assert probs_BKV is not None
            for row, drawn_K in enumerate(drawn_BK):
                at = bench.round(row, served.captured(host), host)
                gap = float(gaps(served, at, drawn_K, probs_BKV[row]).max())
                assert gap < 1e-3, f"{server}, prompt {row}: {gap:.2g} nats apart"
                lead = float(leads(served, at, greedy_BK[row]).max())
                assert lead < 1e-3, f"{server}, prompt {row}: another draft leads by {lead:.2g}"

    def test_an_unknown_server_is_refused(
        self, bench: Bench, trained: Trained, tmp_path: Path
    ) -> None:
        if bench.servers:
            folder = bench.export(trained.draft, tmp_path / "export", "serving")
            with pytest.raises(UsageError, match="no-such-server"):
                bench.hook.read_export(folder=folder, server="no-such-server")

    # ------------------------------------------------------------ the command line

    def test_a_run_trains_and_decodes_losslessly(self, project: Project) -> None:
        assert list(project.losses()) == [1, 2, 3, 4]
        assert json.loads(project.cli("eval", "--json"))["lossless"] is True

    def test_an_exported_run_accepts_as_the_checkpoint_does(
        self, bench: Bench, project: Project
    ) -> None:
        """By sampling, hot enough that a draft of four steps is accepted now and then."""
        hot = ("--json", "eval.temperature=4", "eval.max_new_tokens=16")
        keys = ("tokens", "rounds", "acceptance_by_position")
        report = json.loads(project.cli("eval", *hot))
        assert report["acceptance_length"] > 1
        for layout in bench.layouts:
            folder = project.run / f"export-{layout}"
            project.cli("export", "--layout", layout, "--out", folder)
            again = json.loads(project.cli("eval", "--export", folder, *hot))
            assert {key: again[key] for key in keys} == {key: report[key] for key in keys}

    def test_offline_and_colocated_runs_give_the_same_bits(
        self, bench: Bench, project: Project, tmp_path: Path
    ) -> None:
        colocated = Project(tmp_path / "colocated", bench, "memory")
        colocated.cli("train")
        assert colocated.losses() == project.losses()

    def test_a_stopped_run_resumes_to_the_same_bits(
        self, bench: Bench, project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        stopped = Project(tmp_path / "stopped", bench, "memory")
        monkeypatch.setenv(STOP_AT, "2")
        assert "step 2 of 4" in stopped.cli("train", stop=True, status=130)
        monkeypatch.delenv(STOP_AT)
        stopped.cli("train", stop=True)
        assert stopped.losses() == project.losses()


# ---------------------------------------------------------------- pieces of the tests

# Two orders of summation in fp32: our own algorithms differ by 2.4e-7 in the loss and by 2e-7 of the
# gradient's norm (2026-12). What is wrong in kind differs by 1e-3 and more.
LOSS_TOLERANCE, GRADIENT_TOLERANCE = 5e-6, 1e-5


def assert_close(found: Tensor, expected: Tensor) -> None:
    """Compare values that differ in the order of summation at most."""
    torch.testing.assert_close(found, expected, rtol=LOSS_TOLERANCE, atol=1e-7)


def require_close(found: Measured, expected: Measured) -> None:
    """The same loss, metrics and gradient, up to the order of summation."""
    assert_close(found.numerator, expected.numerator)
    assert_close(found.denominator, expected.denominator)
    assert found.counts.keys() == expected.counts.keys()
    for name, (above, below) in expected.counts.items():
        ours = found.counts[name][0] / found.counts[name][1]
        torch.testing.assert_close(
            ours, above / below, rtol=LOSS_TOLERANCE, atol=1e-7, equal_nan=True, msg=explained(name)
        )
    norm = math.sqrt(sum(float(g.square().sum()) for g in expected.gradients.values()))
    for name, gradient in expected.gradients.items():
        gap = float((found.gradients[name] - gradient).norm())
        assert gap <= GRADIENT_TOLERANCE * norm, f"gradient of {name}: {gap:.3g} of {norm:.3g}"


def explained(metric: str) -> Callable[[str], str]:
    return lambda text: f"metric {metric}: {text}"


def require_same_bits(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """Compare dtype, shape and every bit."""
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name], tensor), f"{name} differs"


def require_same_output(found: StepOutput, expected: StepOutput) -> None:
    """The same loss to the bit."""
    assert torch.equal(found.numerator, expected.numerator)
    assert torch.equal(found.denominator, expected.denominator)


def contents(fields: Mapping[str, Any]) -> dict[str, Tensor]:
    """Copies of the tensors of a sample or a batch, by field."""
    tensors = {name: value for name, value in fields.items() if isinstance(value, Tensor)}
    return {name: value.clone() for name, value in {**tensors, **fields["features"]}.items()}


def given(handed: HandedOver) -> dict[str, Tensor]:
    """The fields of a row that were sent."""
    return {name: values for name, values in handed.row.items() if values is not None}


def listed(value: Any) -> Any:
    """Write tuples as lists, as JSON does, and mappings as dicts."""
    if isinstance(value, Mapping):
        return {key: listed(item) for key, item in value.items()}
    return [listed(item) for item in value] if isinstance(value, list | tuple) else value
