"""What our own distributions offer, installed or not: `catalog.toml`, for errors that say what to install."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from draftcore.errors import closest


def ours(kind: str) -> dict[str, str]:
    """Return our dist of each name of a kind, or of each `verb`."""
    import tomllib  # 5 ms, for errors only

    text = Path(__file__).with_name("catalog.toml").read_text()
    return dict(tomllib.loads(text).get(kind, {}))


def advice(kind: str, name: str, here: Collection[str]) -> tuple[str, str]:
    """Return a hint and a remedy for a name of which nothing is `here`."""
    known = ours(kind)
    near = closest(name, [*here, *known])
    hint = f" (did you mean {near!r}?)" if near not in ("", name) else ""
    if near in here or near not in known:
        return hint, "choose one that is there, or install the plugin that offers it"
    return hint, f"pip install {known[near]}" + f"   # for {near!r}" * bool(hint)
