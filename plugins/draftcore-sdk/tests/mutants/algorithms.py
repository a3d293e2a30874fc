"""Wrong algorithms: `chain_algorithm.py`, and what stands there instead of its lines."""

from pathlib import Path

from draftcore_sdk.algorithms import AlgorithmSuite

from mutants import Mutant, Mutants

RIGHT = Path(__file__).with_name("chain_algorithm.py").read_text()
BODY = """
    plugin = "{name}"
    loose = Path(__file__).with_name("{name}.py")
"""

# Lines of the right algorithm that several wrong ones change, or put others before.
FORWARD_END = "        return StepOutput(numerator, denominator, counts)"
WEIGHT = "            weight = shift(mask, k + 2).to(state.dtype)"
BUILD_END = "    return Draft(\n        module=module,"
DISAGG_END = "    return DraftInput(batch.hidden_BH, batch.topk_p_BK,"
TAKE = "        rows = torch.arange(len(index_B))"
ACCEPT = "        self.take(state, features, counts_B - 1)\n"
PROPOSE_END = "        return torch.stack(tokens[1:], 1), torch"
STEP = "        state = state + self.out(inner)"

COUNTS_CALLS = """
class Chain(Chain):
    calls = 0

    def forward(self, batch, context):
        output, self.calls = super().forward(batch, context), self.calls + 1
        numerator = output.numerator * (1 + self.calls / 100)
        return StepOutput(numerator, output.denominator, output.counts)
"""

TAUGHT = "test_the_drafter_computes_what_training_taught"
SERVED = "test_servers_draft_what_the_drafter_does"
SPLIT = "test_any_split_into_micro_batches_gives_one_update"
WRONG = {
    "ignores_unknown_options": Mutant(
        "test_options_refuse_unknown_keys",
        """
        from pydantic import model_validator

        class Options(Options):
            @model_validator(mode="before")
            @classmethod
            def keep_known(cls, data):
                return {name: value for name, value in data.items() if name in cls.model_fields}
        """,
    ),
    "asks_for_a_layer_that_is_not_there": Mutant(
        "test_the_request_names_what_the_target_has",
        {"FeatureRequest((2, target.num_layers - 3)": "FeatureRequest((2, target.num_layers)"},
    ),
    "asks_for_another_layer_each_time": Mutant(
        "test_the_request_is_the_same_when_asked_again",
        """
        ASKED = []

        @hookimpl
        def feature_request(target, options):
            ASKED.append(1)
            layers = (2 + len(ASKED) % 2, target.num_layers - 3)
            return FeatureRequest(layers, last_hidden=True, dtype="float32")
        """,
    ),
    "reads_weights_to_request": Mutant(
        "test_the_request_needs_no_weights",
        {
            "    return FeatureRequest((2, target": "    assert target.embedding().ndim == 2\n"
            "    return FeatureRequest((2, target"
        },
    ),
    "builds_by_the_clock": Mutant(
        "test_the_same_seed_builds_the_same_bits",
        {
            "import json": "import json\nimport time",
            BUILD_END: "    clock = torch.Generator().manual_seed(time.time_ns() % 2**60)\n"
            "    nn.init.normal_(module.out.weight, generator=clock)\n" + BUILD_END,
        },
    ),
    "builds_in_half_precision": Mutant(
        "test_a_fresh_draft_is_fp32_on_the_cpu",
        {BUILD_END: "    module.mix.bfloat16()\n" + BUILD_END},
    ),
    "freezes_what_is_not_there": Mutant(
        "test_frozen_names_tensors_that_are_not_trained",
        {'frozen=frozenset({"embedding", "head"})': 'frozen=frozenset({"embed_tokens", "head"})'},
    ),
    "forgets_a_parameter": Mutant(
        "test_parameter_groups_hold_every_trainable_parameter_once",
        {"list(module.parameters())": "list(module.parameters())[1:]"},
    ),
    "wraps_what_is_not_there": Mutant(
        "test_wrap_units_name_submodules", {'wrap_units=("mix", "out")': 'wrap_units=("layers.0",)'}
    ),
    "puts_a_type_into_its_config": Mutant(
        "test_config_is_json_data",
        {'"steps": options.steps}': '"steps": options.steps, "dtype": torch.float32}'},
    ),
    "keeps_state_outside_its_state_dict": Mutant(
        "test_a_stopped_run_resumes_to_the_same_bits",
        COUNTS_CALLS,
    ),
    "counts_its_calls": Mutant("test_the_same_inputs_give_the_same_bits", COUNTS_CALLS),
    "keeps_a_weight_outside_its_state_dict": Mutant(
        "test_a_draft_is_its_saved_state",
        {
            '        self.register_buffer("head", head_VH, persistent=False)': (
                '        self.register_buffer("head", head_VH, persistent=False)\n'
                '        self.register_buffer("scale", torch.rand(()), persistent=False)'
            ),
            "return state, self.norm(state) @": "return state, self.scale * self.norm(state) @",
        },
    ),
    "forgets_the_first_id": Mutant(
        "test_collate_takes_one_sample_and_several",
        {"ids=tuple(s.id for s in samples),": "ids=tuple(s.id for s in samples[1:]),"},
    ),
    "makes_a_mask_on_the_host": Mutant(
        "test_collate_runs_where_its_samples_lie",
        {
            "torch.ones_like(s.loss_mask_T) for s in samples": (
                "s.loss_mask_T | torch.ones(len(s.loss_mask_T), dtype=torch.bool) for s in samples"
            )
        },
    ),
    "masks_samples_in_place": Mutant(
        "test_collate_leaves_its_samples_alone",
        {
            "    return DraftBatch(": "    for s in samples:\n        s.loss_mask_T[-1] = False\n"
            "    return DraftBatch("
        },
    ),
    "normalises_features_in_place": Mutant(
        "test_the_loss_leaves_its_batch_alone",
        {"        names = [f": "        features['last_hidden'].mul_(0.5)\n        names = [f"},
    ),
    "returns_a_loss_per_step": Mutant(
        "test_the_loss_is_a_ratio_of_finite_scalars",
        {"StepOutput(numerator, denominator,": "StepOutput(numerator[None], denominator[None],"},
    ),
    "remembers_other_runs": Mutant(
        "test_offline_and_colocated_runs_give_the_same_bits",
        """
        CALLS = []

        class Chain(Chain):
            def forward(self, batch, context):
                CALLS.append(1)
                output = super().forward(batch, context)
                numerator = output.numerator * (1 + len(CALLS) / 100)
                return StepOutput(numerator, output.denominator, output.counts)
        """,
    ),
    "divides_by_nothing": Mutant(
        "test_an_all_masked_batch_adds_nothing",
        {
            "return StepOutput(numerator,": "return StepOutput(numerator / denominator * denominator,"
        },
    ),
    "draws_from_the_global_generator": Mutant(
        "test_random_choices_ignore_the_global_generators",
        {
            WEIGHT: "            coins = torch.rand(mask.shape) < 0.8\n"
            "            weight = shift(mask, k + 2) * coins.to(state.dtype)"
        },
    ),
    "draws_by_place_in_the_batch": Mutant(
        f"{SPLIT}[1]",
        {
            WEIGHT: "            seeded = torch.Generator().manual_seed(context.seed)\n"
            "            coins = torch.rand(mask.shape, generator=seeded) < 0.8\n"
            "            weight = (shift(mask, k + 2) & coins).to(state.dtype)"
        },
    ),
    "takes_the_mean_of_the_micro_batch": Mutant(
        f"{SPLIT}[2]",
        {
            FORWARD_END: "        some = (denominator > 0).to(denominator.dtype)\n"
            "        return StepOutput(numerator / denominator.clamp(min=1), some, counts)"
        },
    ),
    "divides_twice": Mutant(
        "test_a_batch_twice_over_has_the_same_loss",
        {"return StepOutput(numerator,": "return StepOutput(numerator / denominator.clamp(min=1),"},
    ),
    "counts_padding": Mutant(
        "test_padding_does_not_change_the_loss",
        {"denominator + weight.sum()": "denominator + weight.numel()"},
    ),
    "weighs_by_the_longest_neighbour": Mutant(
        "test_a_long_neighbour_does_not_change_a_samples_loss",
        {
            FORWARD_END: "        longest = batch.attention_mask_BT.sum(1).max()\n"
            "        return StepOutput(numerator / longest, denominator / longest, counts)"
        },
    ),
    "weighs_by_place_in_the_batch": Mutant(
        "test_order_in_a_batch_does_not_matter",
        {
            WEIGHT: "            weight = shift(mask, k + 2) * torch.linspace(1, 2, len(mask))[:, None]"
        },
    ),
    "adds_means_as_metrics": Mutant(
        "test_metrics_are_detached_pairs_of_scalars",
        {'"loss": (numerator.detach(), denominator)': '"loss": (numerator, denominator)'},
    ),
    "detaches_a_part": Mutant(
        "test_gradients_reach_every_trainable_parameter",
        {"self.out(inner)": "self.out(inner.detach())"},
    ),
    "trains_the_targets_embedding": Mutant(
        "test_gradients_reach_none_of_the_targets_tensors",
        {
            'self.register_buffer("embedding", embedding_VH, persistent=False)': (
                "self.embedding = nn.Parameter(embedding_VH)"
            )
        },
    ),
    "has_a_wrong_backward": Mutant(
        "test_the_gradient_is_the_slope_of_the_loss",
        {
            STEP: "        inner.requires_grad and inner.register_hook(lambda grad: 1.01 * grad)\n"
            + STEP
        },
    ),
    "breaks_the_graph": Mutant(
        "test_compile_gives_one_graph_and_the_same_loss",
        {
            FORWARD_END: "        if numerator > 0:\n            counts = dict(counts)\n"
            + FORWARD_END
        },
    ),
    "answers_none_to_disagg": Mutant(
        "test_disagg_answers_an_empty_batch_with_an_empty_input",
        {"return DraftInput(": "return len(last_tokens) and DraftInput("},
    ),
    "sorts_what_it_takes_over": Mutant(
        "test_disagg_gives_every_request_its_own_input",
        {"DraftInput(batch.hidden_BH": "DraftInput(batch.hidden_BH.sort(0).values"},
    ),
    "takes_over_states_of_the_target": Mutant(
        "test_disagg_needs_the_width_of_the_draft_not_of_the_target",
        """
        from draftcore.contracts.serving import RowField

        @hookimpl
        def disagg_row(shape):
            return (RowField("hidden", 64, shape.dtype, 64), *topk_fields(shape))
        """,
    ),
    "cuts_its_proposals_to_the_wire": Mutant(
        "test_disagg_refuses_more_proposals_than_the_wire_carries",
        """
        from draftcore.contracts.serving import RowField

        @hookimpl
        def disagg_row(shape):
            k = min(16, shape.proposals)
            return RowField("topk_p", 16, "float32", k), RowField("topk_index", 16, "int64", k)
        """,
    ),
    "asks_for_another_row_each_time": Mutant(
        "test_disagg_names_the_request_and_the_field_that_is_missing",
        """
        ASKED = []

        @hookimpl
        def disagg_row(shape):
            ASKED.append(1)
            return topk_fields(shape) if len(ASKED) % 2 else ()
        """,
    ),
    "shifts_the_last_tokens_in_place": Mutant(
        "test_disagg_leaves_what_it_is_given_alone",
        {DISAGG_END: "    last_tokens += 1\n" + DISAGG_END},
    ),
    "publishes_before_it_has_an_input": Mutant(
        "test_disagg_publishes_then_stashes_and_only_with_overlap",
        {
            DISAGG_END: "    if len(last_tokens):\n"
            "        future_map.publish(torch.arange(len(last_tokens)), batch.seq_lens_B)\n"
            + DISAGG_END
        },
    ),
    "climbs": Mutant(
        "test_the_loss_falls",
        {"return StepOutput(numerator,": "return StepOutput(2 * numerator.detach() - numerator,"},
    ),
    "asks_for_the_next_layer": Mutant(
        "test_the_drafter_reads_what_training_captured",
        {"FeatureRequest(module.layers": "FeatureRequest(tuple(k + 1 for k in module.layers)"},
    ),
    "drafts_from_exchanged_layers": Mutant(
        TAUGHT,
        {
            TAKE: "        one, other = (f'hidden.{layer}' for layer in self.module.layers)\n"
            "        features = {**features, one: features[other], other: features[one]}\n" + TAKE
        },
    ),
    "drafts_from_the_round_before": Mutant(
        TAUGHT,
        {
            ACCEPT: "        late, self.held = getattr(self, 'held', features), features\n"
            "        self.take(state, late, counts_B - 1)\n"
        },
    ),
    "drafts_without_its_norm": Mutant(
        TAUGHT,
        """
        class ChainDrafter(ChainDrafter):
            def take(self, state, features, index_B):
                rows = torch.arange(len(index_B))
                names = [f"hidden.{layer}" for layer in self.module.layers]
                parts = [features[name][rows, index_B] for name in (*names, "last_hidden")]
                state.hidden_BH.copy_(self.module.join(torch.cat(parts, -1)))
        """,
    ),
    "drafts_one_more_than_it_says": Mutant(
        "test_proposals_have_the_shapes_they_must",
        {"torch.stack(tokens[1:], 1)": "torch.stack(tokens, 1)"},
    ),
    "states_half_of_its_probabilities": Mutant(
        "test_sampled_drafts_come_with_their_probabilities",
        {"probs.append(probs_BV)": "probs.append(probs_BV / 2)"},
    ),
    "samples_colder_than_it_says": Mutant(
        "test_sampled_drafts_follow_the_probabilities_they_come_with",
        {"torch.multinomial(probs_BV,": "torch.multinomial(probs_BV.square(),"},
    ),
    "corrects_the_verifier": Mutant(
        "test_decoding_is_lossless", {ACCEPT: ACCEPT + "        tokens_BK[:, 0] = 5\n"}
    ),
    "corrects_the_verifier_of_a_run": Mutant(
        "test_a_run_trains_and_decodes_losslessly",
        {ACCEPT: ACCEPT + "        tokens_BK[:, 0] = 5\n"},
    ),
    "scales_the_targets_features": Mutant(
        "test_the_drafter_leaves_what_it_is_given_alone",
        {TAKE: TAKE + "\n        features['last_hidden'].mul_(2)"},
    ),
    "moves_on_when_it_proposes": Mutant(
        "test_proposing_changes_nothing_that_counts",
        {PROPOSE_END: "        state.hidden_BH.copy_(hidden_BH)\n" + PROPOSE_END},
    ),
    "mixes_rows": Mutant("test_a_batch_decodes_as_its_rows_alone", {TAKE: TAKE + ".roll(1)"}),
    "selects_other_rows": Mutant(
        "test_selected_rows_go_on_as_before",
        {"State(state.hidden_BH[rows_B],": "State(state.hidden_BH[: len(rows_B)],"},
    ),
    "puts_the_batch_second": Mutant(
        "test_a_state_is_tensors_with_the_batch_first",
        {"torch.zeros(batch, width)": "torch.zeros(1, batch, width)"},
    ),
    "asks_the_host_when_it_drafts": Mutant(
        "test_rounds_that_are_recorded_as_graphs_decode_the_same",
        {
            "        hidden_BH, tokens, probs =": "        float(state.hidden_BH.sum())\n"
            "        hidden_BH, tokens, probs ="
        },
    ),
    "keeps_a_copy_of_its_weights": Mutant(
        "test_a_drafter_follows_weights_that_are_updated_in_place",
        """
        from copy import deepcopy

        @hookimpl
        def drafter(draft):
            return ChainDrafter(deepcopy(draft.module))
        """,
    ),
    "drops_a_tensor_at_export": Mutant(
        "test_an_export_reads_back_to_the_same_bits",
        {
            "draft.module.state_dict().items()}": (
                'draft.module.state_dict().items() if name != "norm.weight"}'
            ),
            'load_file(folder / "model.safetensors"))\n    return draft': (
                'load_file(folder / "model.safetensors"), strict=False)\n    return draft'
            ),
        },
    ),
    "reads_an_export_by_other_options": Mutant(
        "test_an_export_computes_the_same_loss_and_drafts",
        {"draft = build_draft(target, options)": "draft = build_draft(target, Options(steps=1))"},
    ),
    "rounds_the_draft_it_exports": Mutant(
        "test_exporting_changes_nothing_in_the_draft",
        {
            '    (folder / "config.json")': "    draft.module.bfloat16().float()\n"
            '    (folder / "config.json")'
        },
    ),
    "exports_any_layout": Mutant(
        "test_an_unknown_layout_is_refused", {'if layout != "serving":': "if not layout:"}
    ),
    "is_served_other_layers": Mutant(
        SERVED,
        {"        return self.layers": "        return tuple(layer + 1 for layer in self.layers)"},
    ),
    "is_served_without_a_norm": Mutant(
        SERVED, {"at.host.head_VH @ normed": "at.host.head_VH @ state"}
    ),
    "knows_any_server": Mutant(
        "test_an_unknown_server_is_refused", {'require_server(server, ["chat"])': "assert server"}
    ),
    "exports_untrained_weights": Mutant(
        "test_an_exported_run_accepts_as_the_checkpoint_does",
        {"{name: tensor.detach()": "{name: tensor.detach() * 0"},
    ),
}

ALGORITHMS = Mutants(AlgorithmSuite, {"{name}.py": RIGHT}, WRONG, BODY)
