"""sglang's own code is the oracle of the readers: its config parser, weight loading and drafting.

Unmodified sglang on the CPU; its attention over a KV cache is the one part that a plain causal
attention stands in for, since its kernels want a running engine. `vllm` has no such oracle here.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from draftcore_hf.target import TransformersTarget
from draftcore_nn.served import Host, Round, leads, proposals, rotate, served_rope
from draftcore_sdk.exports import ROPES
from draftcore_sdk.suite import bound
from safetensors.torch import load_file
from torch import Tensor

if importlib.util.find_spec("sglang") is None:
    pytest.skip("sglang is not installed", allow_module_level=True)

if importlib.util.find_spec("draftcore_sglang_cpu"):
    from draftcore_sglang_cpu import mend_torchvision

    mend_torchvision()  # before transformers looks for it

pytestmark = pytest.mark.sglang
LIMIT = 1e-4  # of logits; two orders of summation in fp32, 2e-5 seen


@pytest.fixture(scope="module")
def sglang() -> None:
    """Load what sglang's plugins bring, as each of its processes does."""
    from sglang.srt.plugins import load_plugins

    load_plugins()


@pytest.fixture(scope="module")
def process(sglang: None, target_folder: Path) -> Iterator[None]:
    """One rank of one on the CPU, published and with its groups, as sglang's models want it."""
    from sglang.srt.distributed import parallel_state
    from sglang.srt.runtime_context import SpawnRanks, publish
    from sglang.srt.server_args import ServerArgs

    args = ServerArgs(
        model_path=str(target_folder), device="cpu", attention_backend="torch_native",
        dtype="float32", sampling_backend="pytorch", grammar_backend="none",
        disable_cuda_graph=True, log_level="error",
    )  # fmt: skip
    args.resolve_once()
    publish(args, role="scheduler", ranks=SpawnRanks(world_rank=0, gpu_id=0))
    parallel_state.init_distributed_environment(
        world_size=1, rank=0, local_rank=0, backend="gloo",
        distributed_init_method="tcp://127.0.0.1:0",
    )  # fmt: skip
    parallel_state.initialize_model_parallel()
    yield
    parallel_state.destroy_model_parallel()
    parallel_state.destroy_distributed_environment()


@pytest.fixture(scope="module")
def host(target_folder: Path) -> Host:
    return Host.of(TransformersTarget(str(target_folder), device="cpu"))


def read(exported: Any) -> Any:
    algorithm = bound(f"draftcore_{exported.algorithm}.plugin", "algorithm")
    given = {"server": "sglang", "options": algorithm.options}
    return algorithm.hook.read_export(folder=exported.folder, **given)


def loaded(kind: Any, exported: Any) -> Any:
    """An sglang model with the export's weights; every parameter must have been given one."""
    from transformers import AutoConfig

    before = torch.get_default_dtype()
    config = AutoConfig.from_pretrained(exported.folder)
    model = kind(config).float()
    for parameter in model.parameters():
        parameter.data.fill_(float("nan"))
    model.load_weights(load_file(exported.folder / "model.safetensors").items())
    torch.set_default_dtype(before)
    return model


def a_round(host: Host, layers: tuple[int, ...]) -> Round:
    """Some tokens, and states that no target gave: any will do."""
    generator = torch.Generator().manual_seed(3)
    tokens_T = torch.randint(250, (17,), generator=generator)
    states = [torch.randn(17, host.hidden_size, generator=generator) for _ in layers]
    return Round(host, tokens_T, 99, tuple(states), states[-1])


@pytest.mark.smoke
@pytest.mark.parametrize("algorithm", ["eagle3", "dflash", "domino", "dspark"])
def test_sglangs_parsers_read_the_same_of_a_config(
    algorithm: str, make_run: Any, sglang: None, host: Host
) -> None:
    from sglang.srt.speculative.dflash_utils import parse_dflash_draft_config
    from sglang.srt.utils.hf_transformers_utils import get_rope_config
    from transformers import AutoConfig

    exported = make_run(algorithm)
    served, config = read(exported), AutoConfig.from_pretrained(exported.folder)
    assert get_rope_config(config)[0] == served.facts["rope_theta"]
    if algorithm == "eagle3":
        return
    parsed = parse_dflash_draft_config(draft_hf_config=config)
    layers = parsed.resolve_target_layer_ids(target_num_layers=host.num_layers)
    assert tuple(layers) == served.captured(host)
    assert parsed.resolve_block_size() == served.block_size
    for name in ("mask_token_id", "num_target_layers"):
        assert getattr(parsed, name) == served.facts[name]
    assert parsed.is_domino == (algorithm == "domino")
    if parsed.is_domino:
        names = ("shift_label", "gru_hidden_dim", "emb_dim")
        assert [getattr(parsed, n) for n in names] == [served.field(n) for n in names]


@pytest.mark.parametrize("depth", [1, 2, 3, 5])
def test_default_layers_are_sglangs(depth: int, make_run: Any, sglang: None, host: Host) -> None:
    from sglang.srt.speculative.dflash_utils import build_target_layer_ids

    served, deep = read(make_run("dflash")), dataclasses.replace(host, num_layers=36)
    nested = {**served.nested, "target_layer_ids": None}
    config = {**served.config, "num_hidden_layers": depth, "dflash_config": nested}
    without = dataclasses.replace(served, config=config)
    assert list(without.captured(deep)) == build_target_layer_ids(36, depth)


@pytest.mark.parametrize("rope", ROPES)
def test_heads_are_turned_as_sglang_turns_them(rope: str, process: None) -> None:
    from sglang.srt.layers.rotary_embedding import get_rope

    given, x_TAD = dict(ROPES[rope]), torch.randn(50, 2, 12)
    width = int(12 * given.get("partial_rotary_factor", 1))
    theirs = get_rope(12, width, 64, given["rope_theta"], rope_scaling=given, dtype=torch.float32)
    positions_T = torch.arange(50)
    turned_TX, _ = theirs.forward_native(positions_T, x_TAD.flatten(1), x_TAD.flatten(1).clone())
    ours_TAD = rotate(x_TAD, positions_T, served_rope({"rope_parameters": given}, "sglang"))
    torch.testing.assert_close(ours_TAD.flatten(1), turned_TX, rtol=1e-5, atol=1e-5)


def test_an_eagle3_export_fills_sglangs_model_and_drafts_as_read(
    make_run: Any, process: None, host: Host
) -> None:
    from sglang.srt.models.llama_eagle3 import LlamaForCausalLMEagle3

    for options in ({}, {"fc_norm": True, "norm_output": True}):
        exported = make_run("eagle3", **options)
        model, served = loaded(LlamaForCausalLMEagle3, exported), read(exported)
        assert all(parameter.isfinite().all() for parameter in model.parameters())
        does = model.logits_processor
        assert (does.logit_scale, does.final_logit_softcapping) == (None, None)
        at = a_round(host, served.captured(host))
        drafts_K = proposals(served, at, 3)
        theirs_KV = unrolled(model, at, drafts_K)
        ours_KV = served.logits(at, drafts_K[:-1])
        ids_U = model.hot_token_id
        assert torch.equal(ours_KV.isfinite().nonzero()[:, 1].unique(), ids_U)
        assert float((ours_KV[:, ids_U] - theirs_KV).abs().max()) < LIMIT
        assert torch.equal(ids_U[theirs_KV.argmax(-1)], drafts_K)


@torch.no_grad()
def unrolled(model: Any, at: Round, drafts_K: Tensor) -> Tensor:
    """Logits [K, U] by sglang's model; attention alone is ours."""
    (layer,) = model.model.layers
    layer.self_attn.attn.forward = lambda q, k, v, *_: causal(layer.self_attn, q, k, v)
    tokens = torch.cat([at.tokens_T[1:], torch.tensor([at.last]), drafts_K])
    # Row by row as sglang steps: states of drafted rows are those that the model gave back.
    hidden = joined(model.model, torch.cat(at.hidden, -1))
    logits = []
    for rows in range(len(at.tokens_T), len(tokens)):
        batch = SimpleNamespace(
            mm_input_embeds=None, spec_info=SimpleNamespace(hidden_states=hidden),
            forward_mode=SimpleNamespace(is_extend=lambda: False),
        )  # fmt: skip
        final, (fed_back,) = model.model(tokens[:rows], torch.arange(rows), batch)
        logits.append(final[-1] @ model.lm_head.weight[: len(model.hot_token_id)].T)
        hidden = torch.cat([hidden, fed_back[-1:]])
    return torch.stack(logits)


def joined(model: Any, features: Tensor) -> Tensor:
    """What sglang's forward does to features that are wider than an embedding."""
    if model.fc_norm is not None:
        chunks = zip(model.fc_norm, features.chunk(model.num_aux_hidden_states, -1), strict=True)
        features = torch.cat([norm(chunk.contiguous()) for norm, chunk in chunks], -1)
    return model.fc(features)  # type: ignore[no-any-return]


def causal(attention: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention over whole rows, [T, heads * width]."""
    q, k, v = (x.unflatten(-1, (-1, attention.head_dim)).transpose(0, 1)[None] for x in (q, k, v))  # type: ignore[no-untyped-call]
    attend = torch.nn.functional.scaled_dot_product_attention
    return attend(q, k, v, is_causal=True, enable_gqa=True)[0].transpose(0, 1).flatten(1)


@pytest.mark.parametrize("algorithm", ["dflash", "domino", "dspark"])
def test_an_export_fills_every_parameter_of_sglangs_model(
    algorithm: str, make_run: Any, process: None, host: Host
) -> None:
    from sglang.srt.models.dflash import DFlashDraftModel
    from sglang.srt.models.dspark import Qwen3DSparkModel

    exported = make_run(algorithm)
    kind = Qwen3DSparkModel if algorithm == "dspark" else DFlashDraftModel
    model, served = loaded(kind, exported), read(exported)
    assert all(parameter.isfinite().all() for parameter in model.parameters())
    at = a_round(host, served.captured(host))
    weight, eps = served.tensors["hidden_norm.weight"], served.config["rms_norm_eps"]
    ours = torch.cat(at.hidden, -1) @ served.tensors["fc.weight"].T
    ours = ours * (ours.square().mean(-1, keepdim=True) + eps).rsqrt() * weight
    with torch.no_grad():
        theirs = model.project_target_hidden(torch.cat(at.hidden, -1))
    assert float((ours - theirs).abs().max()) < LIMIT


@pytest.mark.parametrize("shifted", [True, False])
def test_sglangs_rollout_drafts_what_is_read(
    shifted: bool, make_run: Any, sglang: None, host: Host
) -> None:
    from sglang.srt.speculative.domino_utils import domino_greedy_rollout

    served = read(make_run("domino", shift_label=shifted))
    read_ = served.tensors
    states, rank = read_["prefix_gru.weight_hh_l0"].shape[1], read_["embed_proj.0.weight"].shape[0]
    gru = torch.nn.GRU(host.hidden_size, states, bias=False, batch_first=True)
    linear = functools.partial(torch.nn.Linear, bias=False)
    up, down = linear(host.hidden_size + states, rank), linear(rank, host.vocab_size)
    head = torch.nn.Sequential(up, torch.nn.SiLU(), down)
    for part, prefix in ((gru, "prefix_gru."), (head, "embed_proj.")):
        own = {n.removeprefix(prefix): t for n, t in read_.items() if n.startswith(prefix)}
        part.load_state_dict(own)
    embedding = torch.nn.Embedding.from_pretrained(host.embedding_VH)  # type: ignore[no-untyped-call]
    at = a_round(host, served.captured(host))
    rolled_BK = domino_greedy_rollout(
        draft_hidden=served.block_hidden(at)[None], bonus_tokens=torch.tensor([at.last]),
        target_embedding=embedding, lm_head_weight=host.head_VH, prefix_gru=gru, embed_proj=head,
        vocab_size=host.vocab_size, shift_label=shifted, candidate_pool_size=0,
        in_cuda_graph=False,
    )  # fmt: skip
    assert torch.equal(rolled_BK[0], proposals(served, at, served.block_size - 1))
    assert float(leads(served, at, rolled_BK[0]).max()) == 0


@pytest.mark.parametrize("kind", ["vanilla", "gated", "rnn"])
def test_sglangs_markov_head_drafts_what_is_read(
    kind: str, make_run: Any, process: None, host: Host
) -> None:
    from sglang.srt.models.dspark import Qwen3DSparkModel

    exported = make_run("dspark", markov_head_type=kind)
    model, served = loaded(Qwen3DSparkModel, exported), read(exported)
    assert (model.gamma, model.sample_from_anchor) == (served.most, True)
    at = a_round(host, served.captured(host))
    drafts_K, hidden_KH = proposals(served, at, served.most), served.block_hidden(at)
    base_KV, state = hidden_KH @ host.head_VH.T, model.markov_head.init_state(hidden_KH[:1])
    previous, theirs = torch.tensor([at.last]), []
    for k, h_1H in enumerate(hidden_KH.split(1)):
        bias_1V, state = model.markov_head.step_bias(previous, hidden_states=h_1H, state=state)
        theirs.append(base_KV[k] + bias_1V[0])
        previous = drafts_K[k : k + 1]
    gap = (torch.stack(theirs) - served.logits(at, drafts_K[:-1])).abs().max()
    assert float(gap.detach()) < LIMIT
