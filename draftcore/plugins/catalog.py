"""What our own distributions offer, installed or not: `catalog.toml`, for errors that say what to install."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from draftcore.errors import closest


def ours(kind: str, capability: str = "") -> dict[str, str]:
    """Return our dist of each name of a kind (or `verb`), or of those with a capability."""
    import tomllib  # 5 ms, for errors only

    data = tomllib.loads(Path(__file__).with_name("catalog.toml").read_text())
    return {
        name: dist
        for dist, kinds in data.items()
        for name, has in kinds.get(kind, {}).items()
        if not capability or capability in has
    }


def advice(kind: str, name: str, here: Collection[str]) -> tuple[str, str]:
    """Return a hint and a remedy for a name of which nothing is `here`."""
    known = ours(kind)
    near = closest(name, [*here, *known])
    hint = f" (did you mean {near!r}?)" if near not in ("", name) else ""
    if near in here or near not in known:
        return hint, "choose one that is there, or install the plugin that offers it"
    return hint, f"pip install {known[near]}" + f"   # for {near!r}" * bool(hint)


def lacking(kind: str, capability: str) -> str:
    """Say that no plugin here offers a kind with a capability, and which of our dists do."""
    dists = " or ".join(sorted(set(ours(kind, capability).values())))
    remedy = f"pip install {dists}" if dists else "install a plugin that offers one"
    return f"no {kind} with the capability {capability!r} is installed\n  {remedy}"
