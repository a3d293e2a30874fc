"""What the processes of a run know, and nobody else."""

from __future__ import annotations

import os
import secrets
from contextlib import suppress
from pathlib import Path
from tempfile import NamedTemporaryFile

from draftcore.errors import UsageError
from draftcore.files import regular

SHORTEST = 16  # characters


def secret(folder: Path) -> str:
    """Return the secret of the run in a folder.

    It is that of DRAFTCORE_SECRET, or lies in the folder, where whoever comes first makes it: 32 random
    bytes that only this user may read. Raises UsageError for one that others may read, or guess.
    """
    file, text = folder / "secret", os.environ.get("DRAFTCORE_SECRET")
    place = str(file) if text is None else "DRAFTCORE_SECRET"
    if text is None and not file.exists():
        folder.mkdir(parents=True, exist_ok=True)
        with NamedTemporaryFile("w", dir=folder) as partial:  # mode 0600
            partial.write(secrets.token_hex(32))
            partial.flush()
            with suppress(FileExistsError):
                os.link(partial.name, file)
    if text is None:
        if file.stat().st_mode & 0o077:
            raise UsageError(
                f"{file} may be read by others, who could join the run\n"
                "  delete it, chmod 600 it, or set DRAFTCORE_SECRET"
            )
        text = regular(file).read_text()
    if len(text) < SHORTEST:
        raise UsageError(
            f"{place} holds {len(text)} characters, which can be guessed: a secret has {SHORTEST} or more\n"
            "  delete it to have one made, or set it to what `openssl rand -hex 32` prints"
        )
    return text
