"""MTP passes its suites; families' layers are computed, named and stored as their own; what is refused.

What is said of names and classes is of the families' published files; tiny models stand for them.
"""

import copy
import json
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from draftcore_hf.target import TransformersTarget
from draftcore_mtp.algorithm import Mtp
from draftcore_mtp.options import MtpOptions
from draftcore_mtp.plugin import TRIED_WITH
from draftcore_nn.served import Host, Round, UnservableError, gaps
from draftcore_sdk.algorithm_fixtures import NO_DATA, ExportSuite, MakeTarget
from draftcore_sdk.algorithms import AlgorithmSuite
from draftcore_sdk.exports import change, change_config, config_of
from draftcore_sdk.plugins import PluginSuite
from draftcore_sdk.targets import DELTA, EXPERTS, tiny_target
from draftcore_sdk.workbench import require_same_bits
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from draftcore.contracts.algorithm import Draft
from draftcore.errors import UsageError

FRESH = Mtp(MtpOptions(init="fresh"))
PLAIN = Mtp(MtpOptions())
FC = "mtp.fc.weight"


class TestPlugin(PluginSuite):
    plugin = "draftcore_mtp.plugin"


class TestMtp(AlgorithmSuite):
    """As `check-plugin` tries it."""

    plugin = "draftcore_mtp.plugin"
    options, shape = TRIED_WITH["algorithm mtp"].values()


class TestExports(ExportSuite):
    plugin, architecture, servers = "draftcore_mtp.plugin", "Qwen3_5ForCausalLM", ("sglang",)
    matrix = ("mtp.fc.weight", 64)
    reader_shares: ClassVar = frozenset({"draftcore_nn.served", "draftcore.files"})
    hosts: ClassVar[dict[str, Any]] = {"family": "qwen3_5_text"}
    served: ClassVar = {
        "partial": ("partial", {"init": "fresh"}),
        "yarn": ("yarn", {"init": "fresh"}),
    }


# ------------------------------------------------------------ families

Tensors = dict[str, Tensor]
# Of a family: how its tiny target is, the names in its files, and who reads the layer as it was trained.
FAMILIES: dict[str, tuple[dict[str, Any], list[str], tuple[str, ...]]] = {
    "qwen3_5_moe": (
        {**EXPERTS, **DELTA}, ["mtp.fc", "mtp.pre_fc_norm_hidden", "mtp.layers.0.mlp.experts.3.up_proj"],
        ("sglang", "vllm"),
    ),
    "qwen3_next": (
        {"norm_topk_prob": True}, ["mtp.norm", "mtp.layers.0.mlp.shared_expert_gate"],
        ("sglang", "vllm"),
    ),
    "glm4_moe": (
        {"attention_bias": True, "use_qk_norm": True, "routed_scaling_factor": 2.5},
        ["model.layers.6.eh_proj", "model.layers.6.shared_head.norm", "model.layers.6.enorm",
         "model.layers.6.self_attn.q_norm", "model.layers.6.mlp.experts.0.down_proj"],
        ("sglang",),  # vLLM reads no embedding at position 0, and hands on what is not normed
    ),
}  # fmt: skip


def randomised(draft: Draft) -> Draft:
    """Give a draft wide random weights, that the stored dtype can hold."""
    torch.manual_seed(3)
    with torch.no_grad():
        for tensor in draft.module.get_submodule("mtp").state_dict().values():
            tensor.normal_(float(tensor.ndim == 1), 0.2)
            tensor.copy_(tensor.bfloat16())
    return draft


def gap(draft: Draft, target: TransformersTarget, export: Path, server: str) -> float:
    """How far a server's log-probabilities are from the drafter's, in nats."""
    host, generator = Host.of(target), torch.Generator().manual_seed(1)
    tokens_T = torch.randint(250, (11,), generator=generator)
    state_TH = torch.randn(11, host.hidden_size, generator=generator)
    drafter = PLAIN.drafter(draft, target.load_model())
    state = drafter.allocate(1, 16)
    given = ({"last_hidden": state_TH[None]}, torch.tensor([99]))
    drafter.prefill(state, tokens_T[None], torch.tensor([11]), *given)
    drawn = drafter.propose(state, 1.0, generator)
    assert drawn.probs_BKV is not None
    at = Round(host, tokens_T, 99, (), state_TH)
    served = PLAIN.read_export(export, server)
    return float(gaps(served, at, drawn.tokens_BK[0], drawn.probs_BKV[0]).max())


@pytest.mark.parametrize("family", FAMILIES)
def test_a_layer_that_a_target_brings_is_one_of_its_own_and_servers_read_it(
    family: str, tmp_path: Path
) -> None:
    shape, names, servers = FAMILIES[family]
    bare = TransformersTarget(str(tiny_target(tmp_path / "bare", family, **shape)), device="cpu")
    made = randomised(FRESH.build_draft(bare, NO_DATA))
    FRESH.export_draft(made, tmp_path / "whole", "serving")
    target = TransformersTarget(str(tmp_path / "whole"), device="cpu")
    assert {f"{name}.weight" for name in names} <= target.weight_files().keys()
    draft = PLAIN.build_draft(target, NO_DATA)
    module: Any = draft.module
    require_same_bits(module.state_dict(), made.module.state_dict())

    model: Any = target.load_model()
    own, x = copy.deepcopy(model.layers[5]), torch.randn(1, 9, 48)
    own.load_state_dict(module.layer.state_dict())
    positions_1T, mask_TT = torch.arange(9)[None], torch.full((9, 9), -torch.inf).triu(1)
    places = positions_1T.expand(3, 1, 9) if family == "qwen3_5_moe" else positions_1T  # for 5.17
    angles = model.decoder.rotary_emb(x, places)
    theirs = own(x, position_embeddings=angles, attention_mask=mask_TT[None, None])
    *heads, gate = module.layer.project(x, *module.rotary(positions_1T))
    query, key, value = (y.transpose(1, 2) for y in heads)
    attended = scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
    ours = module.layer.finish(x, attended.transpose(1, 2), gate)
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)

    PLAIN.export_draft(draft, tmp_path / "again", "serving")
    for file in ("model.safetensors", "config.json"):
        assert (tmp_path / "again" / file).read_bytes() == (tmp_path / "whole" / file).read_bytes()
    for server in ("sglang", "vllm"):
        assert (gap(draft, target, tmp_path / "again", server) < 1e-3) == (server in servers)


def test_mimo_has_names_and_an_order_of_its_own(make_target: MakeTarget, tmp_path: Path) -> None:
    """transformers does not know it; beside its MTP layer it is a Qwen2."""
    target: Any = make_target(family="qwen2", layer_types=["full_attention"] * 2)
    target.text_config.model_type = "mimo"
    draft = randomised(FRESH.build_draft(target, NO_DATA))
    FRESH.export_draft(draft, tmp_path, "serving")
    with pytest.raises(UnservableError, match=r"Qwen2ForCausalLM.*has no MTP layer of that kind"):
        PLAIN.read_export(tmp_path, "sglang")
    change_config(tmp_path, architectures=["MiMoForCausalLM"])
    stored = load_file(tmp_path / "model.safetensors")
    assert stored["model.mtp_layers.0.input_proj.weight"].shape == (32, 64)
    assert {"self_attn.q_proj.bias", "hidden_layernorm.weight"} <= {
        name.removeprefix("model.mtp_layers.0.") for name in stored
    }
    assert config_of(tmp_path)["num_nextn_predict_layers"] == 1
    for server, most in (("sglang", None), ("vllm", 1)):
        assert gap(draft, target, tmp_path, server) < 1e-3
        assert PLAIN.read_export(tmp_path, server).most == most


# ------------------------------------------------------------ a copy of the target


def test_an_export_is_the_target_with_another_layer_and_nothing_else(
    make_target: MakeTarget, tmp_path: Path
) -> None:
    """In several files and half precision: a new layer is added to the last, a trained one replaced."""

    def half(config: dict[str, Any], tensors: Tensors) -> None:
        config["dtype"] = "bfloat16"
        tensors |= {name: tensor.bfloat16() for name, tensor in tensors.items()}

    bare = Path(make_target().path)
    change(bare, half)
    model: Any = TransformersTarget(str(bare), device="cpu").load_model().model
    model.save_pretrained(tmp_path / "bare", max_shard_size="30KB")
    for file in bare.glob("token*"):
        (tmp_path / "bare" / file.name).write_bytes(file.read_bytes())
    folders = [tmp_path / name for name in ("bare", "whole", "trained")]
    for algorithm, before, after in zip((FRESH, PLAIN), folders, folders[1:], strict=False):
        target = TransformersTarget(str(before), device="cpu")
        draft = algorithm.build_draft(target, NO_DATA)
        with torch.no_grad():
            for parameter in draft.module.parameters():
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
        algorithm.export_draft(draft, after, "serving")
        old, new = (
            TransformersTarget(str(f), device="cpu").weight_files() for f in (before, after)
        )
        mine = {name for name in new if name.startswith("mtp.")}
        assert len(mine) == 15
        assert new.keys() - mine == old.keys() - mine
        layer = {Path(new[name]).name for name in mine}
        for file in sorted(before.iterdir()):
            copied = after / file.name
            if file.suffix == ".safetensors" and file.name not in layer:
                assert copied.samefile(file)  # a hard link
            elif file.suffix == ".safetensors":
                others, found = load_file(file), load_file(copied)
                require_same_bits(
                    {n: t for n, t in found.items() if n not in mine},
                    {n: t for n, t in others.items() if n not in mine},
                )
                assert {found[n].dtype for n in mine & found.keys()} == {torch.bfloat16}
            elif algorithm is PLAIN or file.suffix != ".json" or file.name.startswith("token"):
                assert copied.read_bytes() == file.read_bytes(), file.name
    index = json.loads((folders[1] / "model.safetensors.index.json").read_text())
    sizes = (tensor.nbytes for f in layer for tensor in load_file(folders[1] / f).values())
    rest = {*folders[1].glob("*.safetensors")} - {folders[1] / f for f in layer}
    others = (tensor.nbytes for file in rest for tensor in load_file(file).values())
    assert index["metadata"]["total_size"] == sum(sizes) + sum(others)
    # What is drafted and what is served are the weights as they are stored.
    assert gap(draft, target, folders[2], "sglang") < 1e-3
    again = PLAIN.import_draft(folders[2], target).module.state_dict()
    rounded = {name: t.bfloat16().float() for name, t in draft.module.state_dict().items()}
    require_same_bits(again, rounded)


# ------------------------------------------------------------ what is refused


REFUSED: dict[str, tuple[Any, str]] = {
    "none": (
        lambda _, tensors: [tensors.pop(name) for name in [*tensors] if name.startswith("mtp.")],
        r"no tensor's name begins with 'mtp\.'(.|\n)*init=fresh",
    ),
    "a part": (lambda _, tensors: tensors.pop("mtp.norm.weight"), r"missing norm.weight \[32\]"),
    "two layers": (
        lambda config, _: config.update(mtp_num_hidden_layers=2), "says mtp_num_hidden_layers: 2",
    ),
    "quantised": (lambda _, tensors: tensors.update({FC: tensors[FC].to(torch.float8_e4m3fn)}),
                  r"mtp.fc.weight in .* is stored as torch.float8_e4m3fn"),
}  # fmt: skip


@pytest.mark.parametrize(("edit", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_a_target_without_a_layer_that_can_be_trained_is_an_error_at_the_start(
    edit: Any, message: str, exported: Path
) -> None:
    change(exported, edit)
    with pytest.raises(UsageError, match=message):
        PLAIN.build_draft(TransformersTarget(str(exported), device="cpu"), NO_DATA)


def test_a_kind_of_target_whose_layer_is_unknown_is_refused_before_weights_are_read(
    tmp_path: Path,
) -> None:
    target = TransformersTarget(str(tiny_target(tmp_path, "deepseek_v3")), device="cpu")
    for file in tmp_path.glob("*.safetensors"):
        file.unlink()
    with pytest.raises(UsageError, match=r"type deepseek_v3(.|\n)*known are those of qwen3_5_text"):
        PLAIN.feature_request(target)
    assert FRESH.feature_request(target).names == ("last_hidden",)
