"""What the processes of a run know and nobody else."""

from __future__ import annotations

import os
import secrets
from contextlib import suppress
from pathlib import Path
from tempfile import NamedTemporaryFile

from draftcore.errors import UsageError


def secret(folder: Path) -> str:
    """Return what the processes of the run in a folder know and nobody else.

    It comes from DRAFTCORE_SECRET, or from the folder, where whoever comes first makes it: 32 random
    bytes that only this user may read.
    """
    if text := os.environ.get("DRAFTCORE_SECRET"):
        return text
    file = folder / "secret"
    if not file.exists():
        folder.mkdir(parents=True, exist_ok=True)
        with NamedTemporaryFile("w", dir=folder) as partial:  # mode 0600
            partial.write(secrets.token_hex(32))
            partial.flush()
            with suppress(FileExistsError):
                os.link(partial.name, file)
    if file.stat().st_mode & 0o077:
        raise UsageError(
            f"{file} may be read by others, who could join the run\n"
            "  delete it, chmod 600 it, or set DRAFTCORE_SECRET"
        )
    return file.read_text()
