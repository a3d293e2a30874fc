"""Switch a server's part of the capture `sglang-server` on: sglang's plugin entry point.

sglang calls `register` in each of its processes, also for an engine that has nothing to do with a
run. Without `DRAFTCORE_SINK` in the environment it does nothing.

    DRAFTCORE_SINK=file:FOLDER  URI of the feature store that captured states go to
    DRAFTCORE_LAYERS=2,18,33    outputs of these layers, counted from 0; none: the last hidden state only
    DRAFTCORE_BUFFER=2GiB       pinned memory for captured states under way to the store

sglang fails open: where `register` raises, the server starts without it. Clients notice, as no
receipt comes, and the server's log has the reason.
"""

from __future__ import annotations

import os

from draftcore.errors import UsageError


def register() -> None:
    """Hook into the server. Raises UsageError for settings, and for an sglang that was not tested."""
    if not (sink := os.environ.get("DRAFTCORE_SINK", "")):
        return
    from draftcore.uris import holds_secret, parse_size

    if holds_secret(sink):
        raise UsageError(
            "DRAFTCORE_SINK holds a user name or a password, and clients learn where features lie\n"
            "  set secrets as the store's README says"
        )
    from draftcore_sglang.internals.server import install

    layers = read_layers(os.environ.get("DRAFTCORE_LAYERS", ""))
    install(sink, layers, parse_size(os.environ.get("DRAFTCORE_BUFFER", "2GiB")))


def read_layers(text: str) -> tuple[int, ...]:
    """Read `2,18,33`. Raises UsageError."""
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not all(part.isdecimal() for part in parts):
        raise UsageError(
            f"DRAFTCORE_LAYERS={text!r} is not a list of layers\n"
            "  write the algorithm's layers, counted from 0, with commas: 2,18,33"
        )
    return tuple(sorted({int(part) for part in parts}))
