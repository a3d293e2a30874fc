"""A target is known by all that is computed with: whoever changes a weight has another target."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from draftcore_hf.target import TransformersTarget, file_digest
from draftcore_sdk.targets import tiny_target
from safetensors.torch import load_file, save_file


def fingerprint(folder: Path) -> str:
    return TransformersTarget(str(folder)).fingerprint()


def test_a_copy_is_the_same_target_and_a_change_in_any_file_another(tmp_path: Path) -> None:
    """Be it a norm, a token, or the last bit of one weight, as in a fine-tune."""
    base = tiny_target(tmp_path / "base")

    def change_weight(file: Path) -> None:
        weights = load_file(file)
        name = next(name for name in weights if name.endswith("3.mlp.up_proj.weight"))
        last = weights[name].view(-1)[-1:]
        last.copy_(torch.nextafter(last, torch.tensor(9.0)))
        save_file(weights, file, metadata={"format": "pt"})

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
    for name, change in changes.items():
        change(other := shutil.copytree(base, tmp_path / name))
        assert fingerprint(other) not in seen, name


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
    monkeypatch.setattr("draftcore_hf.target.SLOW_DIGEST_BYTES", 4)
    file = tmp_path / "weights"
    file.write_bytes(b"weights")
    digests = [file_digest(file), file_digest(file)]
    assert digests == [hashlib.sha256(b"weights").hexdigest()] * 2
    assert capsys.readouterr().err.count("once for its digest") == 1
    file.write_bytes(b"others!")
    assert file_digest(file) == hashlib.sha256(b"others!").hexdigest()
