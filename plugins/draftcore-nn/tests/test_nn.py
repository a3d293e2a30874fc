"""Each piece against the plainest way to compute or write the same; the README's algorithm works."""

import json
import math
import pkgutil
import re
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any, cast

import draftcore_nn
import pytest
import torch
from draftcore_nn import attention, batches, decoding, losses, masks, serving, vocabulary
from draftcore_nn.cache import CachedState, empty_slots
from draftcore_nn.layers import Rotary, TargetVocabulary, rotate
from draftcore_nn.options import DecoderOptions
from draftcore_nn.target import (
    DecoderShape,
    capturable,
    rope_of,
    shape_in_config,
    shape_of_config,
    shape_of_target,
)
from draftcore_sdk.algorithms import AlgorithmSuite
from draftcore_sdk.exports import GONE, ROPES, change_config, change_tensors
from draftcore_sdk.graph_plugins import NoWaiting
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention.flex_attention import flex_attention
from transformers import Gemma4TextConfig, LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from draftcore.contracts.algorithm import DraftBatch, Sample, SampleId
from draftcore.errors import DraftcoreError, UsageError

README = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
FOLDER = TemporaryDirectory()
FILE = Path(FOLDER.name, "echo.py")
(CODE,) = re.findall(r"^```python\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)
FILE.write_text(CODE, encoding="utf-8")
sys.path.append(FOLDER.name)


class TestTheReadmesExample(AlgorithmSuite):
    """As it stands there."""

    plugin, loose = "echo", FILE


def test_importing_any_of_it_imports_no_transformers_and_of_the_core_only_contracts() -> None:
    found = {module.name for module in pkgutil.iter_modules(draftcore_nn.__path__)}
    names = [f"draftcore_nn.{name}" for name in found - {"kernels"}]  # these want Triton
    code = f"import sys, {', '.join(names)}; print(*sys.modules)"
    run = [sys.executable, "-c", code]
    modules = subprocess.run(run, capture_output=True, text=True, check=True).stdout.split()
    assert "transformers" not in modules
    core = {name.split(".")[1] for name in modules if name.startswith("draftcore.")}
    assert core <= {"contracts", "errors", "files"}


# ------------------------------------------------------------ decoding


def test_a_choice_follows_its_distribution_and_waits_for_nothing() -> None:
    generator = torch.Generator().manual_seed(1)
    logits_BV = torch.tensor([[0.0, 1.0, 2.0, -torch.inf]]).expand(20_000, -1)
    with NoWaiting():  # type: ignore[no-untyped-call]
        token_B, probs_BV = decoding.choose(logits_BV, 0.5, generator)
    assert probs_BV is not None
    torch.testing.assert_close(probs_BV[0], (logits_BV[0] / 0.5).softmax(-1))
    shares_V = torch.bincount(token_B, minlength=4) / 20_000
    assert (shares_V - probs_BV[0]).abs().max() < 0.012  # over three standard deviations of 0.0035
    assert shares_V[3] == 0
    greedy_B, none = decoding.choose(logits_BV, 0.0, None)
    assert none is None
    assert (greedy_B == 2).all()


def test_choices_join_to_a_proposal() -> None:
    logits_KBV = torch.randn(3, 2, 5, generator=torch.Generator().manual_seed(1))
    for temperature in (0.0, 1.0):
        choices = [decoding.choose(logits_BV, temperature, None) for logits_BV in logits_KBV]
        proposal = decoding.chain(choices)
        for k, (token_B, probs_BV) in enumerate(choices):
            assert proposal.tokens_BK[:, k].equal(token_B)
            assert (probs_BV is None) == (proposal.probs_BKV is None) == (temperature == 0)
            assert probs_BV is None or cast(Tensor, proposal.probs_BKV)[:, k].equal(probs_BV)


@dataclass
class State(CachedState):
    token_B: Tensor


def test_rows_are_taken_and_selected_where_they_belong() -> None:
    x_BT = torch.arange(12).view(3, 4)
    index_B = torch.tensor([3, 0, 2])
    assert decoding.at(x_BT, index_B).tolist() == [3, 4, 10]
    assert decoding.at(x_BT[..., None], index_B).tolist() == [[3], [4], [10]]
    keys, values = torch.randn(2, 3, 1, 2, 6, 4)
    state = State(keys, values, index_B)
    kept = decoding.select_rows(state, torch.tensor([2, 0]))
    assert kept.token_B.tolist() == [2, 3]
    assert kept.values_BLGSD.equal(state.values_BLGSD[[2, 0]])


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize(("block", "causal"), [(False, True), (True, True), (True, False)])
def test_cached_rows_attend_as_in_one_forward_whatever_unwritten_slots_hold(
    window: int | None, block: bool, causal: bool
) -> None:
    """Two rows of 5 and 2 tokens, and 3 more, which see what stands before them and each other."""
    shape = DecoderShape(**shape_of_target(a_target(), DecoderOptions(num_key_value_heads=2)))
    rotary, starts = Rotary(shape.rope, shape.head_dim, 64), [5, 2]
    query, *rest = torch.randn(3, 2, 8, 4, 8, generator=torch.Generator().manual_seed(1))
    key, value = (x[:, :, :2] for x in rest)
    cache = CachedState(*empty_slots(shape, 2, 2, 12, key))
    cache.keys_BLGSD.fill_(9.0)
    positions_BT = torch.arange(8).expand(2, -1)
    turned = rotate(key, *rotary(positions_BT))
    cache.write(1, (turned, value), positions_BT)  # beyond a row's start: leftovers
    assert (cache.keys_BLGSD[:, 0] == 9).all(), "another layer's"
    positions_BR = torch.tensor(starts)[:, None] + torch.arange(3)
    rows = cache.rows(rotary, positions_BR, window=window, block=block, causal=causal)
    took = [torch.stack([x[b, s : s + 3] for b, s in enumerate(starts)]) for x in (turned, value)]
    for slots in (cache.keys_BLGSD, cache.values_BLGSD) if block else ():
        for b, start in enumerate(starts):
            slots[b, 1, :, start:] = 7.0
    asked = torch.stack([query[b, s : s + 3] for b, s in enumerate(starts)])
    found = cache.attend(
        1, rotate(asked, *rows.angles), rows, (took[0], took[1]) if block else None
    )
    for b, start in enumerate(starts):
        places, last = torch.arange(start + 3), torch.arange(start, start + 3)[:, None]
        seen = places > last - (window or 99)
        own = (places >= start) & (causal or block)
        seen = (seen | own if block else seen) & ((places <= last) | (own if not causal else False))
        expected = functional.scaled_dot_product_attention(
            rotate(asked[b], *rotary(last[:, 0])).transpose(0, 1),
            turned[b, : start + 3].repeat_interleave(2, 1).transpose(0, 1),
            value[b, : start + 3].repeat_interleave(2, 1).transpose(0, 1),
            seen,
        )
        torch.testing.assert_close(found[b], expected.transpose(0, 1), rtol=1e-5, atol=1e-5)


def test_what_is_drawn_for_a_sample_is_of_seed_sample_and_epoch_alone() -> None:
    def drawn(seed: int, name: str, epoch: int) -> list[int]:
        generator = batches.generator_of(SampleId(name, epoch), seed)
        return torch.randint(1000, (2,), generator=generator).tolist()

    before = torch.get_rng_state()
    uses = [(1, "a", 1), (2, "a", 1), (1, "b", 1), (1, "a", 2)]
    assert len({tuple(drawn(*use)) for use in uses}) == 4
    assert drawn(1, "a", 1) == [696, 668]
    assert torch.get_rng_state().equal(before)


def test_the_host_knows_the_lengths_of_a_batch_wherever_that_lies() -> None:
    ids = torch.arange(7)
    samples = [
        Sample(SampleId(str(n), 1), ids[:n], ids[:n] > 2, {"x": torch.ones(n, 2)}) for n in (7, 3)
    ]
    batch = batches.collate(samples).to("meta")  # asking a tensor there is an error
    assert batches.host_lengths(batch) == (7, 3)
    made = [value for name, value in vars(batches.collate(samples)).items() if name != "lengths"]
    assert batches.host_lengths(DraftBatch(*made)) == (7, 3)


# ------------------------------------------------------------ losses


MIXTURES = [{"ce": 0.1, "tv": 1.8}, {"kl": 1.0}, {"tv": 0.5}, {"lk_alpha": 2.0}, {"lk_lambda": 1.0}]


@pytest.mark.parametrize("rank", [None, 3])
@pytest.mark.parametrize("mixture", MIXTURES, ids="-".join)
def test_losses_of_two_distributions_in_slices_are_their_formulas(
    mixture: dict[str, float], rank: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = torch.Generator().manual_seed(1)
    hidden_RH, last_RH, head_VH, low_RE, up_VE = (
        torch.randn(n, width, generator=generator, dtype=torch.float64, requires_grad=True)
        for n, width in ((7, 5), (7, 5), (11, 5), (7, rank or 1), (11, rank or 1))
    )
    label_R = torch.randint(11, (7,), generator=generator)
    weight_R = torch.rand(7, generator=generator, dtype=torch.float64)
    logits_RV = hidden_RH @ head_VH.T + (low_RE @ up_VE.T if rank else 0)
    q, p = logits_RV.softmax(-1), (4 * torch.tanh(3 * last_RH @ head_VH.T / 4)).softmax(-1).detach()
    tv_R, kl_R = (p - q).abs().sum(-1) / 2, (p * (p / q).log()).sum(-1)
    overlap_R = torch.minimum(p, q).sum(-1)
    kept_R = torch.exp(-3 * overlap_R).detach()
    formulas = {
        "ce": functional.cross_entropy(logits_RV, label_R, reduction="none"), "kl": kl_R, "tv": tv_R,
        "lk_alpha": -overlap_R.log(), "lk_lambda": kept_R * kl_R + (1 - kept_R) * tv_R,
    }  # fmt: skip
    shared = [share * (formulas[name] * weight_R).sum() for name, share in mixture.items()]
    expected = torch.stack(shared).sum()
    monkeypatch.setattr(losses, "LOGIT_ELEMENTS", 6 * 11)
    found = losses.distribution_losses(
        hidden_RH, head_VH.detach(), last_RH.detach(), label_R, weight_R, mixture, scale=3.0,
        softcap=4.0, low_rank=(low_RE, up_VE) if rank else None,
    )  # fmt: skip
    torch.testing.assert_close(dict(found.losses), {name: formulas[name] for name in mixture})
    torch.testing.assert_close((found.objective, found.overlap_R), (expected, overlap_R))
    assert found.best_R.equal(logits_RV.argmax(-1))
    inputs = [hidden_RH, *([low_RE, up_VE] if rank else [])]
    gradients = [torch.autograd.grad(2 * value, inputs) for value in (found.objective, expected)]
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("trained", [False, True], ids=["frozen", "trained"])
@pytest.mark.parametrize("rows", [0, 1, 7])
def test_cross_entropy_in_slices_is_cross_entropy(
    rows: int, trained: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = torch.Generator().manual_seed(rows)
    hidden_RH, head_VH = (
        torch.randn(n, 5, generator=generator, dtype=torch.float64) for n in (rows, 11)
    )
    label_R = torch.randint(11, (rows,), generator=generator)
    weight_R = torch.rand(rows, generator=generator, dtype=torch.float64)
    inputs = [hidden_RH.requires_grad_(), *([head_VH.requires_grad_()] if trained else [])]
    plain_R = functional.cross_entropy(hidden_RH @ head_VH.T, label_R, reduction="none")
    expected = torch.autograd.grad((plain_R * weight_R).sum(), inputs)
    monkeypatch.setattr(losses, "LOGIT_ELEMENTS", 3 * 11)
    loss_R, best_R = losses.cross_entropy(hidden_RH, head_VH, label_R)
    torch.testing.assert_close(loss_R, plain_R)
    assert best_R.equal((hidden_RH @ head_VH.T).argmax(-1))
    torch.testing.assert_close(torch.autograd.grad((loss_R * weight_R).sum(), inputs), expected)


@pytest.mark.parametrize("draft_size", [7, 11])
@pytest.mark.parametrize("logits", [(1.0, None), (0.25, 2.0)], ids=["plain", "capped"])
def test_soft_cross_entropy_in_slices_is_that_with_what_the_target_says(
    logits: tuple[float, float | None], draft_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = torch.Generator().manual_seed(1)
    hidden_RH, state_RH, target_VH, head_UH = (
        torch.randn(n, 5, generator=generator, dtype=torch.float64) for n in (7, 7, 11, draft_size)
    )
    ids_U = vocabulary.select_tokens({9: 3, 4: 2}, draft_size, 11)
    assert {4, 9} <= set(ids_U.tolist())
    leaves = [hidden_RH.requires_grad_(), head_UH.requires_grad_()]
    scale, cap = logits
    said_RV = scale * state_RH @ target_VH.T
    said_RV = said_RV if cap is None else cap * (said_RV / cap).tanh()
    plain_R = -(said_RV[:, ids_U].softmax(-1) * (hidden_RH @ head_UH.T).log_softmax(-1)).sum(-1)
    expected = torch.autograd.grad((plain_R * torch.arange(7)).sum(), leaves)
    monkeypatch.setattr(losses, "LOGIT_ELEMENTS", 3 * 11)
    teacher = losses.teach(state_RH, target_VH, *logits, ids_U=ids_U)
    loss_R, best_R = losses.soft_cross_entropy(hidden_RH, head_UH, teacher.logits_RU)
    torch.testing.assert_close(loss_R, plain_R)
    assert best_R.equal((hidden_RH @ head_UH.T).argmax(-1))
    found = torch.autograd.grad((loss_R * torch.arange(7)).sum(), leaves)
    torch.testing.assert_close(found, expected)
    kept_RU = said_RV.softmax(-1)[:, ids_U]
    torch.testing.assert_close((teacher.logits_RU - teacher.all_R[:, None]).exp(), kept_RU)
    best = [ids_U.tolist().index(v) if v in ids_U else -1 for v in said_RV.argmax(-1).tolist()]
    assert teacher.label_R.tolist() == best
    known_V = vocabulary.known_tokens(vocabulary.to_offsets(ids_U), 11)
    laid_RV = vocabulary.over_target(kept_RU, ids_U, 11)
    torch.testing.assert_close(laid_RV, said_RV.softmax(-1) * known_V)


# ------------------------------------------------------------ attention and positions


def test_a_rule_is_the_same_as_a_table_as_a_bias_and_as_tiles() -> None:
    """Documents of a sample; the blocks of `draftcore-dflash` are tried there."""
    document_BT = torch.tensor([[0] * 200 + [1] * 100, [0] * 130 + [1] * 170])
    rule, shape = masks.documents(document_BT), (2, 300, 300)
    seen_B1QT = masks.dense(rule, shape)
    for b, q, t in [(0, 250, 200), (0, 250, 199), (0, 5, 6), (1, 5, 5), (1, 150, 129)]:
        assert seen_B1QT[b, 0, q, t] == (t <= q and document_BT[b, q] == document_BT[b, t])
    query, key, value = torch.randn(3, 2, 2, 300, 16)
    plain = functional.scaled_dot_product_attention(query, key, value, seen_B1QT)
    added = masks.bias(seen_B1QT, torch.float32)
    found, _, _ = attention.attend(query, key, value, added)
    torch.testing.assert_close(found, plain)
    mask = masks.Tiles.of(rule, shape, "cpu").to("cpu").mask(rule, shape[1:])
    assert mask.sparsity() > 0
    torch.testing.assert_close(flex_attention(query, key, value, block_mask=mask), plain)


@pytest.mark.parametrize("rope", sorted(ROPES.keys() - {"partial"}))
def test_rotary_positions_are_those_of_transformers(rope: str) -> None:
    config = LlamaConfig(
        hidden_size=32, num_attention_heads=4, head_dim=8, rope_parameters=dict(ROPES[rope])
    )
    x_BTAD = torch.randn(2, 9, 4, 8, generator=torch.Generator().manual_seed(1))
    positions_BT = torch.tensor([[*range(9)], [*range(20, 29)]])
    rotary = Rotary(rope_of(config), 8, config.max_position_embeddings)
    x_BATD = x_BTAD.transpose(1, 2)
    theirs = LlamaRotaryEmbedding(config)
    assert rotary.inverse_frequency.equal(theirs.inv_freq), "to the bit"
    assert rotary.scale == theirs.attention_scaling
    cos, sin = theirs(x_BTAD, positions_BT)
    expected_BATD, _ = apply_rotary_pos_emb(x_BATD, x_BATD, cos, sin)
    found = rotate(x_BTAD, *rotary(positions_BT)).transpose(1, 2)
    torch.testing.assert_close(found, expected_BATD, rtol=1e-5, atol=1e-5)


def test_partial_rotary_positions_turn_the_first_part_as_a_head_of_its_own() -> None:
    x_TAD, positions_T = torch.randn(9, 4, 8), torch.arange(9)
    found = rotate(x_TAD, *Rotary(ROPES["partial"], 8, 64)(positions_T))
    first = rotate(x_TAD[..., :4], *Rotary(ROPES["default"], 4, 64)(positions_T))
    assert found.equal(torch.cat([first, x_TAD[..., 4:]], -1))


def test_the_targets_vocabulary_follows_autocast_and_stays_out_of_the_state() -> None:
    embedding_VH, head_VH = torch.randn(2, 6, 4)

    class Draft(TargetVocabulary):
        def __init__(self, head_VH: Tensor | None) -> None:
            super().__init__(embedding_VH.bfloat16(), head_VH)
            self.linear = nn.Linear(4, 4)

    assert Draft(None).head.equal(embedding_VH.bfloat16().float())
    draft = Draft(head_VH)
    assert draft.head is head_VH
    assert draft.embed(torch.tensor([5])).dtype == torch.float32
    with torch.autocast("cpu", torch.bfloat16):
        assert draft.head.dtype == draft.embed(torch.tensor([5])).dtype == torch.bfloat16
    assert set(draft.state_dict()) == {"linear.weight", "linear.bias"}
    assert dict(draft.named_buffers()).keys() == draft.FROZEN


# ------------------------------------------------------------ shapes


def a_target(**changes: Any) -> Any:
    shape = {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 6, "vocab_size": 50}
    text = LlamaConfig(**{**shape, "rope_parameters": dict(ROPES["default"]), **changes})
    return SimpleNamespace(text_config=text, vocab_size=text.vocab_size, num_layers=6)


@pytest.mark.parametrize("spelling", [["rope_parameters"], ["rope_theta", "rope_scaling"]], ids=str)
@pytest.mark.parametrize("rope", ROPES)
def test_a_shape_goes_into_config_json_and_comes_back(
    rope: str, spelling: list[str], tmp_path: Path
) -> None:
    target = a_target(rope_parameters=dict(ROPES[rope]), max_position_embeddings=64)
    options = DecoderOptions(num_key_value_heads=2, head_dim=6)
    shape = DecoderShape(**shape_of_target(target, options))
    assert (shape.num_attention_heads, shape.num_key_value_heads, shape.head_dim) == (4, 2, 6)
    assert shape.vocab_size == 50
    config = json.loads(json.dumps(shape_in_config(shape, torch.bfloat16)))
    assert config["dtype"] == "bfloat16"
    for name in spelling:
        del config[name]
    theta = LlamaConfig.from_dict(config).rope_parameters["rope_theta"]
    assert theta == ROPES[rope]["rope_theta"]
    assert shape_of_config(config, tmp_path) == asdict(shape)


@pytest.mark.parametrize("rope", [name for name in ROPES if ROPES[name]["rope_type"] == "yarn"])
def test_the_scale_of_yarn_is_the_same_for_readers_of_either_of_its_names(rope: str) -> None:
    said = rope_of(LlamaConfig(rope_parameters=dict(ROPES[rope])))
    assert not {"mscale", "mscale_all_dim"} & said.keys(), "which some vLLM leaves out"
    by_factor = 0.1 * math.log(said["factor"]) + 1  # sglang and older vLLM times attn_factor
    assert said["attention_factor"] == pytest.approx(by_factor * said["attn_factor"], rel=1e-12)


def test_a_draft_has_positions_of_its_own_where_it_cannot_have_its_targets() -> None:
    factors = {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4, "factor": 4.0}
    long = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 16}
    gemma4 = Gemma4TextConfig(hidden_size=32, num_hidden_layers=6, vocab_size=50)
    targets = {
        "longrope": a_target(rope_parameters=long | factors),
        "proportional": SimpleNamespace(text_config=gemma4, vocab_size=50, num_layers=6),
    }
    for kind, target in targets.items():
        with pytest.raises(UsageError, match=f"'{kind}'(.|\n)*rope_theta: 10000"):
            shape_of_target(target, DecoderOptions())
        own = shape_of_target(target, DecoderOptions(rope_theta=5e5))["rope"]
        assert own == {"rope_type": "default", "rope_theta": 5e5}


def test_a_target_of_another_kind_says_what_it_has_and_options_say_the_rest() -> None:
    """A recurrent one has neither heads nor positions; one with attention may say all by itself."""
    sizes = {"model_type": "mine", "hidden_size": 32, "max_position_embeddings": 64}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 48}
    scaled = {**ROPES["llama3"]}
    del scaled["original_max_position_embeddings"]

    def shape(options: DecoderOptions, **more: Any) -> dict[str, Any]:
        text = SimpleNamespace(**sizes, **more)
        return shape_of_target(cast(Any, SimpleNamespace(text_config=text, vocab_size=50)), options)

    by_options = shape(DecoderOptions(**heads, rope_theta=1e4))
    assert by_options["head_dim"] == 8
    unset = {"rms_norm_eps": None}  # as configs of models with other norms have it
    assert by_options == shape(
        DecoderOptions(), **heads, **unset, rope_parameters={"rope_theta": 1e4}
    )
    by_config = shape(DecoderOptions(), **heads, rope_parameters=scaled)
    assert by_config["rope"] == {**scaled, "original_max_position_embeddings": 64}
    with pytest.raises(UsageError, match=r"\(mine\) has no num_attention_heads\n  set the option"):
        shape(DecoderOptions())
    with pytest.raises(UsageError, match=r"\(mine\) has no rotary positions"):
        shape(DecoderOptions(**heads))


def test_a_shape_that_cannot_be_is_refused() -> None:
    for options, message in (({"num_key_value_heads": 3}, "multiple"), ({"head_dim": 7}, "even")):
        with pytest.raises(UsageError, match=message):
            DecoderShape(**shape_of_target(a_target(), DecoderOptions(**options)))


def test_layers_that_servers_cannot_capture_are_refused() -> None:
    assert capturable((3, 0), 5) == (3, 0)
    for layers, message in {
        (0, 4): "layer 4 is the last", (2, 2): "distinct", (-1, 3): "range",
        (9,): r"range(.|\n)*ids 0 to 3(.|\n)*for example \[0\]",
    }.items():  # fmt: skip
        with pytest.raises(UsageError, match=message):
            capturable(layers, 5)
    with pytest.raises(UsageError, match="the default captured layers collide"):
        capturable((2, 2), 5, asked=False)


# ------------------------------------------------------------ exports


@pytest.fixture
def module() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 2))


@pytest.fixture
def exported(module: nn.Module, tmp_path: Path) -> Path:
    config = {"architectures": ["Mine"], "hidden_size": 32, "vocab_size": 50, "steps": 3}
    folder = tmp_path / "export"
    serving.write_export(folder, "serving", config, dict(module.named_parameters()))
    return folder


def test_an_export_reads_back_to_the_same_bits(exported: Path, module: nn.Module) -> None:
    change_tensors(exported, lambda tensors: tensors.update({"old.0.bias": tensors.pop("0.bias")}))
    again = nn.Sequential(nn.Linear(3, 2))
    serving.fill(again, serving.read_tensors(exported, {"old.": ""}), exported)
    for name, tensor in module.state_dict().items():
        assert again.state_dict()[name].equal(tensor)
    config = serving.read_config(exported)
    serving.require_architecture(config, exported, "Other", "Mine")
    serving.require_target(config, a_target(), exported)
    assert serving.required(config, "steps", exported) == 3
    assert sorted(path.name for path in exported.iterdir()) == ["config.json", "model.safetensors"]


@pytest.mark.parametrize(
    ("layout", "value", "message"),
    [
        ("servin", 1.0, r"'servin' .did you mean 'serving'\?"),
        ("serving", torch.nan, "0.bias is not"),
    ],
)
def test_what_cannot_be_exported_leaves_nothing(
    layout: str, value: float, message: str, tmp_path: Path
) -> None:
    with pytest.raises(DraftcoreError, match=message):
        serving.write_export(tmp_path / "export", layout, {}, {"0.bias": torch.tensor([value])})
    assert not (tmp_path / "export").exists()


def test_what_a_config_says_otherwise_is_refused_by_name(exported: Path) -> None:
    config = serving.read_config(exported)
    refusals: dict[str, Any] = {
        "lacks 'width'": lambda: serving.required(config, "width", exported),
        "says steps: 3(.|\n)*steps: 4 only": lambda: serving.require_fixed(
            config, {"steps": 4, "bias": False}, exported
        ),
        "hidden_size 32, the target 64": lambda: serving.require_target(
            config, a_target(hidden_size=64), exported
        ),
        "option head_dim is 8, but(.|\n)*has 9": lambda: serving.require_options(
            {"head_dim": 9, "intermediate_size": 1}, DecoderOptions(head_dim=8), exported
        ),
        r"architectures \['Mine'\](.|\n)*'Other'": lambda: serving.require_architecture(
            config, exported, "Other"
        ),
        "option rope_theta is 2.0, but(.|\n)*has 3.0": lambda: serving.require_options(
            {"rope": {"rope_theta": 3.0}}, DecoderOptions(rope_theta=2.0), exported
        ),
        "speculators layout": lambda: serving.require_architecture(
            {**config, "transformer_layer_config": {}}, exported, "Mine"
        ),
    }
    for message, call in refusals.items():
        with pytest.raises(UsageError, match=message):
            call()
    change_config(exported, steps=GONE)
    assert "steps" not in serving.read_config(exported)


def test_tensors_that_do_not_fit_are_named_all_at_once(exported: Path, module: nn.Module) -> None:
    bad = {"0.weight": torch.ones(3, 3), "extra": torch.ones(1)}
    with pytest.raises(UsageError) as error:
        serving.fill(module, bad, exported)
    for problem in (r"missing 0.bias [2]", "unknown extra [1]", "0.weight is [3, 3], not [2, 3]"):
        assert problem in str(error.value)


def test_damaged_files_and_pickles_are_refused(exported: Path) -> None:
    file = exported / "model.safetensors"
    file.write_bytes(file.read_bytes()[:40])
    with pytest.raises(UsageError, match=r"model.safetensors is damaged"):
        serving.read_tensors(exported, {})
    file.rename(exported / "model.pt")
    with pytest.raises(UsageError, match=r"no model.safetensors\n  model.pt is a pickle"):
        serving.read_tensors(exported, {})
    (exported / "config.json").write_text("{")
    with pytest.raises(UsageError, match=r"config.json is not JSON"):
        serving.read_config(exported)
    (exported / "config.json").unlink()
    with pytest.raises(UsageError, match=r"no draft at .*no config.json"):
        serving.read_config(exported)
