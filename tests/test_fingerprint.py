"""A target is known by all that is computed with: whoever changes a weight has another target."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

import pytest
import torch
from draftcore_sdk.targets import tiny_target
from safetensors.torch import load_file, save_file

from draftcore.target import TransformersTarget, file_digest


def fingerprint(folder: Path) -> str:
    return TransformersTarget(str(folder)).fingerprint


def test_a_copy_is_the_same_target_and_a_fine_tune_another(tmp_path: Path) -> None:
    """A fine-tune whose embedding is the base's, and one of a single other weight."""
    base = tiny_target(tmp_path / "base")
    copied = shutil.copytree(base, tmp_path / "copied")
    assert fingerprint(base) == fingerprint(copied)
    file = copied / "model.safetensors"
    weights = load_file(file)
    name = next(name for name in weights if name.endswith("3.mlp.up_proj.weight"))
    weights[name].view(-1)[-1] = torch.nextafter(weights[name].view(-1)[-1], torch.tensor(9.0))
    save_file(weights, file, metadata={"format": "pt"})
    assert fingerprint(base) != fingerprint(copied)


@pytest.mark.parametrize("file", ["config.json", "tokenizer.json"])
def test_another_norm_or_tokenizer_is_another_target(tmp_path: Path, file: str) -> None:
    base = tiny_target(tmp_path / "base")
    other = shutil.copytree(base, tmp_path / "other")
    data = json.loads((other / file).read_text())
    if file == "config.json":
        data["rms_norm_eps"] *= 2
    else:
        data["model"]["vocab"]["a new token"] = len(data["model"]["vocab"]) + 1000
    (other / file).write_text(json.dumps(data))
    assert fingerprint(base) != fingerprint(other)


def test_a_hub_caches_file_is_known_by_its_blobs_name(tmp_path: Path) -> None:
    blobs = tmp_path / "blobs"
    blobs.mkdir()
    name = hashlib.sha256(b"not what the file holds").hexdigest()
    (blobs / name).write_bytes(b"weights")
    (tmp_path / "model.safetensors").symlink_to(blobs / name)
    assert file_digest(tmp_path / "model.safetensors") == name


def test_a_large_file_is_read_once_as_long_as_it_is_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("draftcore.target.SAID", 4)
    file = tmp_path / "weights"
    file.write_bytes(b"weights")
    digests = [file_digest(file), file_digest(file)]
    assert digests == [hashlib.sha256(b"weights").hexdigest()] * 2
    assert capsys.readouterr().err.count("once for its digest") == 1
    file.write_bytes(b"others!")
    assert file_digest(file) == hashlib.sha256(b"others!").hexdigest()
