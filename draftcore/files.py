"""Files that are written whole, or not at all."""

from __future__ import annotations

import os
from pathlib import Path


def write_atomic(file: Path, text: str) -> None:
    """Write a file so that a reader sees the old content or the new, whatever crashes."""
    file.parent.mkdir(parents=True, exist_ok=True)
    aside = file.with_name(f".{file.name}.{os.getpid()}")
    with aside.open("w", encoding="utf-8") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())
    aside.replace(file)
