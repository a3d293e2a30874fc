"""What pip's metadata says of installed distributions, and the pip line for what is missing or broken.

Read with `importlib_metadata`, the backport: it survives stale folders and knows where an install
came from. A loose file is seen as a distribution whose name is its path.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast
from urllib.parse import unquote

import importlib_metadata
from importlib_metadata import Distribution, EntryPoint, PackageNotFoundError, distributions

from draftcore.errors import UsageError

BUILT_IN = "(built in)"  # how the dist draftcore itself is shown


class Dist(NamedTuple):
    """A distribution: normalised name, version ('' where METADATA is unreadable), requirements."""

    name: str
    version: str
    requires: tuple[str, ...] = ()
    origin: str = ""
    loose: bool = False


def entry_points(group: str, path: Sequence[str]) -> Iterator[tuple[EntryPoint, Dist]]:
    """Yield the entry points of a group, each dist's once though it may be on the path twice.

    A readable dist-info is preferred to a stale one and to the egg-info of a checkout, then the
    first on the path, as imports have it, and in one folder the newest.
    """
    known: dict[str, list[tuple[Any, Dist, Distribution]]] = {}
    for order, folder in enumerate(filter(os.path.exists, (folder or "." for folder in path))):
        for found in cast(Iterable[Distribution], distributions(path=[folder])):
            with contextlib.suppress(UnicodeDecodeError):  # no entry points anybody can read
                if f"[{group}]" in (found.read_text("entry_points.txt") or ""):
                    dist = _read(found)
                    numbers = [int(digits) for digits in re.findall(r"\d+", dist.version)]
                    rank = (bool(found.read_text("METADATA")), -order, numbers)
                    known.setdefault(dist.name, []).append((rank, dist, found))
    for same in known.values():
        _, dist, found = max(same, key=lambda item: item[0])
        yield from ((entry, dist) for entry in found.entry_points.select(group=group))


def _read(dist: Distribution) -> Dist:
    # by hand, as the email parser that `dist.metadata` imports takes 20 ms
    text = dist.read_text("METADATA") or dist.read_text("PKG-INFO") or ""
    names, versions, requires = (
        re.findall(rf"^{key}: (.*)", text.partition("\n\n")[0], re.MULTILINE)
        for key in ("Name", "Version", "Requires-Dist")
    )
    # private, but without METADATA the folder's own name is all that is left
    name = re.sub("[-_.]+", "-", (names or [dist._normalized_name])[0]).lower()
    return Dist(name, (versions or [""])[0], tuple(requires), _origin(dist))


def _origin(dist: Distribution) -> str:
    """Say what folder or commit was installed; '' for a release."""
    if not re.search("dir_info|vcs_info", dist.read_text("direct_url.json") or ""):
        return ""  # a release, or an archive of one: name and version say it all; no JSON is read
    try:
        url = dist.origin.url
        if vcs := getattr(dist.origin, "vcs_info", None):
            return f"{vcs.vcs}+{url}@{vcs.commit_id}"
        editable = "editable: " if getattr(dist.origin.dir_info, "editable", False) else ""
        return editable + unquote(url.removeprefix("file://"))
    except (ValueError, AttributeError):  # a strange one
        return ""


def loose(file: Path) -> Dist:
    """Make a Python file importable by its stem. Raises UsageError for one that cannot be."""
    if file.suffix != ".py" or not file.is_file():
        folder = file if file.is_dir() else file.parent
        near = ", ".join(sorted(p.name for p in folder.glob("*.py"))) or "none"
        raise UsageError(f"there is no file {file}\n  Python files in {folder}: {near}")
    if not file.stem.isidentifier():
        raise UsageError(
            f"{file} cannot be imported as a module {file.stem!r}\n"
            "  rename it: letters, digits and '_', and no digit first"
        )
    if str(file.parent) not in sys.path:
        sys.path.append(str(file.parent))  # last, so that it hides no installed module
    import hashlib  # 4 ms, for loose files only

    digest = hashlib.sha256(file.read_bytes()).hexdigest()[:12]
    return Dist(str(file), f"sha256:{digest}", loose=True)


def unmet(
    requires: Iterable[str], version_of: Callable[[str], str] = importlib_metadata.version
) -> Sequence[str]:
    """Return the requirements, without their markers, that `version_of` does not satisfy."""
    from packaging.requirements import InvalidRequirement, Requirement  # 20 ms

    lacking = []
    for line in requires:
        try:
            need = Requirement(line)
            idle = need.marker is not None and not need.marker.evaluate({"extra": ""})
            met = idle or need.specifier.contains(version_of(need.name), prereleases=True)
        except (InvalidRequirement, PackageNotFoundError):
            met = False
        if not met:
            lacking.append(line.partition(";")[0].strip())
    return lacking


def refused(requires: Iterable[str], name: str, version: str) -> Sequence[str]:
    """Return the requirements on the dist `name` that exclude this version of it."""
    lines = [line for line in requires if re.match(rf"{name}(?![\w.-])", line, re.IGNORECASE)]
    unclear = [line for line in lines if not _plainly_met(line, version)]
    return unmet(unclear, lambda _: version) if unclear else ()


def _plainly_met(line: str, version: str) -> bool:
    """Say that NAME>=X.Y,<X.Z admits a release, where that needs no more than comparing numbers.

    Nearly every plugin bounds the core this way; `packaging`, which knows the rest, takes 30 ms.
    """
    clauses = sorted(re.sub(r"^[\w-]+| ", "", line).split(","))
    bounds = re.fullmatch(r"<(\d+(?:\.\d+)*),>=(\d+(?:\.\d+)*)", ",".join(clauses))
    if not (bounds and re.fullmatch(r"\d+(\.\d+)*", version)):
        return False
    high, low, this = (
        [int(part) for part in text.split(".")] + [0] * (8 - text.count("."))
        for text in (bounds[1], bounds[2], version)
    )
    return low <= this < high


def remedy(error: BaseException, module: str, dist: str, requires: Sequence[str]) -> str:
    """Return the command that repairs a failed import of `module`, or shows where it fails."""
    module = module.partition(":")[0]
    if not isinstance(error, ImportError):
        return f"python -c 'import {module}'   # shows where it fails"
    lacking = (error.name or module).partition(".")[0]
    if lacking in ("draftcore", module.partition(".")[0]):
        return f"pip install --force-reinstall {pip_name(dist)}"
    return install(unmet(requires) or [lacking])


def pip_name(shown: str) -> str:
    """Return the name that pip knows of a dist as it is shown."""
    return "draftcore" if shown == BUILT_IN else shown


def install(requirements: Iterable[str]) -> str:
    """Return the pip line for these requirements, quoted for a shell."""
    import shlex

    return f"pip install {shlex.join(requirements)}"


def missing(manifest: Iterable[Mapping[str, str]], here: Collection[str]) -> str:
    """Say what brings back the entries of a run's manifest that are not `here` in any version."""
    lines = ["this was made with plugins that are not here:"]
    for name, dist, version in ((e["name"], e["dist"], e["version"]) for e in manifest):
        if name not in here:
            pinned = install([f"{pip_name(dist)}=={version}"])
            get = f"--plugin {dist}" if version.startswith("sha256:") else pinned
            lines.append(f"  {name} {version}: {get}")
    return "\n".join(lines) if lines[1:] else ""
