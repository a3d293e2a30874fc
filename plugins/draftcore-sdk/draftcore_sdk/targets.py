"""A target small enough for any test, by transformers; and what every kind of target must do.

It has random weights, a real config, tokenizer and chat template. See `draftcore_sdk` for how to use the
suite. Shape letters: B batch, T tokens, H width, V vocabulary.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from draftcore.contracts.capture import FeatureRequest
from draftcore.contracts.target import TargetModel, TargetSpec
from draftcore.errors import DraftcoreError, UsageError
from draftcore_sdk.check import variants
from draftcore_sdk.memory import of_the_process
from draftcore_sdk.suite import Suite, hash_as_elsewhere, offer_of, opened

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

SHAPE = {
    "vocab_size": 259, "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 6,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512,
    "tie_word_embeddings": False, "bos_token_id": None, "eos_token_id": 257, "pad_token_id": 258,
    "dtype": "float32",
}  # fmt: skip
SEES = {
    "depth": 1, "num_hidden_layers": 1, "hidden_size": 32, "num_heads": 2, "num_attention_heads": 2,
    "intermediate_size": 32, "image_size": 28, "patch_size": 14, "out_hidden_size": 48,
}  # fmt: skip
EXPERTS = {
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": 16, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
    "n_shared_experts": 1, "shared_expert_intermediate_size": 16,
}  # fmt: skip
LATENT = {
    "q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8,
    "v_head_dim": 8, "head_dim": 8, "num_key_value_heads": 4,
}  # fmt: skip
DELTA = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8,
    "linear_value_head_dim": 8, "layer_types": (["linear_attention"] * 2 + ["full_attention"]) * 2,
}  # fmt: skip
MAMBA = {
    "mamba_d_ssm": 48, "mamba_n_heads": 4, "mamba_d_head": 12, "mamba_d_state": 8,
    "mamba_n_groups": 1, "mamba_expand": 1, "mamba_chunk_size": 8,
}  # fmt: skip
KIMI = {
    "num_heads": 2, "head_dim": 8, "short_conv_kernel_size": 4, "full_attn_layers": [3, 6],
    "kda_layers": [1, 2, 4, 5],
}  # fmt: skip
WINDOW = {"sliding_window": 8, "query_pre_attn_scalar": 16}
SHARED = {
    **WINDOW, "layer_types": ["sliding_attention", "full_attention"] * 3, "num_kv_shared_layers": 2,
    "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 259,
}  # fmt: skip
ROPE_3D = {"rope_type": "default", "rope_theta": 10000.0}
NARROW_3D = {"head_dim": 12, "rope_parameters": {**ROPE_3D, "mrope_section": [2, 2, 2]}}
WIDE_3D = {"rope_parameters": {**ROPE_3D, "mrope_section": [4, 2, 2]}}
# By transformers' `model_type`, what a target of few weights sets beside SHAPE: of one that sees, in
# its text part. Any other type can be asked for too, with a `config` of its own.
FAMILIES: dict[str, dict[str, Any]] = {
    **{
        name: settings
        for names, settings in (
            ("llama ministral3 qwen2 qwen3 phi3 olmo2 glm4 smollm3 starcoder2 gpt_neox apertus", {}),
            ("seed_oss nemotron hunyuan_v1_dense mistral3 paligemma internvl llava phi", {}),
            ("qwen2_moe qwen3_moe mixtral minimax_m2 glm4_moe ernie4_5_moe minimax", EXPERTS),
            ("deepseek_v2 deepseek_v3 deepseek_v4 longcat_flash", {**EXPERTS, **LATENT}),
            ("youtu minicpm3", LATENT),
            ("mistral olmo3 exaone4 gemma3", WINDOW),
            ("qwen3_5_text olmo_hybrid qwen3_5", DELTA),
            ("qwen2_vl qwen2_5_vl glm4v", NARROW_3D),
            ("gemma3_text cohere2", {**WINDOW, "tie_word_embeddings": True}),
        )
        for name in names.split()
    },
    "gemma": {"tie_word_embeddings": True},
    "gemma2": {**WINDOW, "tie_word_embeddings": True, "final_logit_softcapping": 3.0},
    "granite": {"logits_scaling": 4.0},
    "cohere": {"logit_scale": 0.25, "tie_word_embeddings": True},
    "cohere2_moe": {**EXPERTS, **WINDOW, "tie_word_embeddings": True},
    "recurrent_gemma": {"attention_window_size": 8, "tie_word_embeddings": True},
    "gpt_oss": {**EXPERTS, **WINDOW},
    "olmoe": {**EXPERTS, "head_dim": 12},
    "granitemoe": {**EXPERTS, "logits_scaling": 4.0},
    "llama4_text": {**EXPERTS, "intermediate_size_mlp": 64, "attention_chunk_size": 8},
    "qwen3_next": {**EXPERTS, **DELTA},
    "qwen3_5_moe_text": {**EXPERTS, **DELTA},
    "falcon_h1": {**MAMBA, "lm_head_multiplier": 0.5},
    "bamba": {**MAMBA, "attn_layer_indices": [2, 5]},
    "granitemoehybrid": {
        **MAMBA, **EXPERTS, "shared_intermediate_size": 16, "layer_types": ["mamba", "attention"] * 3
    },
    "lfm2": {"full_attn_idxs": [2, 5], "block_auto_adjust_ff_dim": False},
    "qwen3_vl": WIDE_3D,
    "qwen3_vl_moe": {**EXPERTS, **WIDE_3D},
    "gemma4": {**SHARED, "global_head_dim": 16},
    "llama4": {**EXPERTS, "intermediate_size_mlp": 64, "attention_chunk_size": 8},
    "nemotron_h": {
        **EXPERTS, "mamba_num_heads": 4, "mamba_head_dim": 8, "ssm_state_size": 8, "n_groups": 1,
        "chunk_size": 8, "hybrid_override_pattern": "M*-M*-", "num_hidden_layers": 6,
    },
    "kimi_linear": {**EXPERTS, **LATENT, "linear_attn_config": KIMI},
    "gemma3n_text": {**SHARED, "activation_sparsity_pattern": None},
    "jamba": {
        **EXPERTS, "attn_layer_period": 3, "attn_layer_offset": 2, "mamba_d_state": 8,
        "mamba_dt_rank": 8,
    },
    "deepseek_v32": {**EXPERTS, **LATENT, "index_n_heads": 2, "index_head_dim": 16, "index_topk": 512},
    "gpt2": {"n_embd": 48, "n_head": 4, "n_layer": 6},
    "bloom": {"n_head": 4},
    "mamba2": {"num_heads": 4, "head_dim": 24, "state_size": 8, "n_groups": 1},
}  # fmt: skip


def tiny_target(
    folder: Path, family: str = "qwen3", *, seed: int = 0, std: float = 0.1,
    chat_template: str | None = CHATML, **config: Any,
) -> Path:  # fmt: skip
    """Write a model of a family, with byte-level tokens, into `folder`; `config` overrides its shape.

    Weights of std 0.1 are wide enough that greedy continuations differ from prompt to prompt; at
    0.5 they also vary from token to token, and the next token is a clear choice.
    """
    import transformers

    shape = {**SHAPE, **FAMILIES.get(family, {}), **config}
    if partial := config.get("rope_parameters", {}).get("partial_rotary_factor"):
        shape["partial_rotary_factor"] = partial  # transformers < 5.20 writes a family's own here
    kind, models = transformers.CONFIG_MAPPING[family], transformers.MODEL_FOR_CAUSAL_LM_MAPPING
    if kind in transformers.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING:
        models, parts = transformers.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING, kind()
        shape["model_type"] = parts.text_config.model_type
        shape = {"text_config": shape, "tie_word_embeddings": shape["tie_word_embeddings"]}
        if parts.vision_config is not None:
            shape["vision_config"] = {**SEES, "model_type": parts.vision_config.model_type}
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        model = models[kind](kind(**shape))
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, std)
    model.save_pretrained(folder)
    byte_tokenizer(chat_template).save_pretrained(folder)
    return folder


def byte_tokenizer(chat_template: str | None = CHATML) -> Any:
    """A tokenizer of 256 bytes and three special tokens; it can encode any text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={s: i for i, s in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>", "<|endoftext|>"])
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>"
    )
    wrapped.chat_template = chat_template
    return wrapped


def conversations(file: Path, answers: Sequence[str] | int) -> Path:
    """Write single-turn conversations as JSONL: the given answers, or that many made-up ones."""
    if isinstance(answers, int):
        answers = [f"{'abcdefgh'[i % 8] * (3 + i % 7)} is answer {i * i}" for i in range(answers)]
    rows = [
        [{"role": "user", "content": f"q{i}?"}, {"role": "assistant", "content": answer}]
        for i, answer in enumerate(answers)
    ]
    file.write_text("".join(json.dumps({"messages": turns}) + "\n" for turns in rows))
    return file


# ---------------------------------------------------------------- what every target must do

Rows = Sequence[Sequence[int]]
ROWS = ([5, 6, 7, 8, 9], list(range(40, 60)), [9, 9, 9, 9, 1, 2])
NEW, FURTHER = 12, 4  # tokens that are generated, and that a cache has room for behind a prompt
LONG = 2200  # beyond what tables of positions often hold
# fp32 rounding over a few layers is a few 1e-7 of the largest number; a mistake is far more.
ROUNDING = 1e-4
# All layers see a window of tokens, or some do; or some are convolutions.
KINDS: dict[str, Any] = {
    "mistral": {}, "qwen3": {"use_sliding_window": True, **WINDOW, "max_window_layers": 2},
    "lfm2": {"full_attn_idxs": [1, 3]},
}  # fmt: skip
SCALED: dict[str, Any] = {"gemma2": {}, "granite": {}}  # they cap their logits, or scale them


class TargetSuite(Suite):
    """Standard tests of a target: its description, which needs no weights, and its running model.

    A subclass sets `plugin`, and `target_options` unless it reads transformers' folders. What
    `weights` matches in such a folder are the weights. A target that refuses to decode, or to read trees,
    is not asked to.
    """

    weights: ClassVar[str] = "*.safetensors"

    def target_options(self, folder: Path, seed: int) -> Mapping[str, Any]:
        """Write a small target of this seed's weights, of three layers or more; return what opens it."""
        sizes: Any = {"num_hidden_layers": 4, "max_position_embeddings": 2 * LONG}
        sizes["attention_dropout"] = 0.5  # which no target that runs drops
        file = tiny_target(folder, "llama", seed=seed, std=0.5, **sizes) / "generation_config.json"
        edit(file, eos_token_id=[257, 255])  # of which config.json knows one
        return {"path": str(folder), "device": "cpu"}

    def opened_with(self, options: Mapping[str, Any], **varied: Any) -> TargetSpec:
        given = {**options, **self.options, **varied}
        try:
            found: TargetSpec = opened(self.plugin, "target", self.name, given)
        except UsageError as error:
            if type(self).target_options is TargetSuite.target_options and not self.options:
                pytest.skip(f"only its author can make one: override target_options; {error}")
            raise
        return found

    @pytest.fixture
    def target(self, tmp_path: Path) -> TargetSpec:
        return self.opened_with(self.target_options(tmp_path / "target", 0))

    @pytest.fixture
    def model(self, target: TargetSpec) -> TargetModel:
        return target.load_model()

    def of_other_kinds(self, folder: Path, kinds: Any = KINDS) -> Iterator[TargetModel]:
        """Run small targets, by default such whose layers look back otherwise, unless it refuses them."""
        ours = type(self).target_options is TargetSuite.target_options and not self.options
        for family, shape in kinds.items() if ours else ():
            path = tiny_target(folder / family, family, std=0.5, num_hidden_layers=4, **shape)
            with suppress(UsageError):
                given = {"path": str(path), "device": "cpu"}
                yield opened(self.plugin, "target", self.name, given).load_model()

    # ------------------------------------------------------------ its description

    def test_its_config_is_there_before_its_weights(self, tmp_path: Path) -> None:
        """A trainer on another host reads the config, and the tensors that it asks for."""
        options = self.target_options(tmp_path / "target", 0)
        self.opened_with(options)
        files = list((tmp_path / "target").rglob(self.weights))
        if not files:
            pytest.skip(f"no file of the weights is named {self.weights}: set `weights`")
        for file in files:
            file.unlink()
        given = {**options, **self.options}
        spec: TargetSpec = opened(self.plugin, "target", self.name, given)
        sizes = (spec.num_layers, spec.vocab_size, spec.text_config.hidden_size)
        assert all(type(size) is int and size > 0 for size in sizes), f"its sizes are {sizes}"
        assert spec.dtype.is_floating_point
        json.dumps(dict(spec.settings))  # they are part of what features are known by
        spec.require_layers(FeatureRequest((0, spec.num_layers - 1), True, "float32"))

    def test_its_fingerprint_is_that_of_its_weights(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        targets = [self.target_options(tmp_path / f"{n}", seed) for n, seed in enumerate((0, 0, 1))]
        if {**targets[0], **self.options} == {**targets[2], **self.options}:
            pytest.skip("one target alone was named")
        first, same, other = (self.opened_with(options).fingerprint() for options in targets)
        assert first == same, "the same weights at another place have another fingerprint"
        assert first == self.opened_with(targets[0]).fingerprint() != other
        with monkeypatch.context() as patch:
            hash_as_elsewhere(self.plugin, patch)
            same = self.opened_with(targets[1]).fingerprint()
        assert first == same, "it is made by `hash`, which is another in each process: use hashlib"
        for rank in (2, 1):  # a matrix and a norm of a layer, as little as a weight can change
            if name := change_weight(tmp_path / "1", self.weights, rank):
                changed = self.opened_with(targets[1]).fingerprint()
                assert changed not in (same, other), f"with another {name} it is the same target"
                same = changed
        if type(self).target_options is TargetSuite.target_options:
            import transformers

            edit(tmp_path / "1/config.json", rms_norm_eps=0.1)
            changed = self.opened_with(targets[1]).fingerprint()
            assert changed != same, "with another rms_norm_eps in its config it is the same target"
            whole = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "1")
            (tmp_path / "1/model.safetensors").unlink()
            whole.save_pretrained(tmp_path / "1", max_shard_size="100KB")  # into several files
            with suppress(DraftcoreError):  # refused is as right
                same = self.opened_with(targets[1]).fingerprint()
                change_weight(tmp_path / "1", self.weights, 1)
                changed = self.opened_with(targets[1]).fingerprint()
                assert changed != same, "with another weight in its last file it is the same target"

    def test_options_that_change_features_are_in_what_these_are_known_by(
        self, target: TargetSpec, model: TargetModel, tmp_path: Path
    ) -> None:
        """Features of one run are another's where fingerprint, dtype and `settings` are the same."""
        request = FeatureRequest(tuple(range(target.num_layers)), True, "float32")
        for name, value in variants(offer_of(self.plugin, "target", self.name)):
            try:
                other = self.opened_with(self.target_options(tmp_path / "1", 0), **{name: value})
                if known_by(other) != known_by(target):
                    continue
                changed = read(other.load_model(), request)
            except UsageError:  # a value that this host, or this target, is not for
                continue
            for features, others in zip(read(model, request), changed, strict=True):
                for feature, right in features.items():
                    told = f"{name}={value} changes {feature} and is not in `settings`"
                    require_near(others[feature], right, 0, told)

    def test_what_it_does_not_have_is_refused(self, target: TargetSpec) -> None:
        for layer in (target.num_layers, -1):
            with pytest.raises(UsageError, match=str(layer)):
                target.require_layers(FeatureRequest((layer,), True, "float32"))
        with pytest.raises(UsageError, match=str(target.vocab_size)):
            target.require_layers(FeatureRequest((), True, "float32", target.vocab_size + 1))

    def test_embedding_and_head_are_as_wide_as_its_states(
        self, target: TargetSpec, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """They are read without the model: where a draft trains, there may be no room for it."""
        loads = fails("embedding and head load the whole target")
        monkeypatch.setattr(type(target), "load_model", loads)
        shape = (target.vocab_size, target.text_config.hidden_size)
        for tensor in (target.embedding(), target.head()):
            assert tuple(tensor.shape) == shape, f"{(*tensor.shape,)} is not [V, H], {shape}"
            assert tensor.is_floating_point()
            assert tensor.isfinite().all()
        assert target.weight_bytes() >= target.embedding().nbytes

    # ------------------------------------------------------------ features

    def test_the_last_state_times_the_head_gives_its_own_logits(
        self, target: TargetSpec, model: TargetModel, tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:  # fmt: skip
        """Scaled and capped as it says, or a draft would learn another distribution."""
        model.check()
        require_own_logits(target, model)
        ours = type(self).target_options is TargetSuite.target_options and not self.options
        refused = [*SCALED] * ours
        if ours:
            require_as_transformers(target, model)
        for other in self.of_other_kinds(tmp_path, SCALED):
            with suppress(UsageError):  # refused is as right
                other.check()
                refused.remove(Path(other.spec.path).name)
                require_own_logits(other.spec, other)
                require_as_transformers(other.spec, other)
        wrong_VH = target.head().roll(1, 0)
        monkeypatch.setattr(type(target), "head", lambda _: wrong_VH)
        with suppress(DraftcoreError):
            model.check()
            pytest.fail("`check` passes another head than the model's own")
        if refused:
            pytest.skip(f"it refuses {' and '.join(refused)}, which scale or cap their logits")

    def test_features_are_those_asked_for(self, target: TargetSpec, model: TargetModel) -> None:
        everything = FeatureRequest((0, target.num_layers - 1), True, "bfloat16", 5, True)
        specs = everything.feature_specs(target.text_config.hidden_size)
        logits = read(model, FeatureRequest((), True, "float32"))
        rows, last = rows_of(model), f"hidden.{target.num_layers - 1}"
        for row, features, wide in zip(rows, read(model, everything), logits, strict=True):
            forms = {name: (*value.shape, value.dtype) for name, value in features.items()}
            right = {n: (len(row), size, getattr(torch, t)) for n, (size, t) in specs.items()}
            assert forms == right
            assert not any(value.requires_grad for value in features.values())
            best_TK = model.logits(wide["last_hidden"].to(model.dtype)).float().topk(5).values
            require_near(features["topk_logits"], best_TK, 1e-2)
            same = torch.allclose(features[last].float(), wide["last_hidden"], rtol=0.02, atol=0.02)
            assert not same, f"{last} is behind the final norm, as last_hidden is, not before it"

    def test_a_row_does_not_depend_on_what_is_beside_and_behind_it(
        self, target: TargetSpec, model: TargetModel
    ) -> None:
        request = FeatureRequest(tuple(range(target.num_layers)), True, "float32")
        rows = rows_of(model)
        together = read(model, request)
        kept = [{name: value.clone() for name, value in row.items()} for row in together]
        read(model, request, [row[::-1] for row in rows])
        for features, before in zip(together, kept, strict=True):
            for name, value in features.items():
                told = f"{name} of a batch changes when the next is read: its memory is used again"
                require_near(value, before[name], 0, told)
        padded = read(model, request, padding=3)
        for row, features, same in zip(rows, kept, padded, strict=True):
            (alone,) = read(model, request, [row])
            for name in request.names:
                require_near(features[name], alone[name])
                require_near(same[name], alone[name])

    def test_the_order_of_tokens_counts_as_far_as_rows_go(
        self, target: TargetSpec, model: TargetModel
    ) -> None:
        """In the first layer, by what other layers know; also beyond 2048, if its config says so."""
        longest = target.text_config.max_position_embeddings
        request = FeatureRequest((0,), False, "float32")
        for length in (100, LONG):
            row = counted(target, min(length, longest))
            other = [*row[:-60], *row[-60:-30][::-1], *row[-30:]]
            *found, short = (x["hidden.0"] for x in read(model, request, [row, other, ROWS[0]]))
            told = f"a row's features are others where one of {len(row)} tokens is beside it"
            require_near(short, read(model, request, [ROWS[0]])[0]["hidden.0"], told=told)
            one, two = (x[-30:] for x in found)
            if float((one - two).abs().max()) < 100 * ROUNDING * float(one.abs().max()):
                assert length == 100, f"the last 60 of {len(row)} tokens are read at one position"
                pytest.skip("its first layer knows no order")

    # ------------------------------------------------------------ decoding

    def test_it_continues_by_the_best_token_of_its_own_forward(
        self, target: TargetSpec, model: TargetModel, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Up to an end token behind the prompt; by what is not `forward`, which is compared with it."""
        if (file := Path(target.path) / "generation_config.json").exists():
            ends = json.loads(file.read_text()).get("eos_token_id") or []
            ends = {ends} if isinstance(ends, int) else {*ends}
            assert ends <= model.end_tokens, f"generation_config.json ends at {ends}, it does not"
        with monkeypatch.context() as broken:
            for name in ("forward", "allocate"):
                alone = fails(f"`generate` uses `{name}`: what is wrong in one is in the other")
                broken.setattr(type(model), name, alone, raising=False)
            continued = generated(model, rows_of(model))
        for row, tokens in zip(rows_of(model), continued, strict=True):
            assert tokens, f"nothing follows {row}, whose end tokens are those of earlier turns"
            ended = tokens[-1] in model.end_tokens
            assert len(tokens) == NEW or ended, f"{len(tokens)} of {NEW} tokens without an end"
            assert not model.end_tokens & set(tokens[:-1]), "it goes on behind an end token"
            whole = [*row, *tokens]
            (features,) = read(model, FeatureRequest((), True, "float32"), [whole])
            logits_TV = model.logits(features["last_hidden"].to(model.dtype))[len(row) - 1 : -1]
            best_T = logits_TV.float().max(-1).values
            chosen_T = logits_TV.float().gather(1, torch.tensor(tokens)[:, None])[:, 0]
            require_near(chosen_T, best_T)  # which of two alike comes is open

    def test_the_gap_is_between_its_two_best_tokens(self, model: TargetModel) -> None:
        generated(model, ROWS[:1])
        found = read(model, FeatureRequest((), True, "float32"))
        for row, features in zip(rows_of(model), found, strict=True):
            logits_V = model.logits(features["last_hidden"][-1].to(model.dtype)).double()
            best, second = logits_V.topk(2).values
            assert model.top2_gap(row) == pytest.approx(float(best - second), abs=1e-2)

    def test_in_bf16_its_gap_is_as_exact_and_the_process_as_it_was(self, tmp_path: Path) -> None:
        """Of weights that bf16 holds: near ties, of which the gap is asked, are rounding in bf16."""
        options = self.target_options(tmp_path / "target", 0)
        for file in (tmp_path / "target").rglob("*.safetensors"):
            tensors = {name: tensor.bfloat16().float() for name, tensor in load_file(file).items()}
            save_file(tensors, file, {"format": "pt"})
        try:
            half, full = (self.opened_with(options, dtype=x) for x in ("bfloat16", "float32"))
        except UsageError as error:
            pytest.skip(f"it computes in no other dtype: {error}")
        before = of_the_process() | self.began
        try:
            model = half.load_model()
            read(model, FeatureRequest((), True, "bfloat16"))
            changed = [name for name, value in of_the_process().items() if value != before[name]]
        finally:
            torch.set_default_dtype(before["default dtype"])
            torch.set_num_threads(before["threads"])
        assert not changed, f"loading it changes of the whole process: {', '.join(changed)}"
        for ours, theirs in ((half.embedding(), full.embedding()), (half.head(), full.head())):
            assert ours.dtype == theirs.dtype, f"embedding and head are {ours.dtype}, not as stored"
        generated(model, ROWS[:1])
        held = torch.equal(full.head(), full.head().bfloat16().to(full.head()))
        for row in rows_of(model) if held else ():
            gap, right = model.top2_gap(row), full.load_model().top2_gap(row)
            told = f"the gap {gap:.4f} of bf16 weights is {right:.4f}: compute it in a wider type"
            assert gap == pytest.approx(right, abs=1e-3), told
        everything = FeatureRequest((), False, "float32", half.vocab_size)
        for features in read(model, everything):  # many logits are equal in bf16
            logits_TV, ids_TV = features["topk_logits"], features["topk_ids"]
            equal_TV = logits_TV[:, 1:] == logits_TV[:, :-1]
            rise_TV = ids_TV[:, 1:] > ids_TV[:, :-1]
            ordered = bool(rise_TV[equal_TV].all())
            assert ordered, "of equal logits that of the lower id does not come first"
        if not held:
            pytest.skip("its gap is compared where bf16 holds its weights, and these it does not")

    def test_a_cached_forward_gives_what_a_whole_one_does(
        self, model: TargetModel, tmp_path: Path
    ) -> None:
        """From other places in each row, and as far as rows go; also beside a cache in use."""
        far = counted(model.spec, min(LONG, model.spec.text_config.max_position_embeddings - NEW))
        for rows in (rows_of(model), [far]):
            Decoding(model, [row[:-3] for row in rows]).require([row[-3:] for row in rows])
        begun, rest = [row[:-3] for row in rows_of(model)], [row[-3:] for row in rows_of(model)]
        first, second = Decoding(model, begun), Decoding(model, [row[::-1] for row in begun])
        told = "wrong beside another cache, right alone: `allocate` gives memory that is in use"
        first.require(rest, told)
        second.require(rest, told)
        for other in self.of_other_kinds(tmp_path):
            require_as_transformers(other.spec, other)
            Decoding(other, begun).require(rest)

    def test_tokens_that_are_taken_back_leave_no_trace(
        self, model: TargetModel, tmp_path: Path
    ) -> None:
        rows = rows_of(model)
        for reader in (model, *self.of_other_kinds(tmp_path)):
            decoding = Decoding(reader, [row[:-3] for row in rows])
            decoding.read([[77, 78, 79, 80]] * len(rows))
            decoding.read([row[-3:-1] for row in rows])
            decoding.rows, decoding.lengths_B = [r[:-1] for r in rows], decoding.lengths_B + 2
            decoding.require([row[-1:] for row in rows])

    def test_a_token_of_a_tree_sees_those_before_it_alone(self, model: TargetModel) -> None:
        """Of a root with two that follow it, and one that follows either of these, by the row."""
        decoding = Decoding(model, [row[:-1] for row in rows_of(model)])
        tree = [[row[-1], 21, 22, 23] for row in rows_of(model)]
        paths = [([0], [0, 1], [0, 2], [0, 1 + row % 2, 3]) for row in range(len(tree))]
        seen = [[[at in path for at in range(4)] for path in own] for own in paths]
        try:
            found = decoding.read(tree, torch.tensor(seen))
        except UsageError as error:
            pytest.skip(str(error))
        for number, nodes in enumerate(tree):
            for node, path in enumerate(paths[number]):
                row = [*rows_of(model)[number][:-1], *(nodes[at] for at in path)]
                (alone,) = read(model, decoding.whole, [row])
                require_near(found["last_hidden"][number, node], alone["last_hidden"][-1])


def rows_of(model: TargetModel) -> Rows:
    """Return rows, the last of which has end tokens within, as a chat has behind each turn."""
    return (*ROWS, [11, 12, *sorted(model.end_tokens)[:2], 13, 11, 14, 15])


def known_by(target: TargetSpec) -> tuple[Any, ...]:
    return target.fingerprint(), target.dtype, dict(target.settings)


def edit(file: Path, **values: Any) -> None:
    """Set values of a JSON file."""
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))


def change_weight(folder: Path, weights: str, rank: int) -> str:
    """Change one number of the smallest tensor of a rank in safetensors files; return its name."""
    files = folder.rglob(weights if weights.endswith(".safetensors") else "*.safetensors")
    for file in sorted(files, reverse=True):
        tensors = load_file(file)
        sizes: dict[int, str] = {
            tensor.numel(): name for name, tensor in tensors.items() if tensor.ndim == rank
        }
        if sizes:
            name = sizes[min(sizes)]
            tensors[name].view(-1)[-1] += 1
            save_file(tensors, file, {"format": "pt"})
            return name
    return ""


def fails(told: str) -> Callable[..., Any]:
    """Return what may not be called."""

    def call(*_: Any, **__: Any) -> Any:
        pytest.fail(told)

    return call


def counted(target: TargetSpec, length: int) -> list[int]:
    """Return a row of so many tokens, none of which is an end."""
    return [at % (target.vocab_size // 2) for at in range(length)]


def looks_back(model: TargetModel) -> str:
    """Say how far some layers look back, if not to the beginning."""
    window = getattr(model.spec.text_config, "sliding_window", None)
    return f"; its window is of {window} tokens, the one that looks back among them" * bool(window)


def require_as_transformers(target: TargetSpec, model: TargetModel) -> None:
    """Require of the suite's own folder, which transformers wrote, what transformers makes of it."""
    import transformers

    right = transformers.AutoModelForCausalLM.from_pretrained(target.path, dtype=target.dtype)
    request = FeatureRequest(tuple(range(target.num_layers - 1)), True, "float32")
    for row, features in zip(rows_of(model), read(model, request), strict=True):
        with torch.inference_mode():
            found = right(torch.tensor([row]), output_hidden_states=True)
        for layer in request.layers:
            told = f"hidden.{layer} is not layer {layer}'s output, as transformers computes it"
            told += looks_back(model)
            require_near(features[f"hidden.{layer}"], found.hidden_states[layer + 1][0], told=told)
        told = "its logits are not those that transformers computes from the same files"
        require_near(model.logits(features["last_hidden"]), found.logits[0], told=told)


def require_own_logits(target: TargetSpec, model: TargetModel) -> None:
    hidden_TH = read(model, FeatureRequest((), True, "float32"))[1]["last_hidden"]
    right = target.capped(hidden_TH @ target.head().to(hidden_TH).T)
    told = "its logits are not last hidden x head, scaled by `logit_scale` and capped"
    require_near(model.logits(hidden_TH.to(model.dtype)), right, ROUNDING, told)


def right_padded(rows: Rows, padding: int = 0) -> tuple[Tensor, Tensor]:
    tokens = [torch.tensor(list(row)) for row in rows]
    lengths_B = torch.tensor([len(row) for row in rows])
    return pad_sequence(tokens, batch_first=True, padding_value=padding), lengths_B


def read(
    model: TargetModel, request: FeatureRequest, rows: Rows | None = None, padding: int = 0
) -> list[dict[str, Tensor]]:
    """Return each row's features, of a batch."""
    rows = rows_of(model) if rows is None else rows
    found = model.features(*right_padded(rows, padding), request)
    return [{n: v[at, : len(row)] for n, v in found.items()} for at, row in enumerate(rows)]


def generated(model: TargetModel, rows: Rows) -> list[list[int]]:
    try:
        return model.generate(rows, NEW)
    except UsageError as error:
        pytest.skip(f"it decodes nothing: {error}")


def require_near(found: Tensor, right: Tensor, rounding: float = ROUNDING, told: str = "") -> None:
    bound = rounding * float(right.abs().max())
    torch.testing.assert_close(
        found.to(right.dtype), right, rtol=0, atol=bound, msg=lambda text: f"{told}\n{text}".strip()
    )


@contextmanager
def rubbish() -> Iterator[None]:
    """Fill what is allocated and not written with nan, as memory that is used again may be."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


class Decoding:
    """Rows that a target reads on from a cache."""

    whole = FeatureRequest((1,), True, "float32")

    def __init__(self, model: TargetModel, rows: Rows) -> None:
        self.model, self.rows = model, rows
        # In which captured features are stored; what is read here is in the model's own dtype.
        stored = "bfloat16" if model.dtype == torch.float32 else "float32"
        self.request = replace(self.whole, dtype=stored)
        begun_BT, self.lengths_B = right_padded(rows)
        try:
            with rubbish():
                self.cache = model.allocate(len(rows), begun_BT.shape[1] + FURTHER)
        except UsageError as error:
            pytest.skip(f"it decodes nothing: {error}")
        start_B = torch.zeros_like(self.lengths_B)
        model.forward(self.cache, begun_BT, start_B, begun_BT.shape[1], self.request)

    def read(self, tokens: Rows, seen_BTT: Tensor | None = None) -> dict[str, Tensor]:
        """Read further tokens of each row, as many of each."""
        tokens_BT, span = torch.tensor(tokens), int(self.lengths_B.max()) + len(tokens[0])
        rest: Any = self.lengths_B, span, self.request, seen_BTT
        found = self.model.forward(self.cache, tokens_BT, *rest)
        for name in self.request.names:
            dtype, right = found[name].dtype, self.model.dtype
            assert dtype == right, f"`forward` gives {name} in {dtype}, and the model's is {right}"
        return found

    def require(self, tokens: Rows, told: str = "") -> None:
        """Require of further tokens what a forward of the whole rows gives."""
        found, whole = self.read(tokens), [[*a, *b] for a, b in zip(self.rows, tokens, strict=True)]
        told = told or f"read on from a cache, rows are not as read whole{looks_back(self.model)}"
        for row, right in enumerate(read(self.model, self.whole, whole)):
            for name in self.request.names:
                require_near(found[name][row], right[name][-len(tokens[row]) :], told=told)
