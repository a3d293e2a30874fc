"""What an engine is told of an exported draft."""

from __future__ import annotations

from pathlib import Path

from draftcore import load_plugins
from draftcore.errors import UsageError, one_line
from draftcore.files import EXPORT, read_sealed


def served_as(export: Path, engine: str, option: str) -> str:
    """Return by what name an engine knows an export: as its algorithm says by the capability `engine:NAME`.

    `option` names it instead. Raises UsageError for a draft that says nothing of itself, or whose
    algorithm names nothing, or a worker of its own (`engine:MODULE:CLASS`).
    """
    try:
        algorithm = read_sealed(export / EXPORT)["algorithm"]
        name, plugin = algorithm["name"], algorithm["plugin"]
    except (OSError, ValueError, LookupError, TypeError):
        raise UsageError(
            f"{export} does not say what kind of draft it holds: {EXPORT} is not there, or was altered\n"
            f"  say by what name {engine} knows such drafts: --option {option}=NAME"
        ) from None
    offers = load_plugins().find("algorithm", name, plugin).offers
    known = (o.capabilities for o in offers if (o.kind, o.name) == ("algorithm", name))
    for word in sorted(frozenset[str]().union(*known)):
        server, _, found = word.partition(":")
        if server == engine and ":" not in found:
            return found
    raise UsageError(
        f"{engine} does not serve a draft of {one_line(name)!r}: its algorithm has no capability "
        f"`{engine}:NAME`\n  serve it by another engine, or set --option {option}=NAME"
    )
