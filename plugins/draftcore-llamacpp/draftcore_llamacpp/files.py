"""GGUF files: keys by the types of their values, and tensors in one of four types."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from torch import Tensor

from draftcore.errors import DraftcoreError, UsageError
from draftcore.files import regular

TYPES = ("f32", "f16", "bf16", "q8_0")
BLOCK = 32  # values of a row that share a scale in q8_0; other rows are stored in f16


def write_gguf(
    file: Path, architecture: str, keys: Mapping[str, Any], tensors: Mapping[str, Tensor], kind: str
) -> None:
    """Write a file whole or not at all, with its matrices in a type; what is no matrix is f32.

    Raises DraftcoreError where it cannot be written.
    """
    partial = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        out = gguf.GGUFWriter(partial, architecture)
        prefix = "ALL" if kind == "f32" else "MOSTLY"
        out.add_file_type(gguf.LlamaFileType[f"{prefix}_{kind.upper()}"])
        for key, value in keys.items():
            add_key(out, key, value)
        for name, tensor in tensors.items():
            add_tensor(out, name, tensor, kind)
        out.write_header_to_file()
        out.write_kv_data_to_file()
        out.write_tensors_to_file()
        out.close()
        partial.replace(file)
    except OSError as error:
        raise DraftcoreError(
            f"cannot write {file}: {error}\n  free space there, or name another file with --out"
        ) from None
    finally:
        with suppress(OSError):
            partial.unlink()


def add_key(out: gguf.GGUFWriter, key: str, value: Any) -> None:
    """Add a key by the type of its value: whole numbers are unsigned and of 32 bits."""
    adds = {bool: out.add_bool, int: out.add_uint32, float: out.add_float32, str: out.add_string}
    adds.get(type(value), out.add_array)(key, value)


def add_tensor(out: gguf.GGUFWriter, name: str, tensor: Tensor, kind: str) -> None:
    """Add a tensor: ids as they are, matrices in a type, all else in f32."""
    if not tensor.is_floating_point():
        out.add_tensor(name, tensor.long().numpy())
        return
    array = np.ascontiguousarray(tensor.detach().float().numpy())
    if kind == "q8_0" and array.shape[-1] % BLOCK:
        kind = "f16"
    if kind == "f32" or array.ndim != 2:
        out.add_tensor(name, array)
        return
    stored = gguf.GGMLQuantizationType[kind.upper()]
    out.add_tensor(name, gguf.quantize(array, stored), raw_dtype=stored)


def read_keys(file: Path, prefix: str) -> dict[str, Any]:
    """Return the keys of a file that begin with a prefix; raises UsageError for one that is no GGUF."""
    try:
        fields = gguf.GGUFReader(regular(file)).fields
    except (OSError, ValueError) as error:
        raise UsageError(
            f"{file} cannot be read as GGUF: {error}\n  name a file that llama.cpp's converter wrote"
        ) from None
    return {name: field.contents() for name, field in fields.items() if name.startswith(prefix)}
