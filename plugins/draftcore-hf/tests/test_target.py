"""The target passes its suites and is what the README says; its features and weights against

transformers; by what it is known.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from draftcore_hf.capture import LocalCapture
from draftcore_hf.options import TargetOptions
from draftcore_hf.target import TransformersModel, TransformersTarget, file_digest
from draftcore_sdk.plugins import PluginSuite
from draftcore_sdk.targets import TargetSuite, tiny_target
from safetensors.torch import load_file, save_file
from torch import Tensor

from draftcore import open_run
from draftcore.contracts.capture import FeatureRequest
from draftcore.errors import UsageError


class TestPlugin(PluginSuite):
    plugin = "draftcore_hf.plugin"


class TestTarget(TargetSuite):
    plugin = "draftcore_hf.plugin"


@pytest.fixture(scope="session")
def target_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_target(tmp_path_factory.mktemp("target"))


def test_the_readmes_run_opens_and_its_table_lists_the_options_that_there_are(
    target_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    readme = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
    (run_yaml,) = re.findall(r"^```yaml\n(.*?)^```$", readme, re.DOTALL | re.MULTILINE)
    monkeypatch.chdir(tmp_path)
    Path("run.yaml").write_text(run_yaml)
    with open_run("run.yaml", (f"target.path={target_folder}", "target.device=cpu")) as run:
        assert isinstance(run.target, TransformersTarget)
        request = FeatureRequest((0,), False, "bfloat16")
        capture: Any = run.capture.hook
        opened = capture.capture(name="hf", target=run.target, request=request, options=None)
        assert isinstance(opened, LocalCapture)
    table = dict(re.findall(r"^\| `(\w+)` \| (.+?) \|", readme, re.MULTILINE))
    fields, words = TargetOptions.model_fields, {"must be set": ..., "none": None}
    assert list(table) == list(fields)
    for name, default in table.items():
        said = words.get(default, yaml.safe_load(default))
        assert said is ... if fields[name].is_required() else said == fields[name].default


def opened(folder: Path) -> TransformersModel:
    return TransformersModel(TransformersTarget(str(folder), device="cpu"))


def require_here(folder: Path, device: str = "cpu") -> None:
    """Ask for all that is known of a target before it is loaded."""
    target = TransformersTarget(str(folder), device=device)
    target.require_layers(FeatureRequest((0,), True, "float32"), here=True)


def say(file: Path, part: str | None = None, **values: object) -> None:
    """Change what a JSON file of a target says, in a part of it."""
    said = json.loads(file.read_text())
    (said[part] if part else said).update(values)
    file.write_text(json.dumps(said))


def change(weights: Path, **tensors: Tensor) -> None:
    """Put tensors beside those of a file, or in their places."""
    save_file(load_file(weights) | tensors, weights, metadata={"format": "pt"})


@pytest.mark.parametrize("slices", [1, 4])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_largest_logits_are_the_models_own(
    target_folder: Path, monkeypatch: pytest.MonkeyPatch, dtype: str, slices: int
) -> None:
    """Of equal ones, which are many in bfloat16, the lower id comes first, however many are asked."""
    target = TransformersModel(TransformersTarget(str(target_folder), dtype=dtype, device="cpu"))
    tokens_BT = torch.randint(0, 256, (2, 10), generator=torch.Generator().manual_seed(0))
    at_a_time = 20 // slices * target.spec.vocab_size
    monkeypatch.setattr("draftcore_hf.target.LOGITS_AT_A_TIME", at_a_time)
    own_BTV = target.model(input_ids=tokens_BT).logits.float()
    right_BTV = own_BTV.sort(descending=True, stable=True)
    for k in (1, 7, target.spec.vocab_size):
        request = FeatureRequest((), False, "float32", topk=k)
        found = target.features(tokens_BT, torch.tensor([10, 10]), request)
        assert found["topk_ids"].dtype == torch.int32
        assert torch.equal(found["topk_ids"], right_BTV.indices[..., :k].int())
        assert torch.equal(found["topk_logits"], right_BTV.values[..., :k])
        half = target.features(tokens_BT, torch.tensor([10, 10]), replace(request, dtype="float16"))
        assert torch.equal(half["topk_logits"], found["topk_logits"].half())


def test_embeddings_are_what_the_first_layer_is_given_also_scaled(tmp_path: Path) -> None:
    tokens_BT = torch.randint(0, 256, (2, 9), generator=torch.Generator().manual_seed(0))
    request, lengths_B = FeatureRequest((), False, "float32", embeddings=True), torch.tensor([9, 9])
    scaled = opened(tiny_target(tmp_path, "gemma2"))
    found = scaled.features(tokens_BT, lengths_B, request)["embeddings"]
    plain = scaled.spec.embedding()[tokens_BT]
    torch.testing.assert_close(found, plain * 48**0.5, rtol=1e-6, atol=0)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", ["qwen3", "qwen3_vl", "qwen3_vl_moe", "gemma3", "mistral3"])
def test_head_and_embedding_are_the_models_own_whichever_config_says_that_they_are_tied(
    tmp_path: Path, family: str, tied: bool
) -> None:
    """The text part's config may say nothing, or the contrary of what holds."""
    tiny_target(tmp_path, family, tie_word_embeddings=tied)
    if family != "qwen3":
        say(tmp_path / "config.json", "text_config", tie_word_embeddings=not tied)
    target = opened(tmp_path)
    target.check()
    assert torch.equal(target.spec.embedding(), target.model.get_input_embeddings().weight)
    assert torch.equal(target.spec.head(), target.model.get_output_embeddings().weight)
    assert torch.equal(target.spec.head(), target.spec.embedding()) is tied


def test_an_embedding_that_the_model_does_not_compute_with_is_refused(tmp_path: Path) -> None:
    """One of a layer for multi-token prediction is not taken for it."""
    weights = tiny_target(tmp_path) / "model.safetensors"
    other = load_file(weights)["model.embed_tokens.weight"] + 1
    change(weights, **{"a.layers.6.embed_tokens.weight": other})
    opened(tmp_path).check()
    opened(tiny_target(tmp_path / "youtu", "youtu")).check()  # it makes zeros of its padding
    change(weights, **{"a.embed_tokens.weight": other + 1})
    with pytest.raises(UsageError, match=r"the embedding in the files of .* Qwen3ForCausalLM"):
        opened(tmp_path).check()


@pytest.mark.parametrize(
    ("family", "scale", "cap"),
    [
        ("gemma2", 1, 3),
        ("granite", 0.25, None),
        ("cohere", 0.25, None),
        ("falcon_h1", 0.5, None),
        ("recurrent_gemma", 1, 30),
        ("minicpm3", 16 / 3, None),
    ],
)
def test_logits_are_scaled_and_capped_as_the_model_does(
    tmp_path: Path, family: str, scale: float, cap: float | None
) -> None:
    target = opened(tiny_target(tmp_path, family))
    assert (target.spec.logit_scale, target.spec.logit_softcap) == (scale, cap)
    target.check()
    tokens_BT, request = torch.arange(20)[None], FeatureRequest((), True, "float32", topk=5)
    found = target.features(tokens_BT, torch.tensor([20]), request)
    own_BTV = target.model(input_ids=tokens_BT).logits
    torch.testing.assert_close(found["topk_logits"], own_BTV.topk(5).values, rtol=1e-5, atol=1e-6)
    head_VH = target.spec.head() * scale
    given_BTV = found["last_hidden"] @ head_VH.T
    given_BTV = given_BTV if cap is None else cap * torch.tanh(given_BTV / cap)
    torch.testing.assert_close(given_BTV, own_BTV, rtol=1e-5, atol=1e-5)


def test_a_head_with_a_bias_layers_of_several_streams_and_a_failing_model_are_refused(
    tmp_path: Path,
) -> None:
    """Algorithms are given the head's weight alone."""
    weights = tiny_target(tmp_path / "phi", "phi") / "model.safetensors"
    change(weights, **{"lm_head.bias": torch.linspace(-1, 1, 259)})
    with pytest.raises(UsageError, match=r"PhiForCausalLM computes its logits in a way"):
        opened(weights.parent).check()
    with pytest.raises(UsageError, match=r"gives states of shape \(1, 32, 48\), its norm of"):
        opened(tiny_target(tmp_path / "gemma", "gemma3n_text")).check()
    with pytest.raises(UsageError, match=r"xLSTMForCausalLM of .* of 32 tokens: ValueError"):
        opened(tiny_target(tmp_path / "xlstm", "xlstm")).check()


@pytest.mark.parametrize("method", ["modelopt", "fbgemm_fp8"])
def test_quantised_weights_that_cannot_be_read_are_refused(tmp_path: Path, method: str) -> None:
    """Of a method that it does not know it would take the integers for weights."""
    say(tiny_target(tmp_path) / "config.json", quantization_config={"quant_method": method})
    says = rf"quantised by {method}, cannot be read: .*\n.*\n  or inst"
    for read in (require_here, opened):
        with pytest.raises(UsageError, match=says):
            read(tmp_path)


UP = "model.layers.3.mlp.up_proj.weight"
DAMAGED = {
    "a file is lost": "of the 2 files that the index names, 1 are not there: b.safetensors",
    "a file is cut": r"weights in b.safetensors cannot be read: .*\n.*has to be downloaded again",
    "a file lacks one": f"weights in b.safetensors cannot be read: {UP} is not there",
    "all lack one": f"they lack {UP}, which config.json says are there",
    UP: rf"{UP} has the shape \(9, 48\), config.json says \(64, 48\)",
    "lm_head.weight": r"lm_head.weight has the shape \(9, 48\), config.json says \(259, 48\)",
}


@pytest.mark.parametrize("way", DAMAGED)
def test_weights_that_would_not_load_are_refused_by_what_their_files_say_of_them(
    tmp_path: Path, way: str
) -> None:
    pytest.importorskip("accelerate")
    file, last = tiny_target(tmp_path) / "model.safetensors", tmp_path / "b.safetensors"
    tensors = load_file(file)
    names = {name: f"{'ab'['layers' in name]}.safetensors" for name in tensors}
    file.unlink()
    tensors |= {way: torch.zeros(9, 48)} if way in tensors else {}
    if "lack" in way:
        del tensors[UP]
    if way == "all lack one":
        del names[UP]
    for part in {*names.values()}:
        held = {name: tensor for name, tensor in tensors.items() if names[name] == part}
        save_file(held, tmp_path / part, {"format": "pt"})
    Path(f"{file}.index.json").write_text(json.dumps({"metadata": {}, "weight_map": names}))
    if way == "a file is cut":
        last.write_bytes(last.read_bytes()[:-9])
    if way == "a file is lost":
        last.unlink()
    with pytest.raises(UsageError, match=DAMAGED[way]):
        require_here(tmp_path)


Pair = tuple[dict[str, Tensor], Tensor]  # what a file holds of a weight, and the weight itself


def as_fp8(name: str, weight_OI: Tensor) -> Pair:
    """In blocks of 32 x 32, each with its scale."""
    rows, columns = weight_OI.shape[0] // 32, weight_OI.shape[1] // 32
    blocks = weight_OI.view(rows, 32, columns, 32)
    scales = blocks.abs().amax((1, 3)) / 448
    each = scales[:, None, :, None]
    small = (blocks / each).to(torch.float8_e4m3fn)
    weight = (small.float() * each).view_as(weight_OI)
    return {name: small.view_as(weight_OI), f"{name}_scale_inv": scales}, weight


def as_mxfp4(name: str, weight_EIO: Tensor) -> Pair:
    """Any numbers: 32 of four bits, two in a byte, and their exponent."""
    E, I, O = weight_EIO.shape  # noqa: E741
    blocks = torch.randint(0, 256, (E, O, I // 32, 16), dtype=torch.uint8)
    scales = torch.randint(118, 123, (E, O, I // 32), dtype=torch.uint8)
    values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    numbers = torch.cat([values, -values])[torch.stack([blocks & 15, blocks >> 4], -1).long()]
    weight_EOI = (numbers.flatten(-2) * torch.exp2(scales - 127.0)[..., None]).flatten(-2)
    weight = weight_EOI.transpose(1, 2).contiguous()
    return {f"{name}_blocks": blocks, f"{name}_scales": scales}, weight


@pytest.mark.parametrize(
    ("family", "part", "quantised", "said"),
    [
        ("qwen3", "_proj.weight", as_fp8, {"quant_method": "fp8", "weight_block_size": [32, 32]}),
        ("gpt_oss", "experts.", as_mxfp4, {"quant_method": "mxfp4", "modules_to_not_convert": []}),
    ],
)
def test_quantised_weights_give_the_features_of_what_they_stand_for(
    tmp_path: Path, family: str, part: str, quantised: Callable[..., Pair], said: dict[str, Any]
) -> None:
    """Without a GPU transformers makes them what they stand for."""
    torch.manual_seed(0)
    for name in ("small", "whole"):
        tiny_target(tmp_path / name, family, hidden_size=64, intermediate_size=64, head_dim=16)
    small, whole = dict[str, Tensor](), dict[str, Tensor]()
    for name, weight in load_file(tmp_path / "whole" / "model.safetensors").items():
        fits = part in name and "bias" not in name
        stored, whole[name] = quantised(name, weight) if fits else ({name: weight}, weight)
        small |= stored
    assert len(small) > len(whole)
    for name, tensors in {"small": small, "whole": whole}.items():
        save_file(tensors, tmp_path / name / "model.safetensors", metadata={"format": "pt"})
    say(tmp_path / "small" / "config.json", quantization_config=said)
    given = torch.arange(20)[None], torch.tensor([20]), FeatureRequest((0, 3), True, "float32")
    target = opened(tmp_path / "small")
    target.check()
    found, right = target.features(*given), opened(tmp_path / "whole").features(*given)
    for name, value in right.items():
        torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-5)


def test_a_tie_is_judged_in_a_wider_type_by_experts_too(tmp_path: Path) -> None:
    target, tokens = opened(tiny_target(tmp_path, "mixtral")), [5, 9, 7]
    best, second = target.model(input_ids=torch.tensor([tokens])).logits[0, -1].topk(2).values
    assert target.top2_gap(tokens) == pytest.approx(float(best - second), abs=1e-5)


@pytest.mark.parametrize(
    ("config", "says"),
    [(None, "there is no such folder"), ("{}", ""), ('{"model_type": "bert"}', "it is an encoder")],
)
def test_what_is_no_target_is_named(tmp_path: Path, config: str | None, says: str) -> None:
    folder = tmp_path / "nowhere"
    if config is not None:
        folder.mkdir()
        (folder / "config.json").write_text(config)
    with pytest.raises(
        UsageError, match=rf"no target model at '.*nowhere': .*{says}.*\n  set target.path"
    ):
        TransformersTarget(str(folder))


def test_code_that_comes_with_a_model_is_not_run_whoever_says_yes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tokenizer that transformers can read without is read; a model that it cannot is refused.

    The key that the error names has it run.
    """
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    tiny_target(tmp_path)
    code = f"open({str(tmp_path / 'ran')!r}, 'w')\nfrom transformers import Qwen3Config\n"
    (tmp_path / "own.py").write_text(f"{code}\nclass Own(Qwen3Config):\n    model_type = 'own'\n")
    own = {"AutoTokenizer": ["own.Own", None]}
    say(tmp_path / "tokenizer_config.json", tokenizer_class="Own", auto_map=own)
    assert TransformersTarget(str(tmp_path)).load_tokenizer().vocab_size
    say(tmp_path / "config.json", model_type="own", auto_map={"AutoConfig": "own.Own"})
    with pytest.raises(UsageError, match=r"the config of .*\n  set target.trust_remote_code=true"):
        TransformersTarget(str(tmp_path))
    assert not (tmp_path / "ran").exists()
    assert TransformersTarget(str(tmp_path), trust_remote_code=True).num_layers == 6
    assert (tmp_path / "ran").exists()


def test_an_absent_device_is_refused(target_folder: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has the device")
    with pytest.raises(UsageError, match="sees 0 CUDA devices"):
        require_here(target_folder, "cuda")


def fingerprint(folder: Path) -> str:
    return TransformersTarget(str(folder)).fingerprint()


def test_a_copy_is_the_same_target_and_a_change_in_any_file_another(tmp_path: Path) -> None:
    """Be it a norm, a token, or the last bit of one weight, as in a fine-tune."""
    base = tiny_target(tmp_path / "base")

    def change_weight(file: Path) -> None:
        weight = load_file(file)["model.layers.3.mlp.up_proj.weight"]
        last = weight.view(-1)[-1:]
        last.copy_(torch.nextafter(last, torch.tensor(9.0)))
        change(file, **{"model.layers.3.mlp.up_proj.weight": weight})

    def change_text(file: Path, old: str, new: str) -> None:
        assert old in file.read_text()
        file.write_text(file.read_text().replace(old, new))

    seen = [fingerprint(base), fingerprint(shutil.copytree(base, tmp_path / "copied"))]
    assert seen[0] == seen[1]
    changes: dict[str, Callable[[Path], None]] = {
        "weight": lambda folder: change_weight(folder / "model.safetensors"),
        "norm": lambda folder: change_text(folder / "config.json", "1e-06", "2e-06"),
        "token": lambda folder: change_text(folder / "tokenizer.json", '"!"', '"!!"'),
    }
    for name, make in changes.items():
        make(other := shutil.copytree(base, tmp_path / name))
        assert fingerprint(other) not in seen, name


@pytest.mark.parametrize("way", ["whole", "a flipped bit", "a torn head"])
def test_a_hub_caches_file_is_known_by_its_name_and_compared_with_it_while_it_is_loaded(
    tmp_path: Path, way: str
) -> None:
    """Damage that leaves the file's form reads well, and the name is still that of the right one."""
    (blobs := tmp_path / "blobs").mkdir()
    weights = tiny_target(tmp_path) / "model.safetensors"
    whole = bytearray(weights.read_bytes())
    name = hashlib.sha256(whole).hexdigest()
    whole[-1 if way == "a flipped bit" else 0] ^= way != "whole"
    (blobs / name).write_bytes(whole)
    weights.unlink()
    weights.symlink_to(blobs / name)
    assert file_digest(weights) == name
    if way == "whole":
        assert opened(tmp_path).end_tokens
        return
    with pytest.raises(UsageError, match=r"(?s)weights.*has to be downloaded again") as caught:
        opened(tmp_path)
    assert (f"{name} is damaged" in str(caught.value)) == (way == "a flipped bit")


def test_a_large_file_is_read_once_as_long_as_it_is_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("draftcore_hf.target.SLOW_DIGEST_BYTES", 4)
    file = tmp_path / "weights"
    file.write_bytes(b"weights")
    digests = [file_digest(file), file_digest(file)]
    assert digests == [hashlib.sha256(b"weights").hexdigest()] * 2
    assert capsys.readouterr().err.count("once for its digest") == 1
    file.write_bytes(b"others!")
    assert file_digest(file) == hashlib.sha256(b"others!").hexdigest()
