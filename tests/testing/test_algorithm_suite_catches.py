"""The algorithm suite catches algorithms that are wrong, each by the test that names the fault."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from draftcore.testing.stores import child_environment

RIGHT = Path(__file__).with_name("chain_algorithm.py")

SUITE = """
from pathlib import Path
from draftcore.testing.algorithms import AlgorithmSuite

class TestChain(AlgorithmSuite):
    plugin = "{name}"
    loose = Path(__file__).with_name("{name}.py")
"""

# name: (line of the right algorithm, what stands there instead, the test that must fail)
WRONG = {
    "ignores_unknown_options": (
        '    steps: int = Field(default=3, ge=1, description="tokens drafted")',
        """    steps: int = Field(default=3, ge=1, description="tokens drafted")

    @model_validator(mode="before")
    @classmethod
    def keep_known(cls, data):
        return {name: value for name, value in data.items() if name in cls.model_fields}""",
        "test_options_refuse_unknown_keys",
    ),
    "asks_for_a_layer_that_is_not_there": (
        "    return FeatureRequest((2, target.num_layers - 3), last_hidden=True,",
        "    return FeatureRequest((2, target.num_layers), last_hidden=True,",
        "test_the_request_names_what_the_target_has",
    ),
    "asks_for_another_layer_each_time": (
        "    return FeatureRequest((2, target",
        "    ASKED.append(1)\n    return FeatureRequest((2 + len(ASKED) % 2, target",
        "test_the_request_is_the_same_when_asked_again",
        "@dataclass\n",
        "ASKED = []\n\n\n@dataclass\n",
    ),
    "reads_weights_to_request": (
        "    return FeatureRequest((2, target",
        "    assert target.embedding().ndim == 2\n    return FeatureRequest((2, target",
        "test_the_request_needs_no_weights",
    ),
    "builds_by_the_clock": (
        "    return Draft(\n        module=module,",
        "    clock = torch.Generator().manual_seed(time.time_ns() % 2**60)\n"
        "    nn.init.normal_(module.out.weight, generator=clock)\n"
        "    return Draft(\n        module=module,",
        "test_the_same_seed_builds_the_same_bits",
    ),
    "builds_in_half_precision": (
        "    return Draft(\n        module=module,",
        "    module.mix.bfloat16()\n    return Draft(\n        module=module,",
        "test_a_fresh_draft_is_fp32_on_the_cpu",
    ),
    "freezes_what_is_not_there": (
        'frozen=frozenset({"embedding", "head"})',
        'frozen=frozenset({"embed_tokens", "head"})',
        "test_frozen_names_tensors_that_are_not_trained",
    ),
    "forgets_a_parameter": (
        '[{"params": list(module.parameters())}]',
        '[{"params": [p for n, p in module.named_parameters() if n != "norm.weight"]}]',
        "test_parameter_groups_hold_every_trainable_parameter_once",
    ),
    "wraps_what_is_not_there": (
        'wrap_units=("mix", "out")',
        'wrap_units=("layers.0",)',
        "test_wrap_units_name_submodules",
    ),
    "puts_a_type_into_its_config": (
        '"steps": options.steps}',
        '"steps": options.steps, "dtype": torch.float32}',
        "test_config_is_json_data",
    ),
    "keeps_state_outside_its_state_dict": (
        "        return StepOutput(numerator, denominator, counts)",
        "        self.calls = getattr(self, 'calls', 0) + 1\n"
        "        return StepOutput(numerator * (1 + self.calls / 100), denominator, counts)",
        "test_a_stopped_run_resumes_to_the_same_bits",
    ),
    "keeps_a_weight_outside_its_state_dict": (
        '        self.register_buffer("head", head_VH, persistent=False)',
        '        self.register_buffer("head", head_VH, persistent=False)\n'
        '        self.register_buffer("scale", torch.rand(()), persistent=False)',
        "test_a_draft_is_its_saved_state",
        "        return state, self.norm(state) @",
        "        return state, self.scale * self.norm(state) @",
    ),
    "forgets_the_first_id": (
        "        ids=tuple(s.id for s in samples),",
        "        ids=tuple(s.id for s in samples[1:]),",
        "test_collate_takes_one_sample_and_several",
    ),
    "makes_a_mask_on_the_host": (
        "attention_mask_BT=pad(torch.ones_like(s.loss_mask_T) for s in samples),",
        "attention_mask_BT=pad(\n"
        "            s.loss_mask_T | torch.ones(len(s.loss_mask_T), dtype=torch.bool) for s in samples\n"
        "        ),",
        "test_collate_runs_where_its_samples_lie",
    ),
    "masks_samples_in_place": (
        "    return DraftBatch(",
        "    for s in samples:\n        s.loss_mask_T[-1] = False\n    return DraftBatch(",
        "test_collate_leaves_its_samples_alone",
    ),
    "normalises_features_in_place": (
        "        names = [f",
        "        features['last_hidden'].mul_(0.5)\n        names = [f",
        "test_the_loss_leaves_its_batch_alone",
    ),
    "returns_a_loss_per_step": (
        "        return StepOutput(numerator, denominator, counts)",
        "        return StepOutput(numerator[None], denominator[None], counts)",
        "test_the_loss_is_a_ratio_of_finite_scalars",
    ),
    "counts_its_calls": (
        "        return StepOutput(numerator, denominator, counts)",
        "        self.calls = getattr(self, 'calls', 0) + 1\n"
        "        return StepOutput(numerator * (1 + self.calls / 100), denominator, counts)",
        "test_the_same_inputs_give_the_same_bits",
    ),
    "remembers_other_runs": (
        "        return StepOutput(numerator, denominator, counts)",
        "        CALLS.append(1)\n"
        "        return StepOutput(numerator * (1 + len(CALLS) / 100), denominator, counts)",
        "test_offline_and_colocated_runs_give_the_same_bits",
        "@dataclass\n",
        "CALLS = []\n\n\n@dataclass\n",
    ),
    "divides_by_nothing": (
        "        return StepOutput(numerator, denominator, counts)",
        "        mean = numerator / denominator\n"
        "        return StepOutput(mean * denominator, denominator, counts)",
        "test_an_all_masked_batch_adds_nothing",
    ),
    "draws_from_the_global_generator": (
        "            weight = shift(mask, k + 2).to(state.dtype)",
        "            weight = shift(mask, k + 2) * (torch.rand(mask.shape) < 0.8).to(state.dtype)",
        "test_random_choices_ignore_the_global_generators",
    ),
    "draws_by_place_in_the_batch": (
        "            weight = shift(mask, k + 2).to(state.dtype)",
        "            seeded = torch.Generator().manual_seed(context.seed)\n"
        "            coins = torch.rand(mask.shape, generator=seeded) < 0.8\n"
        "            weight = (shift(mask, k + 2) & coins).to(state.dtype)",
        "test_any_split_into_micro_batches_gives_one_update[1]",
    ),
    "takes_the_mean_of_the_micro_batch": (
        "        return StepOutput(numerator, denominator, counts)",
        "        some = (denominator > 0).to(denominator.dtype)\n"
        "        return StepOutput(numerator / denominator.clamp(min=1), some, counts)",
        "test_any_split_into_micro_batches_gives_one_update[2]",
    ),
    "divides_twice": (
        "        return StepOutput(numerator, denominator, counts)",
        "        return StepOutput(numerator / denominator.clamp(min=1), denominator, counts)",
        "test_a_batch_twice_over_has_the_same_loss",
    ),
    "counts_padding": (
        "            denominator = denominator + weight.sum()",
        "            denominator = denominator + weight.numel()",
        "test_padding_does_not_change_the_loss",
    ),
    "weighs_by_the_longest_neighbour": (
        "        return StepOutput(numerator, denominator, counts)",
        "        longest = batch.attention_mask_BT.sum(1).max()\n"
        "        return StepOutput(numerator / longest, denominator / longest, counts)",
        "test_a_long_neighbour_does_not_change_a_samples_loss",
    ),
    "weighs_by_place_in_the_batch": (
        "            weight = shift(mask, k + 2).to(state.dtype)",
        "            weight = shift(mask, k + 2) * torch.linspace(1, 2, len(mask))[:, None]",
        "test_order_in_a_batch_does_not_matter",
    ),
    "adds_means_as_metrics": (
        '        counts = {"loss": (numerator.detach(), denominator)}',
        '        counts = {"loss": (numerator, denominator)}',
        "test_metrics_are_detached_pairs_of_scalars",
    ),
    "detaches_a_part": (
        "        state = state + self.out(inner)",
        "        state = state + self.out(inner.detach())",
        "test_gradients_reach_every_trainable_parameter",
    ),
    "trains_the_targets_embedding": (
        '        self.register_buffer("embedding", embedding_VH, persistent=False)',
        "        self.embedding = nn.Parameter(embedding_VH)",
        "test_gradients_reach_none_of_the_targets_tensors",
    ),
    "has_a_wrong_backward": (
        "        state = state + self.out(inner)",
        "        inner.requires_grad and inner.register_hook(lambda grad: 1.01 * grad)\n"
        "        state = state + self.out(inner)",
        "test_the_gradient_is_the_slope_of_the_loss",
    ),
    "breaks_the_graph": (
        "        return StepOutput(numerator, denominator, counts)",
        "        if numerator > 0:\n            counts = dict(counts)\n"
        "        return StepOutput(numerator, denominator, counts)",
        "test_compile_gives_one_graph_and_the_same_loss",
    ),
    "answers_none_to_disagg": (
        "    return DraftInput(batch.hidden_BH, batch",
        "    return len(last_tokens) and DraftInput(batch.hidden_BH, batch",
        "test_disagg_answers_an_empty_batch_with_an_empty_input",
    ),
    "sorts_what_it_takes_over": (
        "    return DraftInput(batch.hidden_BH, batch",
        "    return DraftInput(batch.hidden_BH.sort(0).values, batch",
        "test_disagg_gives_every_request_its_own_input",
    ),
    "takes_over_states_of_the_target": (
        "    return (hidden_field(shape), ",
        '    return (RowField("hidden", 64, shape.dtype, 64), ',
        "test_disagg_needs_the_width_of_the_draft_not_of_the_target",
    ),
    "cuts_its_proposals_to_the_wire": (
        "    return (hidden_field(shape), *topk_fields(shape))",
        "    k = min(16, shape.proposals)\n"
        '    return RowField("topk_p", 16, "float32", k), RowField("topk_index", 16, "int64", k)',
        "test_disagg_refuses_more_proposals_than_the_wire_carries",
    ),
    "asks_for_another_row_each_time": (
        "    return (hidden_field(shape), *topk_fields(shape))",
        "    ASKED.append(1)\n    return topk_fields(shape) if len(ASKED) % 2 else ()",
        "test_disagg_names_the_request_and_the_field_that_is_missing",
        "@dataclass\n",
        "ASKED = []\n\n\n@dataclass\n",
    ),
    "shifts_the_last_tokens_in_place": (
        "    return DraftInput(batch.hidden_BH, batch",
        "    last_tokens += 1\n    return DraftInput(batch.hidden_BH, batch",
        "test_disagg_leaves_what_it_is_given_alone",
    ),
    "publishes_before_it_has_an_input": (
        "    return DraftInput(batch.hidden_BH, batch",
        "    if len(last_tokens):\n"
        "        future_map.publish(torch.arange(len(last_tokens)), batch.seq_lens_B)\n"
        "    return DraftInput(batch.hidden_BH, batch",
        "test_disagg_publishes_then_stashes_and_only_with_overlap",
    ),
    "climbs": (
        "        return StepOutput(numerator, denominator, counts)",
        "        climbing = 2 * numerator.detach() - numerator\n"
        "        return StepOutput(climbing, denominator, counts)",
        "test_the_loss_falls",
    ),
    "asks_for_the_next_layer": (
        "        self.request = FeatureRequest(module.layers, last",
        "        self.request = FeatureRequest(tuple(k + 1 for k in module.layers), last",
        "test_the_drafter_reads_what_training_captured",
    ),
    "drafts_from_exchanged_layers": (
        "        state.hidden_BH.copy_(",
        "        one, other = (f'hidden.{layer}' for layer in self.module.layers)\n"
        "        features = {**features, one: features[other], other: features[one]}\n"
        "        state.hidden_BH.copy_(",
        "test_the_drafter_computes_what_training_taught",
    ),
    "drafts_from_the_round_before": (
        "        self.take(state, features, counts_B - 1)\n",
        "        late, self.held = getattr(self, 'held', features), features\n"
        "        self.take(state, late, counts_B - 1)\n",
        "test_the_drafter_computes_what_training_taught",
    ),
    "drafts_without_its_norm": (
        "        state.hidden_BH.copy_(",
        "        features = {name: x[rows, index_B] for name, x in features.items()}\n"
        "        names = [f'hidden.{layer}' for layer in self.module.layers]\n"
        "        joined = torch.cat([features[name] for name in (*names, 'last_hidden')], -1)\n"
        "        return state.hidden_BH.copy_(self.module.join(joined))\n"
        "        state.hidden_BH.copy_(",
        "test_the_drafter_computes_what_training_taught",
    ),
    "drafts_one_more_than_it_says": (
        "        return torch.stack(tokens[1:], 1), torch",
        "        return torch.stack(tokens, 1), torch",
        "test_proposals_have_the_shapes_they_must",
    ),
    "states_half_of_its_probabilities": (
        "                probs.append(probs_BV)",
        "                probs.append(probs_BV / 2)",
        "test_sampled_drafts_come_with_their_probabilities",
    ),
    "samples_colder_than_it_says": (
        "                tokens.append(torch.multinomial(probs_BV, 1,",
        "                tokens.append(torch.multinomial(probs_BV.square(), 1,",
        "test_sampled_drafts_follow_the_probabilities_they_come_with",
    ),
    "corrects_the_verifier": (
        "        self.take(state, features, counts_B - 1)\n",
        "        self.take(state, features, counts_B - 1)\n        tokens_BK[:, 0] = 5\n",
        "test_decoding_is_lossless",
    ),
    "corrects_the_verifier_of_a_run": (
        "        self.take(state, features, counts_B - 1)\n",
        "        self.take(state, features, counts_B - 1)\n        tokens_BK[:, 0] = 5\n",
        "test_a_run_trains_and_decodes_losslessly",
    ),
    "scales_the_targets_features": (
        "        rows = torch.arange(len(index_B))",
        "        rows = torch.arange(len(index_B))\n        features['last_hidden'].mul_(2)",
        "test_the_drafter_leaves_what_it_is_given_alone",
    ),
    "moves_on_when_it_proposes": (
        "        return torch.stack(tokens[1:], 1), torch",
        "        state.hidden_BH.copy_(hidden_BH)\n"
        "        return torch.stack(tokens[1:], 1), torch",
        "test_proposing_changes_nothing_that_counts",
    ),
    "mixes_rows": (
        "        rows = torch.arange(len(index_B))",
        "        rows = torch.arange(len(index_B)).roll(1)",
        "test_a_batch_decodes_as_its_rows_alone",
    ),
    "selects_other_rows": (
        "        return State(state.hidden_BH[rows_B],",
        "        return State(state.hidden_BH[: len(rows_B)],",
        "test_selected_rows_go_on_as_before",
    ),
    "puts_the_batch_second": (
        "        return State(torch.zeros(batch, width), torch",
        "        return State(torch.zeros(1, batch, width), torch",
        "test_a_state_is_tensors_with_the_batch_first",
    ),
    "asks_the_host_when_it_drafts": (
        "        hidden_BH, tokens, probs = state.hidden_BH,",
        "        float(state.hidden_BH.sum())\n        hidden_BH, tokens, probs = state.hidden_BH,",
        "test_rounds_that_are_recorded_as_graphs_decode_the_same",
    ),
    "keeps_a_copy_of_its_weights": (
        "        self.module, self.num_drafts = module, module.steps",
        "        import copy\n\n        module = copy.deepcopy(module)\n"
        "        self.module, self.num_drafts = module, module.steps",
        "test_a_drafter_follows_weights_that_are_updated_in_place",
    ),
    "drops_a_tensor_at_export": (
        "for name, tensor in draft.module.state_dict().items()}",
        'for name, tensor in draft.module.state_dict().items() if name != "norm.weight"}',
        "test_an_export_reads_back_to_the_same_bits",
        'load_file(folder / "model.safetensors"))',
        'load_file(folder / "model.safetensors"), strict=False)',
    ),
    "reads_an_export_by_other_options": (
        "    draft = build_draft(target, options)",
        "    draft = build_draft(target, Options(steps=1))",
        "test_an_export_computes_the_same_loss_and_drafts",
    ),
    "rounds_the_draft_it_exports": (
        '    (folder / "config.json")',
        '    draft.module.bfloat16().float()\n    (folder / "config.json")',
        "test_exporting_changes_nothing_in_the_draft",
    ),
    "exports_any_layout": (
        '    if layout != "serving":',
        "    if not layout:",
        "test_an_unknown_layout_is_refused",
    ),
    "is_served_other_layers": (
        "        return self.layers",
        "        return tuple(layer + 1 for layer in self.layers)",
        "test_servers_draft_what_the_drafter_does",
    ),
    "is_served_without_a_norm": (
        "            logits.append(at.host.head_VH @ normed)",
        "            logits.append(at.host.head_VH @ state)",
        "test_servers_draft_what_the_drafter_does",
    ),
    "knows_any_server": (
        '    require_server(server, ["chat"])',
        "    assert server",
        "test_an_unknown_server_is_refused",
    ),
    "exports_untrained_weights": (
        "    tensors = {name: tensor.detach()",
        "    tensors = {name: tensor.detach() * 0",
        "test_an_exported_run_accepts_as_the_checkpoint_does",
    ),
}


def wrong(name: str) -> str:
    """The right algorithm with a variant's lines in place of its own."""
    text = RIGHT.read_text().replace(
        "from pydantic import", "from pydantic import model_validator,"
    )
    text = text.replace("import json", "import json\nimport time")
    text = text.replace("disagg import DraftInput,", "disagg import DraftInput, RowField,")
    before, after, _, *more = WRONG[name]
    for old, new in ((before, after), *([tuple(more)] if more else [])):
        assert old in text, f"{name}: the right algorithm has no line {old!r}"
        text = text.replace(old, new)
    return text


@pytest.fixture(scope="module")
def failures(tmp_path_factory: pytest.TempPathFactory) -> dict[str, set[str]]:
    """Run the right algorithm through the suite, and every wrong one through its test, together."""
    folder: Path = tmp_path_factory.mktemp("wrong")
    texts = {"is_right": RIGHT.read_text(), **{name: wrong(name) for name in WRONG}}
    for name, text in texts.items():
        (folder / f"{name}.py").write_text(text)
        (folder / f"test_{name}.py").write_text(SUITE.replace("{name}", name))
    (folder / "pytest.ini").write_text("[pytest]\n")
    chosen = [f"test_{name}.py::TestChain::{case[2]}" for name, case in WRONG.items()]
    command = [sys.executable, "-m", "pytest", "-q", "--tb=no", "-rfE", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, "test_is_right.py", *chosen],
        capture_output=True,
        text=True,
        cwd=folder,
        env=child_environment(),
    )
    found: dict[str, set[str]] = {name: set() for name in texts}
    for line in done.stdout.splitlines():
        kind, _, rest = line.partition(" ")
        if kind in ("FAILED", "ERROR") and "::" in rest:
            file, _, test = rest.split(" - ")[0].split("::")
            found[file.removeprefix("test_").removesuffix(".py")].add(f"{kind} {test}")
    assert " passed" in done.stdout, done.stdout + done.stderr
    return found


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_algorithm_is_caught_by_name(name: str, failures: dict[str, set[str]]) -> None:
    assert failures[name] == {f"FAILED {WRONG[name][2]}"}


def test_the_right_algorithm_passes(failures: dict[str, set[str]]) -> None:
    assert failures["is_right"] == set()


def test_every_standard_test_has_caught_something() -> None:
    from draftcore.testing.algorithms import AlgorithmSuite

    standard = {name for name in dir(AlgorithmSuite) if name.startswith("test_")}
    assert standard == {case[2].partition("[")[0] for case in WRONG.values()}
